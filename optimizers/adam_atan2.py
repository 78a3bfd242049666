"""AdamATan2 (arXiv 2407.05872): Adam with an arctan2 in place of the division with epsilon.

An update is one pass over memory: weights and moments lie in flat buffers, in the order in which FlatSync
lays the gradients, and a kernel that `torch.compile` makes of `adam_atan2_` takes all of them at once. It
reads four numbers for each weight and writes three. Without the compiler the same function runs op by op, on
a CPU over chunks that stay in its cache.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from parallel.flat_buffers import flat_views, joined

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
    """One update in place, elementwise on tensors of one shape, float32.

    p *= 1 - lr wd;  m = lerp(m, g, 1 - b1);  v = lerp(v, g^2, 1 - b2)
    p -= lr / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t)))

    shrink, rate, correction: 1 - lr wd, lr / (1 - b1^t) and 1 / (1 - b2^t), with t from 1.
    """
    parameter.mul_(shrink)
    first_moment.lerp_(gradient, 1 - beta1)
    second_moment.lerp_(gradient * gradient, 1 - beta2)
    parameter.sub_(atan2_sqrt(first_moment, second_moment * correction) * rate)


def atan2_sqrt(y: Tensor, x: Tensor) -> Tensor:
    """atan2(y, sqrt(x)), float32, for x >= 0."""
    return torch.atan2(y, x.sqrt())


def short_atan2_sqrt(y: Tensor, x: Tensor) -> Tensor:
    """The same to 2 units in the last place (where y^2 is a normal number), without a branch: for a kernel.

    torch.atan2 takes a CPU twice as long as the memory of the whole update. The tangent of half the angle is
    y / (sqrt(x) + sqrt(x + y^2)), in [-1, 1], where a short polynomial gives the arctangent.
    """
    tangent = y / (x.sqrt() + (x + y * y).sqrt() + _TINY)  # 0 / 0 is 0
    tangent = tangent.clamp(-1, 1)  # y^2 may underflow where y does not
    square = tangent * tangent
    series = _ARCTAN[-1]
    for coefficient in reversed(_ARCTAN[:-1]):
        series = series * square + coefficient
    return 2 * (tangent + tangent * square * series)


class AdamATan2(torch.optim.Optimizer):
    """AdamATan2 with decoupled weight decay on every parameter. Without a gradient one stands still.

    Moves the parameters into a buffer of its own; the moments in `state` are views of two more.

    compiler_options: of torch.compile: update by a compiled kernel, which takes seconds to make in the first
    step. None: op by op.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        compiler_options: dict[str, Any] | None = None,
    ):
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})
        (group,) = self.param_groups
        group["step"] = 0
        self._parameters = group["params"][::-1]  # as FlatSync has their gradients
        self._buffers, views = zip(*(flat_views(self._parameters) for _ in range(3)), strict=True)
        for parameter, place, first_moment, second_moment in zip(self._parameters, *views, strict=True):
            place.copy_(parameter.detach())
            parameter.data = place
            self.state[parameter] = {"first_moment": first_moment, "second_moment": second_moment}
        self._kernel = None
        if compiler_options is not None:
            self._kernel = torch.compile(adam_atan2_, fullgraph=True, dynamic=True, options=compiler_options)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        group["step"] += 1
        lr, beta1, beta2, step = (group[name] for name in ("lr", "beta1", "beta2", "step"))
        factors = {
            "shrink": 1 - lr * group["weight_decay"],
            "rate": lr / (1 - beta1**step),
            "correction": 1 / (1 - beta2**step),
        }
        if self._kernel is not None:
            factors = _as_tensors(factors, self._buffers[0].device)
        for piece in self._pieces():
            if self._kernel is None:
                _adam_atan2_in_chunks_(*piece, **factors, beta1=beta1, beta2=beta2)
            else:
                self._kernel(*piece, **factors, beta1=beta1, beta2=beta2, atan2_sqrt=short_atan2_sqrt)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """What is updated in one go: flat parameters, gradients and both moments.

        All that there is, where the gradients lie side by side too; else one parameter after the other.
        """
        parameters, *moments = self._buffers
        assert self._parameters[0].data_ptr() == parameters.data_ptr(), "parameters stay in their buffer"
        gradients = joined([parameter.grad for parameter in self._parameters])
        if gradients is not None:
            yield parameters, gradients, *moments
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                tensors = (parameter, parameter.grad, *self.state[parameter].values())
                yield tuple(tensor.detach().reshape(-1) for tensor in tensors)


def _adam_atan2_in_chunks_(*tensors: Tensor, **factors: float) -> None:
    """Op by op; on a CPU a chunk at a time, so that only the first op on it waits for the memory."""
    (length,) = tensors[0].shape
    size = _CHUNK if tensors[0].device.type == "cpu" else length
    for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True):
        adam_atan2_(*chunk, **factors, atan2_sqrt=atan2_sqrt)


def _as_tensors(factors: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    """Float32 scalars on the device: what a compiled kernel reads, and is not compiled anew for.

    The device is not waited for.
    """
    values = torch.tensor(list(factors.values()), pin_memory=device.type == "cuda")
    return dict(zip(factors, values.to(device, non_blocking=True), strict=True))
