"""Muon: an optimizer for matrices. Its steps follow the orthogonalized momentum.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Updates are scaled to the size of Adam's updates (arXiv
2502.16982), so that the same learning rate and weight decay fit both optimizers. In bfloat16, an update is
bit-identical to that of `torch.optim.Muon`. torch's Muon always computes in bfloat16, which is slow on
processors that emulate it. `Muon` below therefore has the argument `dtype`.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distributed.collectives import Ranks
from distributed.tensor import Cut

_MOMENTUM = 0.95
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the polynomial a x + b x^3 + c x^5, applied to singular values
_NUM_ITERATIONS = 5
_EPS = 1e-7


def orthogonalize(matrix: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Returns a matrix with the singular vectors of `matrix`, and with singular values close to 1.

    Runs five Newton-Schulz iterations. The result is a new tensor [m, n] in `dtype`.

    matrix: float32 [m, n]. dtype: Dtype of the computation and of the result.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=_EPS))
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


# With this learning rate, Muon's update is about as large as Adam's.
def _scaled(lr: float, matrix: Tensor) -> float:
    return lr * (0.2 * math.sqrt(max(matrix.shape)))


class Muon(torch.optim.Optimizer):
    """The Muon optimizer for matrices. The constructor creates all of `state`, so a checkpoint can be loaded.

    With tensor parallelism, the ranks of a group divide each matrix. For each matrix, one of these ranks
    gathers the parts of the update, orthogonalizes the full update, and sends each rank its part. The ranks
    take turns, one matrix each. All ranks call `step`.

    matrices: {name: matrix, or part of the matrix on this rank}, float32 [m, n]. cuts: {name: `Cut`}. A `Cut`
    describes which part of the full matrix this rank holds. A matrix without a `Cut` is not divided.
    ranks: Group of the ranks that divide the matrices. dtype: Dtype of the orthogonalization.
    """

    def __init__(
        self,
        matrices: dict[str, Tensor],
        cuts: Mapping[str, Cut],
        ranks: Ranks,
        *,
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
    ):
        super().__init__(matrices.values(), {"lr": lr, "weight_decay": weight_decay})
        self._matrices, self._cuts, self._ranks, self._dtype = matrices, cuts, ranks, dtype
        for matrix in matrices.values():
            self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        lr, num_updates = group["lr"], 0
        for name, matrix in self._matrices.items():
            if matrix.grad is None or not len(matrix):
                continue
            momentum = self.state[matrix]["momentum_buffer"].lerp_(matrix.grad, 1 - _MOMENTUM)
            update = matrix.grad.lerp(momentum, _MOMENTUM)  # the direction of Nesterov's method
            matrix.mul_(1 - lr * group["weight_decay"])
            if cut := self._cuts.get(name):
                owner = num_updates % self._ranks.size
                matrix.add_(self._change(update, cut, lr=lr, owner=owner))
            else:
                matrix.add_(orthogonalize(update, dtype=self._dtype), alpha=-_scaled(lr, matrix))
            num_updates += 1

    # Returns this rank's part of the tensor to add to a matrix. All ranks call it. update: This rank's part
    # of the direction before the orthogonalization.
    def _change(self, update: Tensor, cut: Cut, *, lr: float, owner: int) -> Tensor:
        parts = self._ranks.gather(update, destination=owner)
        if parts is None:
            return self._ranks.scatter(None, like=update, source=owner)
        full = orthogonalize(cut.join(parts), dtype=self._dtype).to(update.dtype)
        full = full.contiguous() * -_scaled(lr, full)  # a message needs contiguous parts
        changes = [cut.of(index, self._ranks.size).take(full) for index in range(self._ranks.size)]
        return self._ranks.scatter(changes, like=update, source=owner)
