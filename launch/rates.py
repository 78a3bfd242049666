"""Measures matrix products in bfloat16 and float32, to check which one `forward_dtype=auto` should select."""

import statistics
import time
from typing import NamedTuple

import torch

from distributed.number_format import choose_format
from runtime.formats import NumberFormat

RATES: tuple[NumberFormat, ...] = ("bfloat16", "float32")  # in the order of `Rates`
_SIZE, _SIZE_OF_GPU = 256, 4096  # rows and columns; on a GPU, the launch would dominate a smaller product
_SECONDS = 0.2  # measuring time per number format
_MIN_PRODUCTS = 3
_CLEARLY = 1.25  # the other format must be faster by this factor to contradict the rule


class Rates(NamedTuple):
    """Measured speeds of matrix products in two dtypes, in floating-point operations per second."""

    bfloat16: float
    float32: float
    choice: NumberFormat  # dtype that the config value `forward_dtype=auto` selects on this machine
    reason: str  # reason for this choice

    def compare(self) -> str:
        """Returns a sentence that says whether `forward_dtype=auto` selects the faster dtype.

        Differences of less than 25 % do not count.
        """
        rule = f"arch.forward_dtype=auto means {self.choice} here, because {self.reason}."
        other = "float32" if self.choice == "bfloat16" else "bfloat16"
        if getattr(self, other) < _CLEARLY * getattr(self, self.choice):
            return f"{rule} The measurement agrees with the rule."
        return f"{rule} The measurement contradicts the rule. Set arch.forward_dtype={other}."

    def texts(self) -> list[str]:
        return [f"{rate / 1e9:.0f}" for rate in (self.bfloat16, self.float32)]


def measure_rates(device: torch.device) -> Rates:
    """Measures the speed of matrix products in bfloat16 and float32, in about half a second."""
    return Rates(*(_rate(device, getattr(torch, name)) for name in RATES), *choose_format(device))


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _SIZE if device.type == "cpu" else _SIZE_OF_GPU
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) <= _MIN_PRODUCTS or sum(seconds) < _SECONDS:
        began = time.perf_counter()
        torch.nn.functional.linear(x, weight)[0, 0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds[1:])
