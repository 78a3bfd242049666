"""Decides whether all ranks compile the transformer blocks of a model, and tests the compiler."""

import contextlib
from collections.abc import Iterator

import torch

from distributed import log
from distributed.collectives import all_gather_objects
from distributed.errors import EXIT_FAILURE, collective_errors
from distributed.world import is_main, local_rank, rank, world_size
from models.compilation import find_compiler_failure, find_damaged_library, should_compile


def compiles_on_all_ranks(choice: bool | str, device: torch.device, *, num_steps: int) -> bool:
    """Returns whether to compile the model with torch.compile. All ranks call it, and get the same result.

    If the result would be True, one rank of each node first tests the compiler. If the compiler fails on some
    node and `choice` is "auto", the result is False, and rank 0 logs a warning. If the compiler fails and
    `choice` is True, all ranks exit with an error. They also exit if a file in the compiler's cache is
    damaged.

    choice: True, False, or "auto". With "auto", the model is compiled if `num_steps` calls save more time
    than compiling takes.
    num_steps: Number of training steps of the run. In an evaluation, the number of calls of the model. Each
    call is a thinking step of a batch.
    """
    with collective_errors():
        compiles = should_compile(choice, device, num_steps=num_steps)
        failure = find_compiler_failure(device) if compiles and local_rank() == 0 else None
        if failure is not None:
            variable = "CC" if device.type == "cuda" else "CXX"
            failure = (
                f"the compiler fails ({failure}). Fix it, or choose another compiler with {variable}=PATH"
            )
            if choice is True:
                raise ValueError(f"compile=true, but {failure}, or set compile=auto.")
    answers, failures = zip(*all_gather_objects((compiles, failure)), strict=True)
    if is_main():
        for text in dict.fromkeys(filter(None, failures)):
            ranks = [index for index, reason in enumerate(failures) if reason == text]
            where = f" on {log.name_ranks(ranks)}" if world_size() > 1 else ""
            log.warning(f"blocks are not compiled, because{where} {text}.")
    compiles = all(answers) and not any(failures)
    if compiles:
        first = "the first steps take up to minutes, later steps are faster"
        log.info(f"compiling: {first}. compile=false starts at once.")
    return compiles


@contextlib.contextmanager
def compiler_cache_errors() -> Iterator[None]:
    """Context manager that exits the process if a damaged compiler cache causes an error.

    The cache is that of torch.compile. The console shows one line that names the damaged file. The traceback
    goes to the log file of this rank. Other errors pass through.
    """
    try:
        yield
    except RuntimeError as error:
        if (damage := find_damaged_library(str(error))) is None:
            raise
        log.exception(error, on_console=False)
        log.error(damage, failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None
