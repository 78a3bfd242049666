"""Random bits and orders that are the same on every machine and with every numpy version.

numpy guarantees the raw bits of its counter-based generator Philox for all versions, but not what
`numpy.random.Generator` makes of them. So everything random in this folder is made of raw 64-bit integers:
orders by sorting, coins from the highest bit. The integers are a function of (seed, stream, index); each use
has a number of its own as its stream.
"""

import numpy as np


def random_bits(seed: int, *, stream: int, index: int, count: int) -> np.ndarray:
    """Draws `count` random integers, uint64: the raw bits of Philox at (seed, stream, index).

    A smaller count gives a prefix of a larger one.
    """
    return np.random.Philox(key=stream << 64 | seed, counter=index << 64).random_raw(count)


def random_orders(bits: np.ndarray) -> np.ndarray:
    """Makes one permutation of 0 .. k - 1 for each row of the last axis, int64. bits: uint64 [..., k].

    The integers are sorted after the position has replaced their lowest bits. So no two are equal, every
    sorting algorithm gives the same order, and sorting takes a third of the time of a stable argsort.
    """
    length = bits.shape[-1]
    low = np.uint64((1 << (length - 1).bit_length()) - 1)
    packed = bits & ~low
    packed |= np.arange(length, dtype=np.uint64)
    packed.sort(axis=-1)
    packed &= low
    return packed.view(np.int64)


def random_below(bits: np.ndarray, bounds: int | np.ndarray) -> np.ndarray:
    """Turns random bits, uint64, into int64 from 0 to bound - 1, uniform up to 2**-32; shapes broadcast."""
    return ((bits >> np.uint64(32)) * np.asarray(bounds, np.uint64) >> np.uint64(32)).astype(np.int64)


class BitStream:
    """A reader of the random bits of one (seed, stream): `seek` an index, then `read` from there.

    `seek` takes a tenth of the time of a new generator, which matters where a plan draws every epoch of a
    run. At index 0 `random_bits` draws the same bits: no stream may be used by both.
    """

    def __init__(self, seed: int, *, stream: int):
        self._philox = np.random.Philox(key=stream << 64 | seed)
        self._state = self._philox.state

    def seek(self, index: int) -> None:
        self._state["state"]["counter"] = [0, 0, 0, index]
        self._philox.state = self._state

    def read(self, count: int) -> np.ndarray:
        """Returns the next random integers, uint64 [count]."""
        return self._philox.random_raw(count)
