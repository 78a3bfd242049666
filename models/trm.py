"""The Tiny Recursive Model (arXiv 2510.04871): one small level that updates both z_L and z_H."""

from typing import Protocol

from models.layers import Level
from models.recursion import RecursiveArchitecture, RecursiveNetwork


class TRMArchitecture(RecursiveArchitecture, Protocol):
    """What TRM reads of its config beside the rest."""

    L_layers: int


class TRM(RecursiveNetwork):
    """One level, whose input tells which of the two it updates: only z_L sees the question e."""

    def __init__(self, arch: TRMArchitecture, **facts: int):
        super().__init__(arch, levels={"L_level": arch.L_layers}, **facts)

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        return self.L_level, self.L_level
