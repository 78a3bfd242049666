"""Logs a run to Weights & Biases (W&B).

The rows of metrics.jsonl matter most. If sending the code, a picture, a checkpoint or the report fails, a
warning is printed, and rows are still sent. A thread sends code and checkpoints, because this takes time.
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from checkpointing.files import BEST_STEP, IDENTITIES_FILE, step_of
from distributed import log
from distributed.launch import REPOSITORY, code_files
from runtime.metrics_file import forget_wandb_step, last_wandb_step, read_rows
from runtime.reading import read_text
from runtime.writing import open_to_append, write_text
from training.best import goal_of
from training.loggers import PICTURES, LoggedRun
from training.run_folder import REPORT_FILE, find_original

if TYPE_CHECKING:
    from training.pictures import Thoughts

_ID_FILE = "wandb_run_id"
_CLIENT_LOG = "logs/wandb.log"  # output of the client's helper process
# In seconds. WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT override these values.
_LIMITS = {"init_timeout": 60.0, "finish_timeout": 300.0}
_ARTIFACT_SECONDS = 60.0  # maximum wait for artifacts at the end of a run
_EVALUATED = ("eval/", "eval_raw/", "test/", "validation/")


class WandbRun:
    """Logger that sends the metrics of a run to Weights & Biases (W&B).

    If the W&B client fails, nothing more is sent until the run is started again. If W&B can then be reached,
    the missing metrics are sent first.
    """

    name = "wandb"

    def __init__(self, run: LoggedRun):
        self._logged, self._config, self._folder = run, run.config, run.folder
        self._has_ended = False  # whether W&B's client has ended
        self._defined: set[str] = set()
        self._best: dict[str, float] = {}  # {evaluated metric: best value so far}
        self._best_step: int | None = None  # step with the best value of keep_best, if found in this launch
        self._id, is_new = _wandb_id(self._folder)
        self._last_step = 0 if is_new else last_wandb_step(self._folder)
        self._run = self._start(choose_mode(run.config.wandb_mode))
        if is_new or self._run.id != self._id:  # the agent of a sweep sets another id
            write_text(self._folder / _ID_FILE, self._run.id)
        self._catch_up(is_new=is_new)
        self._extras = _Extras()
        self._extras.submit("the code", self._log_code)

    def _start(self, mode: str) -> Any:
        """Creates the run at W&B, or continues it. Returns the run object of the package wandb.

        If mode is "online" and the W&B client fails, the run is only stored on disk ("offline").

        mode: Mode of the W&B client: "online", "offline" or another value of WANDB_MODE.
        """
        logging.getLogger("wandb").handlers[:] = [logging.NullHandler()]  # exceptions contain its messages
        try:
            run = self._init(mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            _end_client()
            run, reason = self._init("offline"), str(error).partition("\n")[0]
            is_login = isinstance(error, wandb.errors.AuthenticationError)
            problem = "W&B login failed" if is_login else "cannot reach W&B"
            log.warning(f"{problem} ({reason}). The W&B run is offline. {self._how_to_send()}")
        if not run.offline:
            log.info(f"W&B: {run.url}")
        return run

    def _init(self, mode: str) -> Any:
        limits = {name: value for name, value in _LIMITS.items() if f"WANDB_{name.upper()}" not in os.environ}
        # The client writes rows to disk every second, so that `wandb sync` can send them after a kill.
        limits["x_transaction_log_flush_interval"] = 1.0
        settings = wandb.Settings(console="off", silent=True, finish_timeout_raises=True, **limits)
        with _stderr_into(self._folder / _CLIENT_LOG):  # its messages do not help on the console
            wandb.setup(settings)
        config = self._config
        return wandb.init(
            project=config.project_name,
            id=self._id,
            resume="allow",
            name=f"{config.run_name} (seed {config.seed})",
            group=config.wandb_group,
            job_type="train",
            tags=list(self._logged.tags),
            config=self._logged.description,
            dir=self._folder,
            mode=mode,
            settings=settings,
        )

    def _how_to_send(self) -> str:
        return f"To send it later, run `wandb sync --include-online {self._folder}/wandb/*run-*`."

    def _catch_up(self, *, is_new: bool) -> None:
        """Sends the rows of metrics.jsonl that W&B does not have yet.

        In offline mode, sends rows only if the W&B run is new. In all modes, writes the best values of
        evaluation metrics in metrics.jsonl to W&B's summary of the run.

        is_new: Whether the W&B run is new.
        """
        if not self._run.offline:
            self._last_step = self._run.starting_step - 1
        for row, _ in read_rows(self._folder):
            metrics = {name: value for name, value in row.items() if name != "step"}
            self._record_best(metrics)
            if is_new or not self._run.offline:
                self._send(row["step"], metrics)

    def _end_early(self, error: Exception) -> None:
        """Warns about an error of the W&B client, and ends the client."""
        self._has_ended = True
        reason = f"{type(error).__name__}; {self._folder / _CLIENT_LOG} may contain the reason"
        log.warning(
            f"W&B's client has ended ({reason}). Training continues. The next launch of the run sends the "
            "missing rows to W&B."
        )
        _end_client()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._has_ended:
            return
        try:
            self._send(step, metrics)
            self._record_best(metrics)
        except Exception as error:
            self._end_early(error)
        if metrics.get(BEST_STEP) == step:
            self._best_step = step

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        if step <= self._last_step:  # W&B already has this row, and cannot replace it
            return
        for name in metrics.keys() - self._defined:
            if goal := goal_of(name):
                self._run.define_metric(name, summary=f"{goal},last")
        self._defined |= metrics.keys()
        self._run.log(metrics, step=step, commit=True)
        self._last_step = step

    def _record_best(self, metrics: dict[str, Any]) -> None:
        """Updates the best value so far of evaluation metrics, as best/<metric> in W&B's summary.

        Values of earlier launches of the run are included. W&B itself would not include them.

        metrics: {metric: value} of one row of metrics.jsonl. Training metrics are ignored. A metric of an
        evaluation is ignored if it is not known whether higher or lower values are better.
        """
        for name, value in metrics.items():
            goal = goal_of(name) if name.startswith(_EVALUATED) else None
            if goal is not None and math.isfinite(value):
                best = {"max": max, "min": min}[goal](self._best.get(name, value), value)
                self._best[name] = self._run.summary[f"best/{name}"] = best

    def log_puzzles(self, step: int, thoughts: "Thoughts") -> None:
        if step > self._last_step and not self._has_ended:
            self._run.log({PICTURES: wandb.Html(thoughts.html())}, step=step)

    def log_checkpoint(self, folder: Path) -> None:
        """Sends a checkpoint to W&B, depending on the config key `wandb_log_checkpoints`.

        If the key is "all", sends every checkpoint. If it is "best", sends only a checkpoint that is the best
        so far. If it is "none", sends nothing.

        folder: Folder of a complete checkpoint.
        """
        is_best, selection = step_of(folder) == self._best_step, self._config.wandb_log_checkpoints
        if not self._has_ended and (selection == "all" or (selection == "best" and is_best)):
            aliases = ["latest", "best"] if is_best else ["latest"]
            self._extras.submit(str(folder), lambda: self._log_folder(folder, aliases))

    def close(self, *, has_failed: bool) -> None:
        """Sends the remaining data, and ends the run at W&B. Waits at most 60 s for code and checkpoints.

        has_failed: Whether an exception ended the training.
        """
        if self._has_ended:
            return
        self._extras.close(seconds=_ARTIFACT_SECONDS)
        report = self._folder / REPORT_FILE
        if report.is_file():
            with log.warn_once("W&B's copy of the report"):
                self._run.save(str(report), base_path=str(self._folder), policy="now", glob=False)
        try:
            self._run.finish(exit_code=int(has_failed))
        except Exception as error:
            reason = type(error).__name__
            log.warning(f"W&B did not receive all data ({reason}). {self._how_to_send()}")
            _end_client()

    # ------------------------------------------------------------------------------- artifacts, in the thread

    def _log_code(self) -> None:
        artifact = wandb.Artifact("code", type="code")
        for path in code_files():
            artifact.add_file(str(path), name=path.relative_to(REPOSITORY).as_posix())
        self._run.log_artifact(artifact)

    def _log_folder(self, folder: Path, aliases: list[str]) -> None:
        """Sends a checkpoint to W&B as a new version of an artifact.

        aliases: Names of this version at W&B, such as "latest" and "best".
        """
        metadata = {"step": step_of(folder), "run_name": self._config.run_name}
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata=metadata)
        artifact.add_dir(str(folder), name=folder.name)
        if (identities := folder.with_name(IDENTITIES_FILE)).is_file():
            artifact.add_file(str(identities), name=identities.name)
        self._run.log_artifact(artifact, aliases=aliases)


class _Extras:
    """Background thread that runs functions one after the other. If a function fails, logs a warning."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, name: str, task: Callable[[], None]) -> None:
        self._tasks.put((name, task))

    def close(self, *, seconds: float) -> None:
        """Waits until the functions have run, but at most `seconds`."""
        self._tasks.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning(f"W&B did not receive all artifacts within {seconds:g} s. The rest is not sent.")

    def _work(self) -> None:
        while (submitted := self._tasks.get()) is not None:
            name, task = submitted
            try:
                task()
            except Exception as error:  # only the first line, because the server may answer with a page
                reason = str(error).partition("\n")[0]
                reason = f"{type(error).__name__}: {reason}"
                log.warning(f"W&B upload failed: {name} ({reason}). Logged metrics are not affected.")


