"""The loggers of a run: metrics.jsonl, the console, and the loggers that the key `loggers` names.

Each file of this folder defines a logger: the name `LOGGER` is a class with the members of `Logger`. A plugin
may define one too (docs/extend.md). Only rank 0 has loggers. A failing logger only causes a warning.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from config.schema import PretrainConfig
from distributed import log
from distributed.world import is_main
from runtime.metrics_file import MetricsFile
from runtime.plugins import defined
from training.code import git_commit
from training.console import Console

if TYPE_CHECKING:
    from training.pictures import Thoughts

# What happens after a failure, by logger and method.
_THEN = {
    (MetricsFile.name, "log"): "Training continues. The rows are written later, if possible.",
    (MetricsFile.name, "close"): "The last rows are missing in the file.",
}
PICTURES = "puzzles"  # name of the pictures of puzzles


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """Facts about a run that every logger gets.

    Attributes:
        config: Config of the run.
        steps: range(number of training steps already done, step after which this process ends).
        info: {name: value} of facts that are not in the config, such as {"num_parameters": 27000000}.
        tags: Names of the kinds of puzzles and of the architecture, such as ("sudoku", "hrm").
    """

    config: PretrainConfig
    steps: range
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Returns the run folder."""
        return Path(self.config.checkpoint_path)

    @property
    def description(self) -> dict[str, Any]:
        """Returns all keys of the config, the entries of `info`, and the git commit of the code."""
        return {**self.config.model_dump(), **self.info, "git_commit": git_commit()}


class Logger(Protocol):
    """Interface of a logger, a class that stores or shows the metrics of a run. Only rank 0 uses loggers.

    A logger may also have these methods:

    - `log_puzzles(step, thoughts)` gets pictures of puzzles (`training.pictures.Thoughts`). It is called
      before `log` of the same step.
    - `log_checkpoint(folder)` gets the folder of a complete checkpoint.
    - `step_done()` is called after each training step.
    - `set_activity(name)` gets what the run does now, such as "evaluating".

    Attributes:
        name: Name that users put into the config key `loggers`.
    """

    name: str

    def __init__(self, run: LoggedRun): ...

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Logs the metrics of a training step, such as {"train/lm_loss": 0.5}.

        The run calls `log` at most once for each step, with increasing steps.
        """

    def close(self, *, has_failed: bool) -> None:
        """Ends logging. has_failed: Whether an exception ended the run."""


def find_loggers(config: PretrainConfig) -> list[type[Logger]]:
    """Returns the logger classes that the config key `loggers` names. W&B is left out if it is disabled.

    Raises ValueError for an unknown name, or if a package is missing.
    """
    of_plugins = {logger.name: logger for logger in defined("LOGGER")}
    known = sorted({*(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")), *of_plugins})
    found = []
    for name in dict.fromkeys(config.loggers):
        if name not in known:
            raise ValueError(f"unknown logger in loggers: {name}. Choose from {', '.join(known)}.")
        if name == "wandb" and _is_wandb_disabled(config):
            continue
        try:
            found.append(of_plugins.get(name) or importlib.import_module(f"{__name__}.{name}").LOGGER)
        except ImportError as error:
            hint = f"Run pip install {name}, or remove {name} from loggers."
            raise ValueError(f"the logger {name} lacks a package: {error}. {hint}") from None
    return found


def _is_wandb_disabled(config: PretrainConfig) -> bool:
    mode = config.wandb_mode if config.wandb_mode != "auto" else os.environ.get("WANDB_MODE")
    return mode == "disabled" or _environment_disables_wandb()


def _environment_disables_wandb() -> bool:
    return os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")


class Loggers:
    """All loggers of a run as one object.

    The methods `log`, `log_puzzles`, `log_checkpoint`, `step_done`, `set_activity` and `close` each call the
    method of the same name of every logger that has one. On ranks other than 0, they do nothing.
    """

    def __init__(self, run: LoggedRun):
        self._all: list[Any] = []  # objects with the members of `Logger`
        if not is_main():
            return
        builders = {MetricsFile.name: lambda: MetricsFile(run.folder)} | {
            logger_class.name: functools.partial(logger_class, run)
            for logger_class in find_loggers(run.config)
        }
        if "wandb" in run.config.loggers and _environment_disables_wandb():
            log.info(f"W&B is disabled, because WANDB_DISABLED={os.environ['WANDB_DISABLED']}")
        for name, build in builders.items():
            with log.warn_once(name):
                self._all.append(build())
        with log.warn_once(Console.name):  # the last one, because its clock starts, and W&B may take a minute
            self._all.insert(1, Console(run.config, run.steps))

    @property
    def take_pictures(self) -> bool:
        """Returns whether a logger can log pictures of puzzles. False on ranks other than 0."""
        return any(hasattr(logger, "log_puzzles") for logger in self._all)

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._call("log", step, metrics)

    def log_puzzles(self, step: int, thoughts: "Thoughts") -> None:
        self._call("log_puzzles", step, thoughts)

    def log_checkpoint(self, folder: Path) -> None:
        self._call("log_checkpoint", folder)

    def step_done(self) -> None:
        self._call("step_done")

    def set_activity(self, name: str) -> None:
        self._call("set_activity", name)

    def close(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        """Closes all loggers.

        error_type: Type of the exception that ended the run, or None.
        """
        self._call("close", has_failed=error_type is not None)

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        for logger in self._all:
            then = _THEN.get((logger.name, method), "The run continues without it.")
            with log.warn_once(logger.name, then=then):
                if hasattr(logger, method):
                    getattr(logger, method)(*arguments, **options)
