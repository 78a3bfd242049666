"""The rule for `forward_dtype=auto`: the number format in which a machine computes fast.

Matrix products in bfloat16 are fast on processors with bfloat16 instructions. Other processors emulate them.
This takes 20 to 80 times as long as float32 (measured with AVX2). The rule reads properties of the machine
and measures nothing, so that the same command on the same machine always gives the same run. `python -m
launch.check` measures both rates, and compares them with the rule.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.formats import NumberFormat

_BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # of x86 processors, fastest first


class Choice(NamedTuple):
    name: NumberFormat
    reason: str


def choose_format(device: torch.device) -> Choice:
    """Returns the number format that the config value `forward_dtype=auto` means on a device.

    - CUDA: bfloat16, or float32 if the GPU only emulates bfloat16.
    - CPU (x86): bfloat16 if the processor has bfloat16 instructions and torch uses AVX-512, else float32.
    - All others: float32, because bfloat16 has not been measured there.
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bfloat16", "the GPU computes in bfloat16")
        return Choice("float32", "the GPU has no bfloat16 instructions")
    if device.type != "cpu":
        return Choice("float32", f"bfloat16 has not been measured on {device.type}")
    name = instruction_set(device)
    if name in _BFLOAT16_INSTRUCTIONS:
        return Choice("bfloat16", f"the processor has bfloat16 instructions ({name})")
    return Choice("float32", f"torch finds no bfloat16 instructions ({name})")


def choose_evaluation_format(
    stored: NumberFormat,
    device: torch.device,
    *,
    allowed: Sequence[NumberFormat],
    configured: NumberFormat | None = None,
) -> Choice:
    """Returns the number format in which to evaluate a trained model, with the reason.

    If the user has set a format, returns this format. Otherwise, if the device is a CPU without bfloat16
    instructions, and the model allows float32, returns float32. In all other cases, returns the format of the
    training. Raises ValueError if the model does not allow the format that the user has set.

    stored: Format of the training. allowed: Formats that the model allows. configured: Format that the user
    has set. If None, the user has set none.
    """
    if configured is not None:
        if configured not in allowed:
            raise ValueError(
                f"forward_dtype={configured}: the model allows only {', '.join(allowed)}. Remove it."
            )
        return Choice(configured, "forward_dtype is set")
    rule = choose_format(device)
    if device.type == "cpu" and (stored, rule.name) == ("bfloat16", "float32") and rule.name in allowed:
        return rule
    return Choice(stored, "the model was trained in it")


def instruction_set(device: torch.device) -> str:
    """Returns the name of the fastest matrix instructions that torch uses on a device.

    The name is "cuda" for every CUDA GPU. For a CPU, it is "amx_bf16", "avx512_bf16", "avx512", "avx2",
    "neon" or "unknown". For other devices, it is "unknown". On x86 CPUs, the environment variable
    ATEN_CPU_CAPABILITY can select slower instructions.
    """
    if device.type == "cuda":
        return "cuda"
    if device.type != "cpu":
        return "unknown"
    known, used = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability()
    if known.get("neon"):
        return "neon"
    if used.startswith("AVX512"):
        return next((name for name in _BFLOAT16_INSTRUCTIONS if known.get(name)), "avx512")
    return "avx2" if used == "AVX2" else "unknown"
