"""The checkpoints of a run: saved as it goes, so that the same command again goes on where it was.

Here is when a save is waited for, which checkpoints are kept, which one a start goes on from, and how it
takes the run folder over. A checkpoint has

- a file of tensors for each of `TrainState.files` and `exports`, <file>.safetensors; where ranks hold shards,
  each rank's in <file>_<r>_of_<w>.safetensors (`checkpointing.tensors`)
- state.json: step, which is also the position in the data; every rank's metric sums since the last logged
  line; the best value of the evaluations before; fingerprint and description of the dataset;
  seq_len; versions
- config.yaml: the run's config

Tensors are safetensors and the rest is text: nothing is unpickled or executed. `checkpointing.writer` brings
them onto the disk.
"""

import json
import platform
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.files import (
    BEST_STEP,
    CONFIG_FILE,
    SELECTED_BY,
    STATE_FILE,
    checkpoints_in,
    newest_whole,
    read_rows,
    read_state,
    remove_checkpoint,
    remove_unfinished,
    step_of,
    verify_checkpoint,
)
from checkpointing.initial import copy_weights_
from checkpointing.tensors import files_of, find_files, load_into_
from checkpointing.writer import CheckpointWriter
from config.files import config_to_yaml
from config.schema import PretrainConfig
from config.writing import write_text
from parallel import log
from parallel.collectives import broadcast_object, gather_objects
from parallel.errors import collective_errors, lost_connection
from parallel.launch import check_folder_is_shared
from parallel.process_group import is_main, world_size
from training.best import Selection
from training.run_folder import cannot_write, cut_metrics_back, open_run_folder
from training.state import TrainState

# For a save under way, when an exception ends the run: for all of it, and where a rank is lost for its part.
_LAST_WAIT_SECONDS, _LAST_PART_SECONDS = 60.0, 3.0


