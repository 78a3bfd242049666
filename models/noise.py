"""Noise for states, each number a pure function of the seed and of its place (`models.randomness`).

Invariant: what a slot draws depends on nothing else in the batch, so that neither the batch size nor the
number of processes changes a number, and nothing is saved.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from models.randomness import philox

MOST_STEPS = MOST_SAMPLES = (1 << 16) - 1  # that a place in an evaluation can name

_WORD = (1 << 32) - 1
_CUT = 2.0  # truncated draws end at so many standard deviations of the normal, ...
# ... between which lies this share of it, with this standard deviation.
_SHARE = math.erf(_CUT / math.sqrt(2))
_STD_AFTER_CUT = math.sqrt(1 - 2 * _CUT * math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi) / _SHARE)


@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of one step of some slots.

    key: 64 bits. places: int64 [batch, 2], below 2**32 each: what tells this step of this slot from all
    others. Numbers for different uses, which have names, are independent.
    """

    key: int
    places: Tensor

    @classmethod
    def of_training(cls, seed: int, *, step: int, slots: slice, device: torch.device) -> Draws:
        """Makes those of update `step` of a run. slots: of the global batch."""
        numbers = torch.arange(slots.start, slots.stop, device=device)
        return cls(seed, torch.stack([torch.full_like(numbers, step), numbers], dim=1))

    @classmethod
    def of_evaluation(cls, seed: int, *, rows: Tensor, samples: Tensor, steps: Tensor) -> Draws:
        """Makes those of an evaluation, keyed apart from those of a training with the same seed.

        rows: int64 [batch], the puzzle's place in its set. samples: int64 [batch], from 0. steps: int32
        [batch], from 1.
        """
        return cls(seed | 1 << 63, torch.stack([rows & _WORD, samples << 16 | steps.long()], dim=1))

    def __getitem__(self, slots: slice | Tensor) -> Draws:
        """Returns those of some of the slots."""
        return dataclasses.replace(self, places=self.places[slots])

    def normal(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Draws standard normal numbers, float32 [batch, *shape], for this use. None is beyond 5.2."""
        return math.sqrt(2) * torch.erfinv(self._uniform(shape, use))

    def truncated_normal(self, shape: Sequence[int], *, use: str) -> Tensor:
        """Draws numbers of a normal distribution cut at 2 sigma, after which the standard deviation is 1."""
        return math.sqrt(2) / _STD_AFTER_CUT * torch.erfinv(_SHARE * self._uniform(shape, use))

    def _uniform(self, shape: Sequence[int], use: str) -> Tensor:
        """Draws multiples of 2**-23 between -1 and 1, which float32 holds exactly."""
        size = math.prod(shape)
        blocks = torch.arange(-(-size // 4), device=self.places.device)[None]
        where = torch.tensor([[zlib.crc32(use.encode())]], device=self.places.device)
        key = self.key & _WORD, self.key >> 32
        words = philox((blocks, where, *self.places[:, :, None].unbind(1)), key)
        words = torch.cat(words, dim=1)[:, :size].reshape(-1, *shape)
        return ((words >> 9).float() + 0.5) * 2.0**-22 - 1
