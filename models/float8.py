"""Matrix products in float8, scaled by rows, for GPUs whose tensor cores have them: Hopper and later.

Each row of a factor is scaled by its largest value, so that what a slot computes does not depend on which
others are in its batch. The gradient of a weight, a sum over all rows of the batch, stays in the dtype of the
activations. So does torchao's recipe `rowwise_with_gw_hp`; here it is 40 lines for the products that we have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.layers import Level, Linear

if TYPE_CHECKING:
    from models.network import Network

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_MULTIPLE = 16  # both sides of a weight have to be one
_SMALLEST = 1e-12  # value of a row that is told from zero


class _Product(torch.autograd.Function):
    """x @ weight.T, and the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _scaled_product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x = _scaled_product(rows, weight.t().contiguous()).unflatten(0, x.shape[:-1])
        return of_x, rows.t() @ x.flatten(0, -2)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x @ weight.T as F.linear does, of factors rounded to float8.

    x: bfloat16 [..., k]. weight: bfloat16 [m, k]; k and m multiples of 16.
    """
    return _Product.apply(x, weight)


def _scaled_product(a: Tensor, b: Tensor) -> Tensor:
    """Computes a @ b.T, bfloat16 [n, m], of a [n, k] and b [m, k]."""
    (a8, a_scale), (b8, b_scale) = _to_float8(a), _to_float8(b)
    return torch._scaled_mm(a8, b8.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=a.dtype)


def _to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float8 [n, k] and scales, float32 [n, 1], whose product is about x."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=_SMALLEST) / _LARGEST
    return (x.float() / scale).to(_FLOAT8), scale


def why_not(device: torch.device) -> str:
    """Returns the reason why a device has no such products; empty where it has."""
    ones, scale = torch.ones(2, _MULTIPLE, _MULTIPLE), torch.ones(2, _MULTIPLE, 1, device=device)
    try:
        a, b = ones.to(device, _FLOAT8)
        torch._scaled_mm(a, b.t(), scale_a=scale[0], scale_b=scale[1].t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return f"float8=true needs a GPU with float8 products, Hopper or later ({reason}): use float8=false"
    return ""


def use_float8(network: Network) -> None:
    """Makes the products inside the blocks of a bfloat16 network float8 ones, where their sides allow it.

    Convolutions stay as they are: cuDNN computes them, and torch has none in float8.
    ValueError where the device of the weights has no such products.
    """
    if reason := why_not(next(network.parameters()).device):
        raise ValueError(reason)
    for level in network.modules():
        if isinstance(level, Level):
            for module in level.modules():
                if type(module) is Linear and not any(side % _MULTIPLE for side in module.weight.shape):
                    module.product = product
