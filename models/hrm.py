"""The Hierarchical Reasoning Model (arXiv 2506.21734): a slow and a fast level refining each other."""

from typing import Protocol

import torch
from torch import Tensor

from models.network import Architecture, Network, State


class HRMArchitecture(Architecture, Protocol):
    """What HRM reads of its config beside the rest."""

    H_cycles: int
    L_cycles: int
    H_layers: int
    L_layers: int


class HRM(Network):
    """H_cycles x (L_cycles fast updates, then one slow update), two levels with their own weights."""

    def __init__(self, arch: HRMArchitecture, **facts: int):
        super().__init__(arch, levels={"L_level": arch.L_layers, "H_level": arch.H_layers}, **facts)
        self.H_cycles, self.L_cycles = arch.H_cycles, arch.L_cycles

    def reason(self, state: State, e: Tensor, rotary: tuple[Tensor, Tensor] | None) -> State:
        """The one-step gradient (section 2 of the paper): only the very last L and H call carry gradient."""
        z_H, z_L = state
        with torch.no_grad():
            for cycle in range(self.H_cycles):
                is_last = cycle == self.H_cycles - 1
                for _ in range(self.L_cycles - is_last):
                    z_L = self.L_level(z_L, z_H + e, rotary)
                if not is_last:
                    z_H = self.H_level(z_H, z_L, rotary)
        z_L = self.L_level(z_L, z_H + e, rotary)
        z_H = self.H_level(z_H, z_L, rotary)
        return State(z_H, z_L)
