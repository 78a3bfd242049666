"""Computes the metrics of training steps, and checks that loss and gradients are finite."""

import torch
from torch import Tensor

from distributed.errors import abort_all
from models.network import Network
from models.objective import divide


def training_metrics(
    network: Network | type[Network], sums: dict[str, float], *, steps: int, global_batch_size: int
) -> dict[str, float]:
    """Computes the metrics of some training steps from sums over these steps.

    Returns {metric: value}, such as {"loss": 0.7, "accuracy": 0.9}. A metric without data is left out.
    Example: "accuracy" is the mean over the puzzles that have halted. If no puzzle has halted, there is none.

    network: The network or its class. It determines which metrics there are.
    sums: {name: sum over the global batch and the steps}.
    steps: Number of training steps in the sums.
    """
    objective = network.objective_class
    metrics = objective.metrics | objective.training_metrics | {"grad_norm": "updates", "loss": "slots"}
    sums = sums | {"updates": steps}
    return divide(sums, metrics, slots=steps * global_batch_size)


class FiniteCheck:
    """Ends the run if a loss or gradient norm is NaN or infinite. All ranks call the methods.

    On a CPU, `add` already ends the run. On a GPU, `add` does not wait for the device, and only `check` ends
    the run.
    """

    def __init__(self, device: torch.device):
        self._reads_every_step = device.type == "cpu"
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._values = torch.zeros(2, device=device)  # loss and gradient norm of the first bad step
        self._set_names: dict[int, str] = {}

    def add(self, step: int, *, set_name: str, loss: Tensor, grad_norm: Tensor) -> None:
        """Records whether the loss and the gradient norm of a training step are finite.

        On a CPU, ends all ranks at once if the loss or the gradient norm is not finite.

        step: Number of the step, from 1. set_name: Training set of the batch, for the message. loss,
        grad_norm: Scalar tensors, equal on all ranks.
        """
        self._set_names[step] = set_name
        values = torch.stack((loss.detach().float(), grad_norm.float()))
        is_first_bad = ~torch.isfinite(values).all() & (self._first_bad == 0)
        self._first_bad = torch.where(is_first_bad, step, self._first_bad)
        self._values = torch.where(is_first_bad, values, self._values)
        if self._reads_every_step:
            self.check()

    def check(self) -> None:
        """Ends all ranks with a message if the loss or gradient norm of an earlier step was not finite."""
        step = int(self._first_bad)
        if step:
            loss, grad_norm = self._values.tolist()
            abort_all(
                f"the loss is {loss:.4g} and the gradient norm {grad_norm:.4g} at step {step}, on a batch of "
                f"set {self._set_names[step]!r}. This step is not saved. Try a lower lr, more "
                "lr_warmup_steps, grad_clip_norm=1, or arch.forward_dtype=float32."
            )
        self._set_names.clear()
