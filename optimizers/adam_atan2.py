"""AdamATan2 (arXiv 2407.05872): Adam with an arctan2 instead of the division with epsilon.

An update is one pass over memory: weights, gradients and moments are ranges of flat buffers
(`parallel.flat`), and a kernel that `torch.compile` makes of `adam_atan2_` takes a range at once. It reads
four numbers for each weight and writes three. Without the compiler the same function runs op by op, on a CPU
over chunks that stay in its cache.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from parallel.flat import FlatParameters, Pieces
from parallel.shards import tensor_of

_MOMENTS = ("first_moment", "second_moment")
_CHUNK = 2**17  # elements: 4 MB with all that an update has of them, which stay in a CPU's cache
_TINY = torch.finfo(torch.float32).tiny
# arctan(x) = x + x^3 P(x^2) for |x| <= 1: the P of degree 7 with the least relative error, 2e-8
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
    """Updates in place, elementwise on float32 tensors of one shape.

    p *= 1 - lr wd;  m = lerp(m, g, 1 - b1);  v = lerp(v, g^2, 1 - b2)
    p -= lr / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t)))

    shrink, rate, correction: 1 - lr wd, lr / (1 - b1^t) and 1 / (1 - b2^t), with t from 1.
    """
    parameter.mul_(shrink)
    first_moment.lerp_(gradient, 1 - beta1)
    second_moment.lerp_(gradient * gradient, 1 - beta2)
    parameter.sub_(atan2_sqrt(first_moment, second_moment * correction) * rate)


def atan2_sqrt(y: Tensor, x: Tensor) -> Tensor:
    """Returns atan2(y, sqrt(x)), float32, for x >= 0."""
    return torch.atan2(y, x.sqrt())


def short_atan2_sqrt(y: Tensor, x: Tensor) -> Tensor:
    """Returns atan2(y, sqrt(x)) without a branch, to 2 units in the last place where y^2 is a normal number.

    For a compiled kernel: torch.atan2 takes a CPU twice as long as the memory of the whole update. The
    tangent of half the angle is y / (sqrt(x) + sqrt(x + y^2)), in [-1, 1], where a short polynomial gives the
    arctangent.
    """
    tangent = y / (x.sqrt() + (x + y * y).sqrt() + _TINY)  # 0 / 0 is 0
    tangent = tangent.clamp(-1, 1)  # y^2 may underflow where y does not
    square = tangent * tangent
    series = _ARCTAN[-1]
    for coefficient in reversed(_ARCTAN[:-1]):
        series = series * square + coefficient
    return 2 * (tangent + tangent * square * series)


class AdamATan2(torch.optim.Optimizer):
    """AdamATan2 with decoupled weight decay, on this rank's parts of the parameters `names`, or of all.

    Parameters that need no gradient stand still. The group's `step` counts the updates done.

    compiler_options: of torch.compile, to update by a compiled kernel, which takes seconds to make in the
    first step. None: op by op.
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
        super().__init__(
            parts.values(),
            {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "step": 0},
        )
        self._flat, kept = flat, flat.kept_of(names)
        self._moments: dict[str, Pieces] = {moment: flat.zeros(kept) for moment in _MOMENTS}
        for moment, pieces in self._moments.items():
            for name, kept in flat.shards(pieces, flat.share, names).items():
                self.state[parts[name]][moment] = tensor_of(kept)
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
        for own, *moments in zip(first.ranges, first.buffers, second.buffers, strict=True):
            tensors = (self._flat.masters.at(own), self._flat.gradients[own], *moments)
            if self._kernel is None:
                _adam_atan2_in_chunks_(*tensors, **factors, beta1=beta1, beta2=beta2)
            else:
                self._kernel(*tensors, **factors, beta1=beta1, beta2=beta2, atan2_sqrt=short_atan2_sqrt)


def _adam_atan2_in_chunks_(*tensors: Tensor, **factors: float) -> None:
    """Updates op by op; on a CPU a chunk at a time, so that only the first op on it waits for the memory."""
    (length,) = tensors[0].shape
    size = _CHUNK if tensors[0].device.type == "cpu" else length
    for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        adam_atan2_(*chunk, **factors, atan2_sqrt=atan2_sqrt)


def _as_tensors(factors: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    """Copies the factors to the device as float32 scalars, for which a compiled kernel is not compiled anew.

    Does not wait for the device.
    """
    values = torch.tensor(list(factors.values()), pin_memory=device.type == "cuda")
    return dict(zip(factors, values.to(device, non_blocking=True), strict=True))
