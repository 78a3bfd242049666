"""The Hierarchical Reasoning Model (arXiv 2506.21734): a slow and a fast level refining each other."""

from typing import Protocol

from models.layers import Level
from models.recursion import RecursiveArchitecture, RecursiveNetwork


class HRMArchitecture(RecursiveArchitecture, Protocol):
    """What HRM reads of its config beside the rest."""

    H_layers: int
    L_layers: int


class HRM(RecursiveNetwork):
    """Two levels with their own weights."""

    def __init__(self, arch: HRMArchitecture, **facts: int):
        super().__init__(arch, levels={"L_level": arch.L_layers, "H_level": arch.H_layers}, **facts)

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        return self.H_level, self.L_level
