"""Decides on all ranks alike whether to compile the blocks, after a trial of the compiler."""

import torch

from distributed import log
from distributed.errors import collective_errors
from distributed.process_group import all_gather_objects, local_rank
from models.compilation import find_compiler_failure, should_compile

_COMPILING = (
    "compiling: the first steps take up to minutes, all later ones less time (compile=false: at once)"
)


def compiles_on_all_ranks(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """Returns whether to compile the blocks, the same on all ranks. All ranks call it.

    choice: True, False, or "auto": if compiling pays off over `num_steps` calls of the network. Tries the
    compiler first: where it fails, "auto" means False, with a warning, and True ends all ranks.
    """
    with collective_errors():
        compiles = should_compile(choice, device, num_steps=num_steps)
        failure = find_compiler_failure(device) if compiles and local_rank() == 0 else None
        if failure is not None:
            variable = "CC" if device.type == "cuda" else "CXX"
            reason = f"the compiler fails ({failure}): mend it, or choose another one ({variable}=...)"
            if choice is True:
                raise ValueError(f"compile=true, but {reason}, or leave compile=auto")
            log.warning(f"blocks are not compiled, since {reason}")
    compiles = all(all_gather_objects(compiles and failure is None))
    if compiles:
        log.info(_COMPILING)
    return compiles
