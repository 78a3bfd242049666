"""The receivers of a run's rows. A logger must never end a run: where one fails, the others go on."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpointing.files import METRICS_FILE
from config.schema import PretrainConfig
from config.writing import open_to_append
from parallel import log
from parallel.process_group import is_main
from training.console import Console

_WANDB_MODES = {"run": "online", "dryrun": "offline"}  # older words of the client
_WANDB_MODES |= {mode: mode for mode in ("online", "offline", "shared", "disabled")}


def _tidy_wandb_mode() -> None:
    """Writes WANDB_MODE as the client reads it, and leaves out, with a warning, what is no mode."""
    if typed := os.environ.pop("WANDB_MODE", "").strip():
        if mode := _WANDB_MODES.get(typed.lower()):
            os.environ["WANDB_MODE"] = mode
        else:
            log.warning(f"WANDB_MODE={typed} is left out: it may be {', '.join(_WANDB_MODES)}")


class Loggers:
    """The receivers of a run's rows: metrics.jsonl, the console and W&B; none on ranks other than 0.

    steps: from the number of steps done before this start to the one where it will stop. run_info, tags: of
    the run, for W&B, beside its config.
    """

    def __init__(
        self, config: PretrainConfig, steps: range, *, run_info: dict[str, Any], tags: Sequence[str]
    ):
        self._all: list[Any] = []  # each has a name, log and close, and perhaps step_done
        self.wandb: Any = None  # a WandbRun, where W&B is not disabled
        if not is_main():
            return
        with log.warn_once(_MetricsFile.name):
            self._all.append(_MetricsFile(Path(config.checkpoint_path)))
        with log.warn_once(Console.name):
            self._all.append(Console(config, steps))
        _tidy_wandb_mode()
        mode = config.wandb_mode if config.wandb_mode != "auto" else os.environ.get("WANDB_MODE")
        if mode != "disabled":
            with log.warn_once("W&B"):
                from training.wandb import WandbRun  # which loads the client, in a third of a second

                self.wandb = WandbRun(config, run_info=run_info, tags=tags)
                self._all.append(self.wandb)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one row of metrics; called once for a step."""
        self._call("log", step, metrics)

    def step_done(self) -> None:
        self._call("step_done")

    def close(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        """Sends what is left, and whether the run has failed."""
        self._call("close", has_failed=error_type is not None)

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        for logger in self._all:
            with log.warn_once(logger.name):
                if hasattr(logger, method):
                    getattr(logger, method)(*arguments, **options)


class _MetricsFile:
    """metrics.jsonl: one JSON object a line, `step` first, on disk as soon as it is logged."""

    name = METRICS_FILE

    def __init__(self, folder: Path):
        self._file = open_to_append(folder / METRICS_FILE)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(f"{json.dumps({'step': step, **metrics})}\n".encode())

    def close(self, *, has_failed: bool) -> None:
        self._file.close()
