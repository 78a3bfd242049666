"""Whether, what and how `torch.compile` compiles."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

from models.blocks import Level

# Steps after which the seconds of compiling are earned back. Measured on two CPU cores, in steps of 0.15 s or
# more, which become 10 to 20 % shorter: 20 to 30 s to compile, but 96 s beside other load. Load that stays
# makes the steps longer too, so that no more of them are needed; this counts load that ends after the first
# step. On CUDA it is a guess.
_SECONDS_TO_COMPILE, _SECONDS_OF_STEP, _SAVED_SHARE = 96, 0.15, 0.15
_STEPS_TO_PAY = {"cpu": _SECONDS_TO_COMPILE / (_SECONDS_OF_STEP * _SAVED_SHARE), "cuda": 500}
_MOST_SECONDS = 300  # of the trial of the compiler
# For all that is compiled: other flags would have torch's headers compiled once more, in 6 s.
COMPILER_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # a * b + c in one, as GPUs have it
    # Not to try for 7 to 10 s whether the compiler knows AVX2 and AVX512, as every one of today does. What
    # came later, such as bfloat16 and AMX, torch tries all the same, in 1 s.
    "cpp.vec_isa_ok": True,
}


def should_compile(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """Decides whether to compile; `auto` does where it pays off over `num_steps`.

    num_steps: of the whole run, however often it is resumed. ValueError where compiling is asked for and
    there is no compiler.
    """
    if choice == "auto":
        pays_off = num_steps >= _STEPS_TO_PAY.get(device.type, float("inf"))
        return pays_off and _missing_compiler(device) is None
    missing = _missing_compiler(device)
    if choice and missing:
        raise ValueError(f"compile=true needs {missing}: install it, or leave compile=auto")
    return bool(choice)


def find_compiler_failure(device: torch.device) -> str | None:
    """Compiles a small function in a process of its own; returns the first error, None where it works."""
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
    output = found.stderr.rpartition("\nOutput:\n")[2]  # of the compiler, where it was called, else of Python
    lines = [line for line in output.splitlines() if line.strip()]
    errors = (line for line in lines if "error" in line.lower() and not line.startswith(" "))
    return next(errors, lines[0] if lines else f"exit status {found.returncode}")


def compile_blocks(model: nn.Module) -> None:
    """Compiles the blocks, in place.

    All levels and cycles share a block's graphs: one without gradient, and one for each set of inputs that
    need it. A level as a whole would make a step 1 to 3 % shorter, and take longer to compile the more
    blocks it has.

    Names stay as they are. Each batch size is compiled by itself: a graph of dynamic size would replace the
    usual one from its first use on, so that a resumed run would have other bits.
    """
    for module in model.modules():
        if isinstance(module, Level):
            for block in (each for each in module.layers if any(True for _ in each.parameters())):
                block.compile(dynamic=False, options=COMPILER_OPTIONS)


def eager_blocks(*, unless: bool = False) -> contextlib.AbstractContextManager:
    """Runs compiled blocks uncompiled: for batches of another size each time, which would all be compiled."""
    return contextlib.nullcontext() if unless else torch.compiler.set_stance("force_eager")


def _missing_compiler(device: torch.device) -> str | None:
    """Returns what torch's compiler would look for on this machine and not find; None if nothing."""
    if device.type == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
        if importlib.util.find_spec("triton") is None:
            return "triton"
        return None if any(map(shutil.which, compilers)) else "a C compiler, such as gcc"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler} (another one: CXX=...)"
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return None if has_headers else "Python.h, the headers of Python (a package such as python3-dev)"
