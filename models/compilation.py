"""Whether and what `torch.compile` compiles."""

import importlib.util
import os
import shutil

import torch

from models.halting import HaltingModel
from models.layers import Block

# Steps after which the seconds of compiling are earned back. Measured on two CPU cores, in steps of 0.1 s: 15
# to 35 s to compile, and a step 13 to 20 % shorter. On CUDA this is a guess.
_STEPS_TO_PAY = {"cpu": 3000, "cuda": 500}


def should_compile(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """`auto` compiles where it pays off over `num_steps`, of the whole run, however often it is resumed.

    ValueError where compiling is asked for and there is no compiler.
    """
    if choice == "auto":
        pays_off = num_steps >= _STEPS_TO_PAY.get(device.type, float("inf"))
        return pays_off and _missing_compiler(device) is None
    missing = _missing_compiler(device)
    if choice and missing:
        raise ValueError(f"compile=true needs {missing}: install it, or leave compile=auto")
    return bool(choice)


def compile_blocks(model: HaltingModel) -> None:
    """torch.compile of the blocks, in place: one small graph that all levels and cycles share.

    Names stay as they are.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()


def _missing_compiler(device: torch.device) -> str | None:
    """What torch's compiler lacks on this machine; None if nothing."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "triton"
    names = [os.environ.get("CXX"), "g++", "clang++", "cl"]
    return None if any(name and shutil.which(name) for name in names) else "a C++ compiler, such as g++"
