"""Random numbers for states, each a pure function of the seed and of its place.

The generator is counter-based: Philox 4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"), in integer operations of torch. Invariant: what a slot draws depends on nothing else in the
batch, so that neither the batch size nor the number of processes changes a number, and nothing is saved.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_STEPS = MOST_SAMPLES = (1 << 16) - 1  # that a place in an evaluation can name

_WORD = (1 << 32) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
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

    def select(self, slots: slice | Tensor) -> Draws:
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
        words = philox((blocks, where, *self.places[:, :, None].unbind(1)), self.key)
        words = torch.cat(words, dim=1)[:, :size].reshape(-1, *shape)
        return ((words >> 9).float() + 0.5) * 2.0**-22 - 1


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, ...]:
    """Computes the four random words at a counter of four words: int64 holding 32 bits, of shapes that
    broadcast. key: 64 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, key >> 32
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # modulo 2**64: the sign is but one more bit
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, c3 = p1.bitwise_and_(_WORD), p0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _WORD, (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3
