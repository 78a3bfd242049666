"""The door of the programs: from a command line on every rank to a run that can begin.

Imports no torch: rank 0 reads the command line before anything heavy is loaded, so that --help and a mistake
answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from parallel import log
from parallel.errors import EXIT_FAILURE, local_errors
from parallel.heap import keep_freed_memory
from parallel.process_group import (
    choose_backend,
    choose_device,
    is_main,
    process_group,
    rendezvous_store,
    set_cpu_threads,
    world_size,
)
from parallel.start import wait_for_all_ranks
from parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config")  # a pydantic model with the keys of the machine


@dataclasses.dataclass(frozen=True)
class Run(Generic[Config]):
    """A launched program on this rank; the config is the same on all ranks."""

    config: Config
    device: torch.device
    watchdog: Watchdog


@contextlib.contextmanager
def launch(schema: type[Config], compose: Callable[[], Config | None]) -> Iterator[Run[Config]]:
    """Opens everything that a program needs around it, and closes it whatever ends the block.

    All ranks enter. Rank 0 composes the config, for all; None means that there is nothing to run, since help
    was asked for: then all ranks end with status 0. A ValueError is one line, and ends all with status 1.
    """
    log.capture_library_warnings()
    config = schema.model_validate_json(_agree(lambda: _compose(compose)))
    wait_for_all_ranks(timeout_seconds=config.init_timeout_seconds)
    with local_errors():
        device = choose_device(config.device)
        choose_backend(config.backend, device)
    log.capture_library_warnings()  # those of torch too, which is loaded now
    set_cpu_threads(config.cpu_threads)
    keep_freed_memory(device)
    with (
        Watchdog(
            init_timeout_seconds=config.init_timeout_seconds, step_timeout_seconds=config.step_timeout_seconds
        ) as watchdog,
        process_group(device, config.backend),
    ):
        yield Run(config, device, watchdog)


def _compose(compose: Callable[[], Any]) -> str | None:
    config = compose()
    if config is None:
        return None
    choose_backend(config.backend, choose_device(config.device))  # a shared mistake is told once
    return config.model_dump_json()


def _agree(decide: Callable[[], str | None]) -> str:
    """Runs `decide` on rank 0, before there is a process group, and returns its text on every rank.

    Its ValueError is printed as one line and ends every rank with status 1. Where it returns None, every rank
    ends with status 0.
    """
    if is_main():
        text, status = None, EXIT_FAILURE
        try:
            text, status = decide(), 0
        except ValueError as error:
            log.error(error)
        except SystemExit as error:  # whoever raised it has told the user already
            status = error.code if isinstance(error.code, int) else EXIT_FAILURE
        finally:
            if world_size() > 1:
                rendezvous_store().set("decision", json.dumps({"text": text, "status": status}))
    else:
        decision = json.loads(rendezvous_store().get("decision"))  # waits until rank 0 has decided
        text, status = decision["text"], decision["status"]
    if text is None:
        raise SystemExit(status)
    return text
