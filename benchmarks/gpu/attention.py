"""Which of torch's attention kernels is fastest at the models' sizes, forward and backward in bfloat16.

Of these, `scaled_dot_product_attention` takes one by a fixed order: the row `default`. Where another is much
faster, `models.layers.attend` has to ask for it.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.tasks import Options, Row, Tell
from benchmarks.gpu.timing import seconds_of

# Sudoku and mazes, alone and behind the 16 positions of TRM's puzzle embedding.
LENGTHS = (81, 97, 900, 916)
KERNELS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_HEADS, _HEAD_DIM = 8, 64  # of the published HRM and TRM
_TOKENS = {False: 2**16, True: 2**10}  # of a batch, by whether it is a tiny one


def measure_attention(options: Options, seconds: float, tell: Tell) -> None:
    """Times each kernel at each length; a kernel that refuses has torch's reasons in place of a time."""
    device = torch.device(options.device)
    for length in LENGTHS:
        attend = _build(length, _TOKENS[options.is_tiny] // length, device)
        for name, kernel in KERNELS.items():
            chosen = contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel)
            with chosen, warnings.catch_warnings(record=True) as reasons:
                warnings.simplefilter("always")
                try:
                    attend()
                except RuntimeError as error:
                    texts = [str(each.message) for each in reasons] or [str(error)]
                    reason = " ".join(text.partition(" (Triggered")[0] for text in texts)
                    tell(attention=name, length=length, refused=reason)
                    continue
                median = float(np.median(seconds_of(attend, device)))
            tell(attention=name, length=length, seconds=median)


def _build(length: int, batch: int, device: torch.device) -> Callable[[], None]:
    """Returns a call of attention and of its backward pass, on numbers that lie as in `models.layers`."""
    shape = (max(1, batch), length, _HEADS, _HEAD_DIM)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    above = torch.randn_like(q)

    def attend() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), above)

    return attend


def compare(rows: list[Row]) -> dict[str, Any]:
    """Returns for each length the fastest kernel, and its time over that of torch's choice."""
    result = {}
    for length, times in _times(rows).items():
        fastest = min(times, key=times.get)
        result[f"attention_{length}_fastest"] = fastest
        result[f"attention_{length}_over_default"] = times[fastest] / times["default"]
    return result


def cells(rows: list[Row]) -> Iterator[list[str]]:
    """Yields the rows of a table: for each length the milliseconds of each kernel."""
    times = _times(rows)
    if times:
        yield ["attention, ms", *KERNELS]
    for length, row in times.items():
        yield [str(length), *(f"{1000 * row[name]:.2f}" if name in row else "-" for name in KERNELS)]


def _times(rows: list[Row]) -> dict[int, dict[str, float]]:
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        if "attention" in row and "seconds" in row:
            times.setdefault(row["length"], {})[row["attention"]] = row["seconds"]
    return {length: row for length, row in times.items() if "default" in row}
