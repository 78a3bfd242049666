"""Computes in float64 in place of float32 and bfloat16, so that rounding errors do not decide a test.

Two right ways to compute a number differ by rounding errors, and a recurrence amplifies them. In float32, the
errors can become as large as the effect of a mistake in the code. In float64, the errors stay far below
`TOLERANCE`, and the effect of a mistake is far above it.
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
    """Makes torch compute in float64 where code names float32 or bfloat16, or uses the default dtype.

    Do not compile a model or call `torch.load` in this context, because both have tables of dtypes.
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
    """Calls a function in float64. `run_ranks` can call this, because it is importable."""
    with float64():
        return function(*arguments)


def assert_close(ours: Any, theirs: Any, *, what: str | None = None) -> None:
    """Raises AssertionError if two float64 tensors, or structures of them, differ by more than `TOLERANCE`.

    what: Message of the error. If None, torch describes the difference.
    """
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=what)


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of all tensors, divided by the norm of `theirs`."""
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs]).norm()
    return float(difference / torch.cat([value.flatten() for value in theirs.values()]).norm())
