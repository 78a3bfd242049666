"""Compiles the blocks of a model with `torch.compile`, and decides whether this saves time."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from models.blocks import Block, levels_of

# Number of steps after which compiling has saved more time than it took. Measured on two CPU cores: compiling
# takes 20 to 30 s, or 96 s under other load. The longer time counts here, because the load may end later.
# Steps of 0.15 s or more become 10 to 20 % shorter. The number for CUDA is a guess.
_SECONDS_TO_COMPILE, _SECONDS_OF_STEP, _SAVED_SHARE = 96, 0.15, 0.15
_STEPS_TO_PAY = {"cpu": _SECONDS_TO_COMPILE / (_SECONDS_OF_STEP * _SAVED_SHARE), "cuda": 500}
_MOST_SECONDS = 300  # for the trial of the compiler
# How the loader of Linux describes a library that was not written to its end. torch lets the compiler write a
# library under its final name, and loads every file that has this name. If the compiler is killed while it
# writes, the file stays incomplete.
_DAMAGED = re.compile(r"Error: (/.+\.so): (file too short|cannot read file data|invalid ELF header)")
# Use the same options for everything: torch compiles its headers, in 6 s, for each set of options.
COMPILER_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add, as on GPUs
    # Skip a test of 7 to 10 s: whether the compiler supports AVX2 and AVX512. All compilers do today. torch
    # still tests later instruction sets, such as AMX, in 1 s.
    "cpp.vec_isa_ok": True,
}


def should_compile(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """Returns whether to compile the transformer blocks of a model.

    choice: True, False or "auto". With "auto", the result is True if faster steps save more time on this
    device than compiling takes. num_steps: Number of training steps of the run, including those before a
    resume. In an evaluation, the number of calls of the model.
    """
    return num_steps >= _STEPS_TO_PAY.get(device.type, float("inf")) if choice == "auto" else bool(choice)


def find_compiler_failure(device: torch.device) -> str | None:
    """Checks whether torch.compile works on a device.

    Compiles a small function in another process. Returns None if this works. Otherwise, returns one line that
    describes the failure. Raises ValueError if a library in the compiler's cache is damaged.
    """
    options = f"dynamic=False, options={COMPILER_OPTIONS}"
    code = f"import torch; torch.compile(lambda x: x * 2 + 1, {options})(torch.ones(8, device='{device}'))"
    command = [sys.executable, "-c", code]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the compiler needs more than {_MOST_SECONDS} s for a small function"
    if not found.returncode:
        return None
    # If the run continued without compilation, its numbers would differ from those before a resume.
    if damage := find_damaged_library(found.stderr):
        raise ValueError(damage)
    # The output of the compiler, or of Python if the compiler was not called.
    output = found.stderr.rpartition("\nOutput:\n")[2]
    lines = [line for line in output.splitlines() if line.strip()]
    errors = (line for line in lines if "error" in line.lower() and not line.startswith(" "))
    return next(errors, lines[0] if lines else f"exit status {found.returncode}")


def find_damaged_library(error: str) -> str | None:
    """Returns an error message if torch.compile failed because of a damaged file in its cache.

    If torch.compile failed for another reason, returns None.

    error: Error output of the process that called torch.compile.
    """
    if (found := _DAMAGED.search(error)) is None:
        return None
    library, reason = Path(found[1]), found[2]
    return (
        f"{library.name} in the compiler's cache is damaged ({reason}), as after a kill during compilation. "
        f"Delete the folder {library.parents[1]}, and start again."
    )


def compile_blocks(model: nn.Module) -> None:
    """Calls torch.compile for every transformer block of a model, in place.

    torch compiles a block when it is called for the first time. The names of modules and parameters do not
    change. Blocks that torch would compile wrongly stay as they are.
    """
    # Blocks with the same code share their graphs: one without gradient, and one for each combination of
    # inputs with gradient. Compiling levels instead would make steps 1 to 3 % shorter, but compiling would
    # take longer with more blocks. Each batch size has its own graphs. With dynamic sizes, torch would
    # replace the first graph after a second size, and a resumed run would not be bit-identical.
    for level in levels_of(model).values():
        for block in level.layers.children():
            if any(True for _ in block.parameters()) and not _is_miscompiled(block):
                level.is_compiled = True
                block.compile(dynamic=False, options=COMPILER_OPTIONS)


def _is_miscompiled(block: nn.Module) -> bool:
    # On a CPU with AVX512, the compiler of torch 2.13 transposes a bfloat16 tensor wrongly into two buffers,
    # if the length of the axis is a multiple of 32. The values are wrong or NaN. `Block` transposes before
    # its MLP along the positions:
    #
    #     f = torch.compile(lambda x: (x.transpose(1, 2).contiguous(), x.transpose(1, 2).contiguous()))
    #     x = torch.randn(8, 64, 128).bfloat16()
    #     (f(x)[0] == x.transpose(1, 2)).all()  # False
    if not isinstance(block, Block) or block.mlp_t is None:
        return False
    weight = block.mlp_t.down_proj.weight  # [positions, inner width]
    return weight.device.type == "cpu" and len(weight) % 32 == 0


def eager_blocks(*, is_rare: bool = True) -> contextlib.AbstractContextManager:
    """Returns a context manager in which compiled blocks run without compilation.

    Use it for a batch size that occurs rarely, because torch would compile the blocks again for this size.

    is_rare: If False, the context manager does nothing.
    """
    return torch.compiler.set_stance("force_eager") if is_rare else contextlib.nullcontext()
