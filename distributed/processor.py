"""The name of this machine's processor."""

import platform
from pathlib import Path

import torch

from distributed.number_format import instruction_set


def describe_processor() -> str:
    """Returns the name of this machine's CPU and its instructions, such as "AMD EPYC (avx512_bf16)"."""
    return f"{processor_name()} ({instruction_set(torch.device('cpu'))})"


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
