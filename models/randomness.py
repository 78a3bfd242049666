"""Random words on the device, each a pure function of a slot's key and of the word's place.

Philox4x32-10 (Salmon et al. 2011, doi 10.1145/2063384.2063405), as GPUs and numpy have it, but with a key for
every slot of the batch: a slot draws the same in whatever batch, on whatever process and device it is. What
needs random numbers gets the keys of its slots from outside (`draw_keys`).

Dropout takes keys, which are tensors: it is inside of compiled blocks, where a name for each call would be
one more graph to compile. Noise on states is outside of them, and goes by names (`models.noise`).
"""

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF

# Keeps the keys apart from other uses of the run's seed (`models.halting`).
_KEYS_STREAM = 2


def draw_keys(*, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Draws a key for each slot of the *global* batch in `step`: int64 [batch_size], pure in (seed, step).

    They are below 2**62: a slot that needs several adds small numbers to its own.
    """
    generator = np.random.Philox(key=_KEYS_STREAM << 64 | seed, counter=[0, 0, 1, step])
    return (generator.random_raw(batch_size) >> np.uint64(2)).astype(np.int64)


def random_words(keys: Tensor, count: int, *, stream: int) -> Tensor:
    """Makes the words of (key, stream): int64 [len(keys), count], each from 0 to below 2**32, uniform.

    keys: int64, not negative. A smaller count gives a prefix of a larger one.
    """
    places = torch.arange(-(-count // 4), device=keys.device)
    zeros = torch.zeros_like(places)
    words = philox((places, zeros + stream, zeros, zeros), (keys[:, None] & _MASK, keys[:, None] >> 32))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """Makes four random words of the four words of a counter and the two of a key: int64, below 2**32.

    All broadcast. Products are modulo 2**64, so that their sign is but one more bit.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0).bitwise_and_(_MASK)
        c2 = ((p0 >> 32) ^ c3 ^ k1).bitwise_and_(_MASK)
        c1, c3 = p1.bitwise_and_(_MASK), p0.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3
