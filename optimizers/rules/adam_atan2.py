"""AdamATan2 (arXiv 2407.05872): Adam with arctan2 instead of the division with epsilon.

Weights, gradients and moments are ranges of flat buffers (`distributed.flat`). `torch.compile` turns
`adam_atan2_` into a kernel that updates a whole range in one pass over memory. Without the compiler, torch
runs the operations of `adam_atan2_` one by one. On a CPU, each call then gets a chunk that fits into the
cache.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from distributed.flat import FlatParameters
from distributed.shards import ShardBuffers, tensor_of

_MOMENTS = ("first_moment", "second_moment")
_CHUNK = 2**17  # elements: about 4 MB with gradients, moments and intermediates; this fits into a CPU's cache
_TINY = torch.finfo(torch.float32).tiny
# Coefficients of the polynomial P of degree 7 in arctan(x) = x + x^3 P(x^2), for |x| <= 1. P minimizes the
# relative error, which is then 2e-8.
_ARCTAN = (-0.333331527, 0.199937728, -0.142110552, 0.10666004)
_ARCTAN += (-0.0755221282, 0.0432118423, -0.0163679158, 0.00292068899)


def adam_atan2_(
    parameter: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    *,
    shrink: Tensor | float,
    rate: Tensor | float,
    correction: Tensor | float,
    beta1: float,
    beta2: float,
    atan2_sqrt: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Applies one AdamATan2 update to a parameter and its moments, in place.

        p *= 1 - lr wd
        m = lerp(m, g, 1 - b1)
        v = lerp(v, g^2, 1 - b2)
        p -= lr / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t)))

    p is the parameter, g the gradient, and m and v are the moments. All are float32 tensors of the same
    shape. lr is the learning rate, wd the weight decay, and t = 1, 2, ... the number of the update.

    shrink: 1 - lr wd. rate: lr / (1 - b1^t). correction: 1 / (1 - b2^t). beta1, beta2: b1 and b2. atan2_sqrt:
    Function of (y, x) that returns atan2(y, sqrt(x)).
    """
    parameter.mul_(shrink)
    first_moment.lerp_(gradient, 1 - beta1)
    second_moment.lerp_(gradient * gradient, 1 - beta2)
    parameter.sub_(atan2_sqrt(first_moment, second_moment * correction) * rate)


def atan2_sqrt(y: Tensor, x: Tensor) -> Tensor:
    return torch.atan2(y, x.sqrt())


def short_atan2_sqrt(y: Tensor, x: Tensor) -> Tensor:
    """Returns atan2(y, sqrt(x)) for each element, for x >= 0, computed with a polynomial.

    In compiled code on a CPU, this function is faster than torch.atan2. The relative error is below 3e-7,
    unless y^2 underflows.
    """
    # On a CPU, torch.atan2 takes twice as long as all memory access of an update. This code has no branches.
    # It computes the tangent of half the angle, then the polynomial gives the angle.
    tangent = y / (x.sqrt() + (x + y * y).sqrt() + _TINY)  # 0 / 0 is 0
    tangent = tangent.clamp(-1, 1)  # it is larger if y^2 underflows
    square = tangent * tangent
    series = _ARCTAN[-1]
    for coefficient in reversed(_ARCTAN[:-1]):
        series = series * square + coefficient
    return 2 * (tangent + tangent * square * series)


class AdamATan2(torch.optim.Optimizer):
    """The AdamATan2 optimizer (arXiv 2407.05872) with decoupled weight decay.

    This is Adam with arctan2 in place of the division with epsilon. If ranks divide the update of the
    weights, `step` updates only the part of this rank. If the parameters need no gradient, nothing changes.

    flat: Object that stores the values of many parameters in one tensor, and their gradients in another.
    names: Names of the parameters to update. If None, all parameters of `flat`. compiler_options: Options of
    torch.compile for the update. If None, the update is not compiled.
    """

    def __init__(
        self,
        flat: FlatParameters,
        names: Collection[str] | None = None,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        compiler_options: dict[str, Any] | None = None,
    ):
        names = list(flat.owned) if names is None else names
        parts = {name: tensor_of(flat.owned[name]) for name in names}
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "step": 0}
        super().__init__(parts.values(), options)
        self._flat, ranges = flat, flat.updated_ranges_of(names)
        self._moments: dict[str, ShardBuffers] = {moment: flat.zeros(ranges) for moment in _MOMENTS}
        for moment, shard_buffers in self._moments.items():
            for name, part in flat.shards(shard_buffers, flat.shard, names).items():
                self.state[parts[name]][moment] = tensor_of(part)
        self._kernel = None
        if compiler_options is not None:
            self._kernel = torch.compile(adam_atan2_, fullgraph=True, dynamic=True, options=compiler_options)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        group["step"] += 1
        if not len(self._flat.gradients):
            return
        lr, beta1, beta2, step = (group[name] for name in ("lr", "beta1", "beta2", "step"))
        factors = {
            "shrink": 1 - lr * group["weight_decay"],
            "rate": lr / (1 - beta1**step),
            "correction": 1 / (1 - beta2**step),
        }
        if self._kernel is not None:
            factors = _as_tensors(factors, self._flat.weights.device)
        first, second = self._moments.values()
        for part, *moments in zip(first.ranges, first.buffers, second.buffers, strict=True):
            tensors = (self._flat.master_weights.at(part), self._flat.gradients[part], *moments)
            if self._kernel is None:
                _adam_atan2_in_chunks_(*tensors, **factors, beta1=beta1, beta2=beta2)
            else:
                self._kernel(*tensors, **factors, beta1=beta1, beta2=beta2, atan2_sqrt=short_atan2_sqrt)


# Without a compiled kernel. On a CPU, a chunk fits into the cache, so only the first operation on a chunk
# reads from memory. tensors: Parameter, gradient and both moments, [n] each.
def _adam_atan2_in_chunks_(*tensors: Tensor, **factors: float) -> None:
    (length,) = tensors[0].shape
    size = _CHUNK if tensors[0].device.type == "cpu" else length
    for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        adam_atan2_(*chunk, **factors, atan2_sqrt=atan2_sqrt)


# If the factors were Python floats, torch.compile would compile the kernel again for every new value.
def _as_tensors(factors: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    values = torch.tensor(list(factors.values()), pin_memory=device.type == "cuda")
    return dict(zip(factors, values.to(device, non_blocking=True), strict=True))
