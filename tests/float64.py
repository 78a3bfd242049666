"""float64 in place of every smaller float, so that no rounding decides what a test compares.

Two right ways to compute a number differ by their rounding, and a recurrence amplifies it: in float32 by as
much as the kernels of one machine please, which leaves little room below a difference of mathematics. In
float64 the room is wide, and `TOLERANCE` lies in its middle.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # makes tables by dtype, which must not be made while one dtype stands for another

# Relative, and absolute for numbers near 1. Rounding is 1.1e-16; 20 training steps let it grow by less than
# 1e5 (measured: 1e-11). A difference of mathematics is above 1e-6, which is that of the smallest constants.
TOLERANCE = 1e-9

pickle.loads(pickle.dumps(torch.zeros(1)))  # makes tables by dtype too, as torch._dynamo does


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Makes torch compute in float64 where it is asked for less, by name or by default; also a fixture.

    Not for what compiles, nor for `torch.load`: those have tables of the dtypes.
    """
    default = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "bfloat16"):
            patch.setattr(torch, name, torch.float64)
        for name in ("float", "bfloat16"):
            patch.setattr(torch.Tensor, name, torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def in_float64(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in float64; for `run_ranks`, whose functions must be importable."""
    with float64():
        return function(*arguments)


def assert_close(ours: Any, theirs: Any, *, what: str | None = None) -> None:
    """Raises AssertionError where float64 tensors of one shape differ by more than `TOLERANCE`."""
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=what)


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of all tensors over that of `theirs`."""
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs]).norm()
    return float(difference / torch.cat([value.flatten() for value in theirs.values()]).norm())
