"""The Tiny Recursive Model (arXiv 2510.04871): one small level that updates both z_L and z_H."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataset.format import Metadata
from models.layers import Level
from models.recursion import RecursiveNetwork

if TYPE_CHECKING:
    from config.architecture import TRMConfig


class TRM(RecursiveNetwork):
    """One level, whose input tells which of the two it updates: only z_L sees the question e."""

    def __init__(self, arch: TRMConfig, metadata: Metadata):
        super().__init__(arch, metadata, levels={"L_level": arch.L_layers})

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        return self.L_level, self.L_level


NETWORK = TRM
