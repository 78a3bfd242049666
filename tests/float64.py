"""float64 in place of every smaller float, so that no rounding decides what a test compares.

Two right ways to compute a number differ by their rounding, and a recurrence amplifies it: in float32 by as
much as the kernels of one machine please, which leaves little room below a difference of mathematics. In
float64 the room is wide, and `TOLERANCE` lies in its middle.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Relative, and absolute for numbers near 1. Rounding is 1.1e-16; 20 training steps let it grow by less than
# 1e5 (measured: 1e-11). A difference of mathematics is above 1e-6, which is that of the smallest constants.
TOLERANCE = 1e-9

_NARROW = (torch.float32, torch.bfloat16)


class Float64(TorchFunctionMode):
    """A context in which torch computes in float64 where it is asked for less, by name or by default."""

    def __enter__(self) -> "Float64":
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(
        self, function: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (torch.Tensor.float, torch.Tensor.bfloat16):
            function = torch.Tensor.double
        options = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **options)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def in_float64(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in float64; for `run_ranks`, whose functions must be importable."""
    with Float64():
        return function(*arguments)


def assert_close(ours: Any, theirs: Any, *, what: str | None = None) -> None:
    """Raises AssertionError where tensors (float64, of one shape) differ by more than `TOLERANCE`."""
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=what)