def choose_mode(wandb_mode: str) -> str:
    """Returns the mode for the W&B client: "online", "offline" or another value of WANDB_MODE.

    If the mode would be "online", but no login is found, returns "offline".

    wandb_mode: Value of the config key `wandb_mode`. "auto" means the value of the environment variable
        WANDB_MODE, or "online" if this variable is not set.
    """
    mode = wandb_mode if wandb_mode != "auto" else os.environ.get("WANDB_MODE") or "online"
    if mode == "online" and not has_wandb_login():
        if wandb_mode == "online":
            log.warning("no W&B login found. The W&B run is offline. Run wandb login, or set WANDB_API_KEY.")
        return "offline"
    return mode


def has_wandb_login() -> bool:
    """Returns whether W&B's client finds a login for its server, for example in WANDB_API_KEY or .netrc."""
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    os.environ.setdefault("WANDB_SILENT", "true")  # otherwise the client prints where it finds its settings
    host = wandb_setup.singleton().settings.base_url
    options = {"source": "", "prompt": False, "update_session": False}
    try:
        return wbauth.authenticate_session(host=host, **options) is not None
    except wandb.errors.AuthenticationError:  # a malformed key: `wandb.init` raises the same error
        return True


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Context manager that appends the stderr of its block to the file `path`, instead of showing it.

    The stderr of child processes that the block starts also goes to the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    try:
        with open_to_append(path) as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def _end_client() -> None:
    """Ends the helper process of the W&B client, so that it prints nothing later."""
    with contextlib.suppress(Exception):
        wandb.teardown()


def _wandb_id(folder: Path) -> tuple[str, bool]:
    """Returns (id of the W&B run for this run folder, whether the id is new).

    The id is stored in the file wandb_run_id of the folder. Without this file, the id is new: the environment
    variable WANDB_RUN_ID, or else a random id. In a copy of a run folder, the id is new and random.
    """
    path = folder / _ID_FILE
    stored = read_text(path).strip() if path.exists() else ""
    if not stored:
        return os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4), True
    if original := find_original(folder, _ID_FILE):
        log.info(f"{folder} is a copy of {original}. It gets its own W&B run.")
        forget_wandb_step(folder)
        return secrets.token_hex(4), True
    return stored, False


LOGGER = WandbRun
