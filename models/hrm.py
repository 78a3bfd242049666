"""The Hierarchical Reasoning Model (HRM, arXiv 2506.21734): a slow and a fast level, called in turns."""

from typing import Any

from config.architecture import HRMConfig
from dataset.format import Metadata
from models.recursion import RecursiveNetwork


class HRM(RecursiveNetwork):
    """The network of HRM: two levels with different weights; H updates z_H, L updates z_L."""

    def __init__(self, arch: HRMConfig, metadata: Metadata, **options: Any):
        levels = {"L_level": arch.L_layers, "H_level": arch.H_layers}
        super().__init__(arch, metadata, levels=levels, **options)


NETWORK = HRM
