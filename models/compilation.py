"""Compiles the blocks of a model by `torch.compile`, and decides whether that pays off."""

import contextlib
import subprocess
import sys

import torch
from torch import nn

from models.blocks import Level

# Number of steps after which shorter steps have made up for the time of compiling. Measured on two CPU cores:
# compiling takes 20 to 30 s, or 96 s beside other load (counted here, as the load may end afterwards), and
# steps of 0.15 s or more become 10 to 20 % shorter. The number for CUDA is a guess.
_SECONDS_TO_COMPILE, _SECONDS_OF_STEP, _SAVED_SHARE = 96, 0.15, 0.15
_STEPS_TO_PAY = {"cpu": _SECONDS_TO_COMPILE / (_SECONDS_OF_STEP * _SAVED_SHARE), "cuda": 500}
_MOST_SECONDS = 300  # for the trial of the compiler
# The same for everything compiled: torch compiles its headers, in 6 s, for each set of flags.
COMPILER_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add, as on GPUs
    # Skips a test of 7 to 10 s whether the compiler knows AVX2 and AVX512, which all do today. torch still
    # tests later instruction sets, such as AMX, in 1 s.
    "cpp.vec_isa_ok": True,
}


def should_compile(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """Returns whether to compile. choice: True, False, or "auto": if compiling saves time over `num_steps`.

    num_steps: of the whole run, all starts of the run together.
    """
    return num_steps >= _STEPS_TO_PAY.get(device.type, float("inf")) if choice == "auto" else bool(choice)


def find_compiler_failure(device: torch.device) -> str | None:
    """Tries to compile a small function in another process; returns the first error, or None."""
    options = f"dynamic=False, options={COMPILER_OPTIONS}"
    code = f"import torch; torch.compile(lambda x: x * 2 + 1, {options})(torch.ones(8, device='{device}'))"
    command = [sys.executable, "-c", code]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the compiler takes more than {_MOST_SECONDS} s for a small function"
    if not found.returncode:
        return None
    output = found.stderr.rpartition("\nOutput:\n")[2]  # of the compiler; if it was not called, of Python
    lines = [line for line in output.splitlines() if line.strip()]
    errors = (line for line in lines if "error" in line.lower() and not line.startswith(" "))
    return next(errors, lines[0] if lines else f"exit status {found.returncode}")


def compile_blocks(model: nn.Module) -> None:
    """Makes torch compile every block at the first call, in place; names of modules and weights stay.

    Blocks of equal code share graphs: one without gradient, and one for each set of inputs that need it.
    Compiling whole levels would make steps 1 to 3 % shorter, but take longer with more blocks. Each batch
    size is compiled separately, because a graph for dynamic sizes would replace the first graph after a
    second size: a resumed run would then not be equal to the bit.
    """
    for module in model.modules():
        if isinstance(module, Level):
            for block in (each for each in module.layers.children() if any(True for _ in each.parameters())):
                block.compile(dynamic=False, options=COMPILER_OPTIONS)


def eager_blocks(*, is_rare: bool = True) -> contextlib.AbstractContextManager:
    """Returns a context in which compiled blocks run uncompiled, if the batch size `is_rare`."""
    return torch.compiler.set_stance("force_eager") if is_rare else contextlib.nullcontext()