class CheckpointManager:
    """The saves of a run, and the resume. All ranks call its methods together, except `record_metrics`.

    Around the steps: whatever ends the block, the save under way is waited for. A save goes on in threads
    after `save`, and one that fails is a warning. So only after `close` do all ranks know from
    `last_save_failed` whether the newest one did.

    dataset_info: of the dataset, as JSON values, which every checkpoint keeps.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        config: PretrainConfig,
        fingerprint: str,
        dataset_info: dict[str, Any] | None = None,
    ):
        self._run_folder, self._config, self._fingerprint = run_folder, config, fingerprint
        self._dataset_info = dataset_info
        self._writer = CheckpointWriter(run_folder, after_commit=self._record_saved)
        self._selection = None
        if config.keep_best is not None:
            self._selection = Selection(config.keep_best, has_validation=config.validation_fraction > 0)
        self._values: dict[int, float] = {}  # of the metric keep_best, by step; rank 0's
        self._saved: deque[Path] = deque()  # since they were last read; rank 0's
        self._stall_seconds: float | None = None
        self._newest_step: int | None = None  # of the last save, or of the resume
        self.last_save_failed = False

    def save(self, state: TrainState) -> None:
        """Saves the state of all ranks as `step_<N>`; returns when it is copied, or written if not async.

        Does nothing for the step of the last save, failed or not, or of the resume.
        """
        if state.step == self._newest_step:
            return
        self._newest_step, started = state.step, time.perf_counter()
        metrics = gather_objects(state.metrics.state(), state.ranks)
        texts = self._texts(state, metrics) if is_main() else {}
        self._writer.start(state.step, files_of(state.files() | state.exports()), texts)
        if not self._config.checkpoint_async:
            self._writer.wait()
        self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - started

    def _texts(self, state: TrainState, metrics: list[dict[str, float]]) -> dict[str, str]:
        """Returns the text of each file without tensors; metrics: `state.metrics.state()` of every rank."""
        content = {
            "step": state.step,
            "metrics": metrics,
            "best": self._best(),
            "dataset_fingerprint": self._fingerprint,
            "dataset": self._dataset_info,
            "seq_len": state.carry.data.inputs.shape[-1],
            "world_size": world_size(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }
        return {STATE_FILE: json.dumps(content, indent=1) + "\n", CONFIG_FILE: config_to_yaml(self._config)}

    def pop_stall_seconds(self) -> dict[str, float]:
        """Returns the seconds of waiting for saves since the last call; nothing where no save was due."""
        seconds, self._stall_seconds = self._stall_seconds, None
        return {} if seconds is None else {"checkpoint_stall_seconds": seconds}

    def pop_saved(self) -> list[Path]:
        """Returns the checkpoints that have become complete since the last call, on rank 0."""
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def _record_saved(self, folder: Path) -> None:
        # Rank 0's thread of the save calls it.
        self._saved.append(folder)
        self._prune()

    def record_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float | str]:
        """Records how good the state of `step` is, for `keep_best`; rank 0's record counts.

        Returns the best so far, as best/<metric>, best/step and best/selected_by, where the row of metrics
        has an evaluation.
        """
        if self._selection is None or not self._selection.is_evaluated(metrics):
            return {}
        self.check_metric(metrics)
        if (value := self._selection.value(metrics)) is not None:
            self._values[step] = value
        if (best := self._best()) is None:
            return {}
        return {
            f"best/{self._config.keep_best}": best["value"],
            BEST_STEP: best["step"],
            SELECTED_BY: best["selected_by"],
        }

    def check_metric(self, metrics: dict[str, float]) -> None:
        """Warns where an evaluation lacks the metric that is to choose the best checkpoint."""
        selection = self._selection
        if selection is None or not selection.is_evaluated(metrics) or selection.value(metrics) is not None:
            return
        names = {selection.short_name(name) for name in metrics} - {None}
        log.warning(
            f"keep_best={self._config.keep_best} is no metric of an evaluation, so that no checkpoint is the "
            f"best: choose from {', '.join(sorted(names))}"
        )

    def _best(self) -> dict[str, float | str] | None:
        """Returns the best value of the run so far, as a checkpoint has it."""
        step = None if self._selection is None else self._selection.best_step(self._values)
        if step is None:
            return None
        selected_by = self._selection.selected_by
        named = {"metric": self._selection.metric, "selected_by": selected_by}
        return {**named, "step": step, "value": self._values[step]}

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
        else:  # maybe on this rank only, or because a lost rank will never write its part
            part_seconds = None if lost_connection(error) is None else _LAST_PART_SECONDS
            self._writer.wait(timeout_seconds=_LAST_WAIT_SECONDS, part_seconds=part_seconds)

    def close(self) -> None:
        """Waits for the last save, and learns how it ended; a second call changes nothing."""
        self._writer.wait()
        if is_main():
            self._prune()
        self.last_save_failed = broadcast_object(self._writer.failure is not None)

    def _prune(self) -> None:
        """Removes all but the newest and the best checkpoints."""
        if self._config.keep_checkpoints is None:
            return
        folders = checkpoints_in(self._run_folder)
        kept = set(folders[-self._config.keep_checkpoints :])
        if self._selection is not None:
            values = dict(self._values)  # the main thread goes on adding to it
            saved = {step_of(path): path for path in folders}
            best = self._selection.best_step({step: values[step] for step in saved if step in values})
            kept |= {path for step, path in saved.items() if step == best}
        for folder in folders:
            if folder not in kept:
                try:
                    remove_checkpoint(folder)
                except OSError as error:
                    log.warning(f"the old checkpoint {folder} cannot be removed ({error})")

    def resume(self, state: TrainState, *, total_steps: int | None = None) -> bool:
        """Fills the state from the checkpoint that the config asks for, and cuts the log back to its step.

        Where there is none, a run begins, perhaps with the weights of `init_from`. Returns whether the row of
        the step is logged already; if not, the metric sums that it needs are in the state. From here on the
        folder belongs to this start. total_steps: of the run, which no checkpoint to resume from is beyond.
        """
        chosen, content = None, {}
        with collective_errors():
            if is_main():
                chosen = choose_checkpoint(self._run_folder, self._config)
        chosen = broadcast_object(chosen)
        if chosen is not None:
            with collective_errors():
                content = load_content(chosen, state, fingerprint=self._fingerprint)
                if total_steps is not None and state.step > total_steps:
                    ends = f"this run ends at step {total_steps}: give more epochs or train_steps"
                    raise ValueError(f"{chosen} is at step {state.step}, but {ends}")
            state.weights.gather_()
            self._newest_step = state.step
            log.info(f"going on from {chosen}")
        elif self._config.init_from is not None:
            full_copies = {}
            with collective_errors():
                if is_main():
                    weights, arch = state.files()["weights"], self._config.arch
                    full_copies = copy_weights_(weights, self._config.init_from, arch)
            state.broadcast_model_(full_copies)
        is_own = chosen is not None and chosen.parent == self._run_folder
        is_logged = False
        with collective_errors():
            if is_main():
                try:
                    is_logged = self._take_over(content if is_own else {}, step=state.step)
                except OSError as error:
                    raise cannot_write(self._run_folder, error) from None
        return broadcast_object(is_logged) or state.step == 0

    def _take_over(self, content: dict[str, Any], *, step: int) -> bool:
        """Makes the folder one of a run at `step`. content: state.json of its own checkpoint, or empty."""
        remove_unfinished(self._run_folder)
        is_logged = cut_metrics_back(self._run_folder, step=step)
        if self._selection is not None:
            best = content.get("best") or {}  # the log may lack it
            named = (best.get("metric"), best.get("selected_by"))
            if named == (self._selection.metric, self._selection.selected_by):
                self._values[best["step"]] = best["value"]
            for row, _ in read_rows(self._run_folder):
                if (value := self._selection.value(row)) is not None:
                    self._values[row["step"]] = value
        write_text(self._run_folder / CONFIG_FILE, config_to_yaml(self._config))
        return is_logged


def open_checkpoints(config: PretrainConfig, **described: Any) -> CheckpointManager:
    """Opens the run folder: rank 0 makes and locks it, and every rank has its log there; all ranks call it.

    described: fingerprint and dataset_info, as `CheckpointManager` has them.
    """
    with collective_errors():
        folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)
    return CheckpointManager(folder, config=config, **described)


def choose_checkpoint(run_folder: Path, config: PretrainConfig) -> Path | None:
    """Chooses the checkpoint that `resume` means; returns it, verified; None for a new run.

    - auto: the newest of the run folder; damaged ones on the way to it are set aside
    - must: the same, but there has to be one
    - never: none, and there must not be one, as it would be overwritten
    - a path: a checkpoint or the newest of another run; ignored once the run has checkpoints of its own

    Raises ValueError, one line, where that cannot be.
    """
    own = checkpoints_in(run_folder)
    if config.resume == "never":
        if own:
            raise ValueError(
                f"resume=never, but {run_folder} has come to {own[-1].name}: choose another run_name, "
                "or resume=auto"
            )
        return None
    newest = newest_whole(own, are_ours=True)
    if config.resume == "must" and newest is None:
        raise ValueError(f"resume=must, but {run_folder} has no checkpoint")
    if config.resume in ("auto", "must"):
        return newest
    return _choose_from(Path(config.resume), run_folder, newest)


def _choose_from(path: Path, run_folder: Path, newest: Path | None) -> Path:
    """Chooses what resume=`path` means. newest: the newest checkpoint of the run folder itself."""
    if newest is not None:
        if path.resolve().parent == run_folder.resolve() and path.resolve() != newest.resolve():
            raise ValueError(
                f"resume={path} is not the newest checkpoint of this run, that is {newest.name}: "
                "choose another run_name, and it branches off there"
            )
        log.info(f"{run_folder} goes on from its own newest checkpoint, resume={path} is where it began")
        return newest
    if not path.is_dir():
        raise ValueError(f"resume={path} is no folder: give auto, never, must, a run or a step_<N> in one")
    if step_of(path) is not None:
        verify_checkpoint(path)
        return path
    found = newest_whole(checkpoints_in(path), are_ours=False)
    if found is None:
        raise ValueError(f"resume={path}: there is no checkpoint step_<N> in it")
    return found


def load_content(folder: Path, state: TrainState, *, fingerprint: str) -> dict[str, Any]:
    """Fills the state from a verified checkpoint that any number of ranks saved; returns its state.json.

    Every rank calls it, none waits for another. ValueError where it is of other data or another shape.
    """
    content = read_state(folder)
    if content["dataset_fingerprint"] != fingerprint:
        raise ValueError(f"{folder} was trained on another dataset than data_path: choose another run_name")
    for name, tensors in state.files().items():
        # resume=PATH may be a run without averages, or an outer momentum, which then begins with zeros.
        is_optional, elsewhere = name in ("outer_optimizer", "ema_state"), state.weights.elsewhere
        load_into_(tensors, folder, name, is_optional=is_optional, elsewhere=elsewhere)
        if name == "ema_state" and tensors and not find_files(folder, name):
            state.average.restart()
            state.table.average.restart()
            log.info(
                f"{folder} has no averages of its weights: ema begins with the weights as they are there"
            )
    state.strategy.restart()
    state.step = content["step"]
    state.metrics.load_state(content["metrics"])
    return content
