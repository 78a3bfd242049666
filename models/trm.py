"""The Tiny Recursive Model (TRM, arXiv 2510.04871): one small level that updates both z_L and z_H."""

from typing import Any

from config.architecture import TRMConfig
from dataset.format import Metadata
from models.recursion import RecursiveNetwork


class TRM(RecursiveNetwork):
    """The network of TRM: one level for both states; only the update of z_L reads the embedded puzzle.

    With `single_z` (table 2 of the paper) there is one state, z_H, for answer and reasoning.
    """

    def __init__(self, arch: TRMConfig, metadata: Metadata, **options: Any):
        if arch.single_z:
            self.state_names = ("z_H",)
        super().__init__(arch, metadata, levels={"L_level": arch.L_layers}, **options)


NETWORK = TRM
