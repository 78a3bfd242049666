"""Counts floating-point operations, from the shapes of weights and inputs.

Counted are, as in torch's FlopCounterMode, multiplications and additions of matrix products and convolutions,
but no elementwise operations, no optimizer, and no recomputation by `activation_checkpointing`.
"""

import math

from torch import Tensor, nn

Shape = tuple[int, ...]  # of an input, without the batch


def flops(module: nn.Module, shape: Shape, *, trains: bool = False) -> int:
    """Counts the operations of a module on one input, on all tensor-parallel ranks together.

    Calls the module's method `flops` if it has one; otherwise counts a matrix `weight` as a product at every
    position, or adds up the submodules. trains: whether to add the backward pass: the operations once more
    for the input, and once more for weights that need a gradient.
    """
    num_shares = getattr(module, "num_shares", 1)  # number of ranks that divide the module's weights
    if hasattr(module, "flops"):
        return num_shares * module.flops(shape, trains=trains)
    if getattr(module, "weight", None) is not None and module.weight.ndim > 1:
        return weight_flops(module.weight, shape, trains=trains)
    return num_shares * sum(flops(part, shape, trains=trains) for part in module.children())


def weight_flops(weight: Tensor, shape: Shape, *, trains: bool = False) -> int:
    """Counts the operations of multiplying an input of this shape by `weight` at every position."""
    passes = 2 + weight.requires_grad if trains else 1
    return passes * 2 * weight.numel() * math.prod(shape[:-1])
