"""Random bits and orders that are equal on every machine and with every numpy version.

numpy guarantees that the raw bits of its counter-based generator Philox do not change between versions. It
does not guarantee this for `numpy.random.Generator`. So this folder computes all random values from raw
64-bit integers: orders by sorting them, coin flips from the highest bit. The integers are a function of
(seed, stream, index). Each purpose has its own stream, a number.
"""

import hashlib

import numpy as np


def random_bits(seed: int, *, stream: int, index: int, count: int) -> np.ndarray:
    """Returns `count` random integers, uint64. They depend only on seed, stream and index.

    A smaller `count` returns the first of the same integers. Integers of different streams or indices are
    independent.

    stream: Number that stands for a purpose, such as the choice of test puzzles. index: Index of the epoch,
    puzzle or task.
    """
    return np.random.Philox(key=stream << 64 | seed, counter=index << 64).random_raw(count)


def name_index(name: str) -> int:
    """Converts the name of a puzzle or task to an integer, to use as `index` of `random_bits`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def random_orders(bits: np.ndarray) -> np.ndarray:
    """Converts random integers to random permutations of 0 to k - 1: int64 [..., k].

    bits: Random integers, uint64 [..., k].
    """
    # The position replaces the lowest bits of each integer. So no two integers are equal, and every sorting
    # algorithm gives the same order. This takes a third of the time of a stable argsort.
    length = bits.shape[-1]
    low = np.uint64((1 << (length - 1).bit_length()) - 1)
    packed = bits & ~low
    packed |= np.arange(length, dtype=np.uint64)
    packed.sort(axis=-1)
    packed &= low
    return packed.view(np.int64)


def random_below(bits: np.ndarray, bounds: int | np.ndarray) -> np.ndarray:
    """Converts random uint64 integers to uniform integers from 0 to `bounds` - 1, int64.

    bounds: One bound for all integers, or an array that is broadcast with `bits`.
    """
    return ((bits >> np.uint64(32)) * np.asarray(bounds, np.uint64) >> np.uint64(32)).astype(np.int64)


class BitStream:
    """Random integers that depend only on a seed, a stream and an index.

    Call `seek` to select the index, such as the epoch, then `read`. A `BitStream` is faster than many calls
    of `random_bits`. Do not use both with the same stream, because they return equal integers for index 0.
    """

    def __init__(self, seed: int, *, stream: int):
        self._philox = np.random.Philox(key=stream << 64 | seed)
        self._state = self._philox.state

    def seek(self, index: int) -> None:
        self._state["state"]["counter"] = [0, 0, 0, index]
        self._philox.state = self._state

    def read(self, count: int) -> np.ndarray:
        """Returns the next `count` random integers, uint64."""
        return self._philox.random_raw(count)
