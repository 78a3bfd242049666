"""What a step computes: its floating-point operations, from the sizes of the weights and of the data.

Counted are products of matrices and convolutions, a multiplication and an addition each, as torch's
FlopCounterMode does. Left out are what is elementwise, the optimizer (with Muon's products of matrices), and
what `activation_checkpointing` computes a second time.
"""

import math

from torch import Tensor, nn

Shape = tuple[int, ...]  # of an input, without the batch


def flops(module: nn.Module, shape: Shape, *, trains: bool = False) -> int:
    """Counts the operations of a module on one input: its own `flops`, else the sum over its parts.

    A part with a matrix as `weight` multiplies by it at every position. trains: with the backward pass, which
    takes as many again for the input, and as many for weights that are trained.
    """
    num_shares = getattr(module, "num_shares", 1)  # equal ones, on as many ranks
    if hasattr(module, "flops"):
        return num_shares * module.flops(shape, trains=trains)
    if getattr(module, "weight", None) is not None and module.weight.ndim > 1:
        return weight_flops(module.weight, shape, trains=trains)
    return num_shares * sum(flops(part, shape, trains=trains) for part in module.children())


def weight_flops(weight: Tensor, shape: Shape, *, trains: bool = False) -> int:
    """Counts the operations of a weight that is applied at every position of an input."""
    passes = 2 + weight.requires_grad if trains else 1
    return passes * 2 * weight.numel() * math.prod(shape[:-1])
