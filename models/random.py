"""Random numbers of thinking steps. Each is a pure function of the seed, the step, the slot and a purpose.

A slot is a position of the global batch. The random numbers of a slot do not depend on the number of
processes, and a checkpoint contains no generator state. They do not depend on the batch size either, except
`min_steps` of `sample_exploration` (models/halting.py). In an evaluation, the example and the index of its
sample replace the slot. The generator is Philox4x32-10 (Salmon et al. 2011, doi 10.1145/2063384.2063405), as
in numpy and on GPUs. In `SlotRng`, each slot has its own counter.

`SlotRng` samples on the device. The purpose is a text, the argument `use`, such as "picked board". Dropout
uses integer keys instead (`random_bits`), because dropout runs inside compiled blocks. There, torch would
compile a graph for every text.
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
# Indices of independent streams from the seed of a run.
_EXPLORATION_STREAM, _KEYS_STREAM = 1, 2

CUT = 2.0  # truncated normal numbers are in [-CUT, CUT], in units of sigma
# Fraction of a normal distribution that is within the cut, and the standard deviation of this part, in sigma.
_SHARE = math.erf(CUT / math.sqrt(2))
STD_AFTER_CUT = math.sqrt(1 - 2 * CUT * math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi) / _SHARE)


def sample_uniform(*, seed: int, step: int, count: int) -> np.ndarray:
    """Returns uniform random numbers in [0, 1) for training step `step`: float64 [count].

    With a smaller `count`, the result contains the first numbers of the result with a larger `count`. Runs on
    the host.
    """
    generator = np.random.Philox(key=_EXPLORATION_STREAM << 64 | seed, counter=[0, 0, 1, step])
    return (generator.random_raw(count) >> np.uint64(11)) * 2.0**-53


# Small numbers may be added to a key, if several keys are needed.
def sample_keys(*, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Returns a random key for each slot of the global batch: int64 [batch_size].

    The keys are in [0, 2**62). Runs on the host.
    """
    generator = np.random.Philox(key=_KEYS_STREAM << 64 | seed, counter=[0, 0, 1, step])
    return (generator.random_raw(batch_size) >> np.uint64(2)).astype(np.int64)


def random_bits(keys: Tensor, count: int, *, stream: int) -> Tensor:
    """Returns `count` uniform integers in [0, 2**32) for each key: int64 [n, count].

    With a smaller `count`, the result contains the first columns of the result with a larger `count`.

    keys: int64 [n], not negative. stream: Different values give independent integers for the same keys.
    """
    blocks = torch.arange(-(-count // 4), device=keys.device)
    zeros = torch.zeros_like(blocks)
    bits = philox((blocks, zeros + stream, zeros, zeros), (keys[:, None] & _MASK, keys[:, None] >> 32))
    return torch.stack(bits, dim=-1).flatten(1)[:, :count]


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """Computes random integers with the generator Philox4x32-10 (doi 10.1145/2063384.2063405).

    Returns four int64 tensors of integers below 2**32.

    counter: Four tensors of integers below 2**32. key: Two such tensors, or two integers below 2**32. Counter
    and key are broadcast.
    """
    # Products of up to 2**64 may make int64 values negative. This is harmless, because only their lower and
    # upper 32 bits are used.
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
class SlotRng:
    """A source of random numbers for one thinking step of some slots.

    Each slot has its own numbers. Every sampling method has an argument `use`, a text that names
    the purpose, such as "hints". Different texts give independent numbers. The same text gives the same
    numbers again.

    Attributes:
        key: Integer of 64 bits, from the seed of the run.
        counters: int64 [batch, 2], below 2**32. Different for every step and slot.
        arrays: Numbers that `Network.sample_randomness` sampled on the host, {name: [batch, ...]}.
    """

    key: int
    counters: Tensor
    arrays: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_training(
        cls, seed: int, *, step: int, slots: range, device: torch.device, **arrays: Tensor
    ) -> SlotRng:
        """Creates the source of random numbers of a training step.

        step: The training step, from 1. slots: Indices of the slots in the global batch, such as range(0,
        64). arrays: Entries of these slots in the arrays from `Network.sample_randomness`, each [slots, ...].
        """
        numbers = torch.arange(slots.start, slots.stop, device=device)
        return cls(seed, torch.stack([torch.full_like(numbers, step), numbers], dim=1), arrays)

    @classmethod
    def of_evaluation(cls, seed: int, *, rows: Tensor, samples: Tensor, steps: Tensor) -> SlotRng:
        """Creates the source of random numbers of one thinking step in an evaluation.

        Its numbers are independent of those of training.

        rows: Index of each example in its test set, int64 [batch]. samples: Index of the sample (one of
        several answers to the same example), from 0, int64 [batch]. steps: Number of thinking steps
        that the example has had, including this one, int32 [batch].
        """
        return cls(seed | 1 << 63, torch.stack([rows & _MASK, samples << 16 | steps.long()], dim=1))

    def __getitem__(self, slots: slice | Tensor) -> SlotRng:
        """Returns the source for some slots. slots: A slice, or indices (int64 [n])."""
        arrays = {name: array[slots] for name, array in self.arrays.items()}
        return SlotRng(self.key, self.counters[slots], arrays)

    def normal(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Returns standard normal numbers: float32 [batch, *shape].

        Each is computed from 23 random bits, so its absolute value is at most 5.3.

        use: Purpose, such as "hints". The same text gives the same numbers.
        """
        return math.sqrt(2) * torch.erfinv(self._symmetric(shape, use))

    def truncated_normal(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Returns numbers from a truncated normal distribution: float32 [batch, *shape].

        A normal distribution is cut at 2 of its standard deviations, then scaled to standard deviation 1. So
        the numbers are in [-2.28, 2.28].

        use: Purpose, such as "hints". The same text gives the same numbers.
        """
        return math.sqrt(2) / STD_AFTER_CUT * torch.erfinv(_SHARE * self._symmetric(shape, use))

    def uniform(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Returns uniform numbers in (0, 1): float32 [batch, *shape].

        use: Purpose, such as "hints". The same text gives the same numbers.
        """
        return (self._symmetric(shape, use) + 1) / 2

    def integers(self, shape: Sequence[int], *, below: int, use: str) -> Tensor:
        """Returns uniform integers from 0 to below - 1: int64 [batch, *shape].

        below: At most 2**23. use: Purpose, such as "hints". The same text gives the same integers.
        """
        return ((2 * self._bits(shape, use) + 1) * below) >> 24

    # Uniform between -1 and 1: odd multiples of 2**-23, exact in float32.
    def _symmetric(self, shape: Sequence[int], use: str) -> Tensor:
        return (self._bits(shape, use).float() + 0.5) * 2.0**-22 - 1

    # Uniform integers below 2**23.
    def _bits(self, shape: Sequence[int], use: str) -> Tensor:
        size = math.prod(shape)
        blocks = torch.arange(-(-size // 4), device=self.counters.device)[None]
        name = torch.tensor([[zlib.crc32(use.encode())]], device=self.counters.device)
        key = self.key & _MASK, self.key >> 32
        bits = philox((blocks, name, *self.counters[:, :, None].unbind(1)), key)
        return torch.cat(bits, dim=1)[:, :size].reshape(-1, *shape) >> 9
