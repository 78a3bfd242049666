"""The recurrence that HRM and TRM share: z_L is refined several times, then z_H once, and again.

What makes the two models different is which levels do it, and how much of it carries gradient. Which tensors
a network keeps between steps, `models.network` says.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataset.format import Metadata
from models.layers import Level
from models.network import Network, Rotary, State
from models.noise import Draws

if TYPE_CHECKING:
    from config.architecture import RecursiveConfig


class RecursiveNetwork(Network):
    """H_cycles x (L_cycles times z_L = L(z_L, z_H + e), then z_H = H(z_H, z_L)).

    Of this the last `gradient_cycles` H cycles carry gradient; 0 means the very last L and the very last H
    call alone, the one-step gradient (section 2 of arXiv 2506.21734).

    With damping d a call of a level makes of z (1 - d) z + d L(...), and with state_noise adds normal noise
    (EqR).
    """

    def __init__(self, arch: RecursiveConfig, metadata: Metadata, *, levels: dict[str, int]):
        super().__init__(arch, metadata, levels=levels)
        self.H_cycles, self.L_cycles = arch.H_cycles, arch.L_cycles
        self.gradient_cycles = arch.gradient_cycles

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        """Returns the levels that update z_H and z_L."""
        raise NotImplementedError

    def reason(self, state: State, e: Tensor, rotary: Rotary | None, draws: Draws | None) -> State:
        H_level, L_level = self.slow_and_fast
        z_H, z_L = state["z_H"], state["z_L"]
        for cycle in range(self.H_cycles):
            is_last = cycle == self.H_cycles - 1
            with_gradient = self.H_cycles - cycle <= self.gradient_cycles
            injection = z_H + e
            for call in range(self.L_cycles):
                is_last_call = is_last and call == self.L_cycles - 1
                with _gradient(with_gradient or is_last_call):
                    z_L = self._update(z_L, L_level(z_L, injection, rotary), draws, use=f"z_L {cycle} {call}")
            with _gradient(with_gradient or is_last):
                z_H = self._update(z_H, H_level(z_H, z_L, rotary), draws, use=f"z_H {cycle}")
        return {"z_H": z_H, "z_L": z_L}

    def _update(self, z: Tensor, proposed: Tensor, draws: Draws | None, *, use: str) -> Tensor:
        """Computes what a call of a level makes of z: what it proposes, damped, and with noise."""
        if self.damping != 1:
            proposed = torch.lerp(z, proposed, self.damping)
        return self.plus_noise(proposed, self.state_noise, draws, use=use)


def _gradient(is_wanted: bool) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if is_wanted else torch.no_grad()
