"""Random numbers on the device, each a pure function of a seed, a step, a slot and a use.

The generator is Philox4x32-10 (Salmon et al. 2011, doi 10.1145/2063384.2063405), as in numpy and on GPUs, but
with a counter for every slot of the batch. Invariant: what a slot draws depends on nothing else in the batch,
so that neither the batch size nor the number of processes changes a number, and nothing is saved.

Dropout takes keys, which are tensors, since it runs inside compiled blocks, where a name for each call would
be one more graph to compile. Noise on states is drawn outside of these blocks, by names (`Draws`).
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
# Streams of a run's seed: other uses of the seed have other numbers.
_EXPLORATION_STREAM, _KEYS_STREAM = 1, 2

CUT = 2.0  # truncated draws end at so many standard deviations of the normal, ...
# ... between which lies this share of it, with this standard deviation.
_SHARE = math.erf(CUT / math.sqrt(2))
STD_AFTER_CUT = math.sqrt(1 - 2 * CUT * math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi) / _SHARE)


def draw_uniform(*, seed: int, step: int, count: int) -> np.ndarray:
    """Draws `count` numbers in [0, 1) for the global batch of a training step: float64."""
    generator = np.random.Philox(key=_EXPLORATION_STREAM << 64 | seed, counter=[0, 0, 1, step])
    return (generator.random_raw(count) >> np.uint64(11)) * 2.0**-53


def draw_keys(*, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Draws a key for each slot of the global batch of a training step: int64 [batch_size], below 2**62.

    A slot that needs several keys adds small numbers to its own.
    """
    generator = np.random.Philox(key=_KEYS_STREAM << 64 | seed, counter=[0, 0, 1, step])
    return (generator.random_raw(batch_size) >> np.uint64(2)).astype(np.int64)


def random_bits(keys: Tensor, count: int, *, stream: int) -> Tensor:
    """Makes uniform numbers from 0 to below 2**32 of each (key, stream): int64 [len(keys), count].

    keys: int64, not negative. A smaller count gives a prefix of a larger one.
    """
    blocks = torch.arange(-(-count // 4), device=keys.device)
    zeros = torch.zeros_like(blocks)
    bits = philox((blocks, zeros + stream, zeros, zeros), (keys[:, None] & _MASK, keys[:, None] >> 32))
    return torch.stack(bits, dim=-1).flatten(1)[:, :count]


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """Makes four random numbers below 2**32, int64, from a counter of four and a key of two; all broadcast.

    Products are modulo 2**64, so that their sign is but one more bit.
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


@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of one step of some slots.

    key: 64 bits. counters: int64 [batch, 2], below 2**32 each, different for every step of every slot.
    arrays: [batch, ...] each, what the network draws for the global batch (`Network.draw`). Uses have names;
    numbers for different uses are independent.
    """

    key: int
    counters: Tensor
    arrays: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_training(
        cls, seed: int, *, step: int, slots: range, device: torch.device, **arrays: Tensor
    ) -> Draws:
        """Makes the draws of update `step` of a run. slots: of the global batch."""
        numbers = torch.arange(slots.start, slots.stop, device=device)
        return cls(seed, torch.stack([torch.full_like(numbers, step), numbers], dim=1), arrays)

    @classmethod
    def of_evaluation(cls, seed: int, *, rows: Tensor, samples: Tensor, steps: Tensor) -> Draws:
        """Makes the draws of an evaluation, independent of a training with the same seed.

        rows: int64 [batch], the puzzle's position in its set. samples: int64 [batch], from 0. steps: int32
        [batch], from 1.
        """
        return cls(seed | 1 << 63, torch.stack([rows & _MASK, samples << 16 | steps.long()], dim=1))

    def __getitem__(self, slots: slice | Tensor) -> Draws:
        """Returns the draws of some of the slots."""
        arrays = {name: array[slots] for name, array in self.arrays.items()}
        return Draws(self.key, self.counters[slots], arrays)

    def normal(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Draws standard normal numbers, float32 [batch, *shape], for this use. None is beyond 5.2."""
        return math.sqrt(2) * torch.erfinv(self._symmetric(shape, use))

    def truncated_normal(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Draws numbers of a normal distribution cut at 2 sigma, after which the standard deviation is 1."""
        return math.sqrt(2) / STD_AFTER_CUT * torch.erfinv(_SHARE * self._symmetric(shape, use))

    def uniform(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Draws numbers strictly between 0 and 1: float32 [batch, *shape]."""
        return (self._symmetric(shape, use) + 1) / 2

    def integers(self, shape: Sequence[int], *, below: int, use: str) -> Tensor:
        """Draws whole numbers from 0 to below `below`: int64 [batch, *shape]."""
        return (self.uniform(shape, use=use).double() * below).long()

    def _symmetric(self, shape: Sequence[int], use: str) -> Tensor:
        """Draws odd multiples of 2**-23 between -1 and 1, which float32 holds exactly."""
        size = math.prod(shape)
        blocks = torch.arange(-(-size // 4), device=self.counters.device)[None]
        name = torch.tensor([[zlib.crc32(use.encode())]], device=self.counters.device)
        key = self.key & _MASK, self.key >> 32
        bits = philox((blocks, name, *self.counters[:, :, None].unbind(1)), key)
        bits = torch.cat(bits, dim=1)[:, :size].reshape(-1, *shape)
        return ((bits >> 9).float() + 0.5) * 2.0**-22 - 1
