"""Decides whether to compile the blocks, the same on all ranks, and tests the compiler first."""

import torch

from distributed import log
from distributed.errors import collective_errors
from distributed.process_group import all_gather_objects, local_rank
from models.compilation import find_compiler_failure, should_compile

_COMPILING = (
    "compiling: the first steps take up to minutes, later steps are faster. compile=false starts at once."
)


def compiles_on_all_ranks(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """Returns whether to compile the blocks, the same on all ranks. All ranks call it.

    choice: True, False, or "auto". With "auto", the blocks are compiled if that saves time over `num_steps`
    calls of the network. The first rank of each node tests the compiler. If the compiler fails, "auto" means
    False, with a warning. With True, all ranks then exit with an error.
    """
    with collective_errors():
        compiles = should_compile(choice, device, num_steps=num_steps)
        failure = find_compiler_failure(device) if compiles and local_rank() == 0 else None
        if failure is not None:
            variable = "CC" if device.type == "cuda" else "CXX"
            reason = f"the compiler fails ({failure})"
            hint = f"Fix it, or choose another compiler with {variable}=PATH"
            if choice is True:
                raise ValueError(f"compile=true, but {reason}. {hint}, or set compile=auto.")
            log.warning(f"blocks are not compiled, because {reason}. {hint}.")
    compiles = all(all_gather_objects(compiles and failure is None))
    if compiles:
        log.info(_COMPILING)
    return compiles
