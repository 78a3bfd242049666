"""Where the numbers of a run go: metrics.jsonl, W&B, and the console. Rank 0 only.

A logger must never end a training run: what fails here is told once, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from checkpointing.files import METRICS_FILE
from config.schema import PretrainConfig
from parallel import log
from parallel.launch import REPOSITORY, code_files, git_commit
from parallel.process_group import is_main
from training.run_folder import WANDB_ID_FILE, last_wandb_step, write_text


class _Sink:
    """A place where rows of metrics go."""

    name: str

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def step_done(self) -> None:
        pass

    def close(self) -> None:
        raise NotImplementedError


class Sinks:
    """All places where rows of metrics go. On ranks other than 0 there are none.

    steps: from the number of steps done before this start to the one where it will stop.
    """

    def __init__(self, config: PretrainConfig, *, steps: range, num_parameters: int):
        self._sinks: list[_Sink] = []
        self._failed: set[str] = set()
        if not is_main():
            return
        folder = Path(config.checkpoint_path)
        wandb = (config, folder, num_parameters)
        for kind, arguments in ((_MetricsFile, (folder,)), (_Console, (steps,)), (_Wandb, wandb)):
            with self._told_once(kind.name):
                self._sinks.append(kind(*arguments))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one line of metrics; called once for a step."""
        self._each(lambda sink: sink.log(step, metrics))

    def step_done(self) -> None:
        self._each(lambda sink: sink.step_done())

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        """Sends what is left."""
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[_Sink], None]) -> None:
        for sink in self._sinks:
            with self._told_once(sink.name):
                action(sink)

    @contextlib.contextmanager
    def _told_once(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                log.warning(f"{name} fails, the run goes on without it ({type(error).__name__}: {error})")


class _MetricsFile(_Sink):
    """metrics.jsonl: one JSON object a line, `step` first, on disk as soon as it is logged."""

    name = METRICS_FILE

    def __init__(self, folder: Path):
        self._file = (folder / METRICS_FILE).open("a")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Console(_Sink):
    """A progress bar with loss, accuracy, steps per second and the time left; evaluations above it."""

    name = "the progress bar"

    def __init__(self, steps: range):
        self._bar = tqdm(
            total=steps.stop,
            initial=steps.start,
            unit="step",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file needs no moving bar
            dynamic_ncols=True,
        )
        self._shown: dict[str, str] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, label in (("lm_loss", "loss"), ("accuracy", "accuracy"), ("exact_accuracy", "exact")):
            if f"train/{name}" in metrics:
                self._shown[label] = f"{metrics[f'train/{name}']:.3f}"
        self._bar.set_postfix(self._shown, refresh=False)
        evaluated = {
            name: value for name, value in metrics.items() if name.startswith(("eval/", "validation/"))
        }
        if evaluated:
            shown = [f"{name.removeprefix('eval/')} {value:.4g}" for name, value in evaluated.items()]
            self._bar.write(f"step {step}: {'  '.join(shown)}", file=sys.stderr)

    def step_done(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _Wandb(_Sink):
    """Weights & Biases: the config, the code and its git commit, and every logged line."""

    name = "W&B"

    def __init__(self, config: PretrainConfig, folder: Path, num_parameters: int):
        self._run, self._last_step = None, last_wandb_step(folder)
        mode = wandb_mode(config.wandb_mode)
        if mode == "disabled":
            return
        import wandb

        self._run = wandb.init(
            project=config.project_name,
            name=config.run_name,
            id=_wandb_id(folder),
            resume="allow",
            mode=mode,
            dir=folder,
            config={**config.model_dump(), "num_parameters": num_parameters, "git_commit": git_commit()},
            settings=wandb.Settings(console="off", silent=True),
        )
        log.capture_library_warnings()  # for its warnings too
        code = set(map(str, code_files()))
        self._run.log_code(str(REPOSITORY), name="code", include_fn=lambda path: path in code)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is not None and step > self._last_step:  # the others it has, of a start that was killed
            self._run.log(metrics, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def wandb_mode(asked: str) -> str:
    """Chooses W&B's mode: `auto` is WANDB_MODE, else online where there is a login, else offline."""
    mode = asked if asked != "auto" else os.environ.get("WANDB_MODE") or "online"
    if mode == "online" and not _has_wandb_login():
        if asked == "online":
            log.warning("no W&B login is stored (wandb login, or WANDB_API_KEY): the W&B run is offline")
        return "offline"
    return mode


def _has_wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _wandb_id(folder: Path) -> str:
    """Returns the W&B id of this run folder, drawn once: a later start goes on in the same W&B run."""
    path = folder / WANDB_ID_FILE
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    return path.read_text().strip()
