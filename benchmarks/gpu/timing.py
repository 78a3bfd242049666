"""The time of a call, on a device that the host runs ahead of."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import now

_BUNDLES, _BUNDLE_SECONDS = 7, 0.3


def seconds_of(function: Callable[[], Any], device: torch.device, *, bundles: int = _BUNDLES) -> list[float]:
    """Times calls, in bundles within which the host runs ahead of the GPU as in training."""
    begin = now(device)
    function()
    once = now(device) - begin
    count = max(1, round(_BUNDLE_SECONDS / once)) if device.type == "cuda" else 1
    seconds = []
    for _ in range(bundles if device.type == "cuda" else 2):
        begin = now(device)
        for _ in range(count):
            function()
        seconds.append((now(device) - begin) / count)
    return seconds
