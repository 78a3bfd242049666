"""A loss or gradient that is not a number ends the run at its step, before it reaches a checkpoint."""

import torch
from torch import Tensor

from models.losses import LOSSES, METRICS
from parallel.agreement import end_together

_TOLD = (*LOSSES, *METRICS, "grad_norm", "lr")


class Health:
    """Notes on the device whether a step was finite, and reads that note only where reading costs nothing."""

    def __init__(self, device: torch.device):
        self._reads_every_step = device.type == "cpu"
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._what = torch.zeros(2, device=device)  # loss and gradient norm of that step
        self._set_names: dict[int, str] = {}
        self._last_line = "no line is logged yet"

    def note(self, step: int, *, set_name: str, loss: Tensor, grad_norm: Tensor) -> None:
        """After the gradients are summed, with values that all ranks share. On a CPU it checks at once."""
        self._set_names[step] = set_name
        what = torch.stack((loss.detach().float(), grad_norm.float()))
        is_first_bad = ~torch.isfinite(what).all() & (self._first_bad == 0)
        self._first_bad = torch.where(is_first_bad, step, self._first_bad)
        self._what = torch.where(is_first_bad, what, self._what)
        if self._reads_every_step:
            self.check()

    def check(self) -> None:
        """Ends all ranks if some step since the last check was not finite; before every line and every save.

        All ranks call it at the same step.
        """
        step = int(self._first_bad)
        if step:
            loss, grad_norm = self._what.tolist()
            end_together(
                f"the loss is {loss:.4g} and the gradient norm {grad_norm:.4g} at step {step}, on a batch of "
                f"set {self._set_names[step]!r}: nothing of it is saved. Last finite metrics: "
                f"{self._last_line}. Try a lower lr, a longer lr_warmup_steps, grad_clip_norm=1 or "
                "arch.forward_dtype=float32"
            )
        self._set_names.clear()

    def remember(self, step: int, line: dict[str, float]) -> None:
        """The line to quote when things go wrong."""
        told = [f"{name} {line[f'train/{name}']:.4g}" for name in _TOLD if f"train/{name}" in line]
        self._last_line = f"step {step}: " + ", ".join(told)
