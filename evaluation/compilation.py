"""Decides on all ranks alike whether to compile the blocks, after a trial of the compiler."""

import torch
from torch import nn

from models.compilation import compile_blocks, find_compiler_failure, should_compile
from parallel import log
from parallel.collectives import true_on_all_ranks
from parallel.errors import collective_errors
from parallel.process_group import local_rank

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
            advice = f"the compiler fails ({failure}): mend it, or choose another one (CXX=...)"
            if choice is True:
                raise ValueError(f"compile=true, but {advice}")
            log.warning(f"blocks are not compiled, since {advice}")
    compiles = true_on_all_ranks(compiles and failure is None, device=device)
    if compiles:
        log.info(_COMPILING)
    return compiles


def compile_on_all_ranks(
    model: nn.Module, choice: bool | str, device: torch.device, *, num_steps: int
) -> None:
    """Compiles the blocks of a model if `compiles_on_all_ranks` says so. All ranks call it."""
    if compiles_on_all_ranks(choice, device, num_steps=num_steps):
        compile_blocks(model)
