"""The checkpoints of a run: how the run saves them, removes old ones, and resumes from one.

A checkpoint is a folder step_<N> with

- <section>.safetensors for each section of `TrainState.sections` and `exports`; where ranks hold shards, one
  file for each rank, <section>_<rank>_of_<ranks>.safetensors (`checkpointing.tensors`)
- state.json: the step, which is also the position in the data; every rank's metric sums since the last logged
  row; the best value of the evaluations so far; fingerprint and description of the dataset; seq_len; versions
- config.yaml: the run's config

Reading a checkpoint unpickles and executes nothing. `checkpointing.writer` writes the files.
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

# How long a run that an exception ends waits for a save under way: for the whole save, and, where the
# connection to a rank is lost, for the files of the other ranks.
_LAST_WAIT_SECONDS, _LAST_OTHERS_SECONDS = 60.0, 3.0


class CheckpointManager:
    """The manager of a run's saves and resume. All ranks call the methods together, except `record_metrics`.

    A context manager around the steps: leaving the block, also by an exception, waits for the current save.
    Threads write a checkpoint after `save` has returned, and a failed save is a warning. `close` waits for
    the last save; then `last_save_failed` says on all ranks whether it failed.

    fingerprint, dataset_info: of the dataset, kept in every checkpoint; dataset_info has JSON values.
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
        self._values: dict[int, float] = {}  # of the metric keep_best, by step; on rank 0
        self._saved: deque[Path] = deque()  # what `pop_saved` will return; on rank 0
        self._stall_seconds: float | None = None
        self._newest_step: int | None = None  # of the last save, or of the resume
        self.last_save_failed = False

    def save(self, state: TrainState) -> None:
        """Saves the state of all ranks as `step_<N>`; all ranks call it.

        Returns when the tensors are copied, or with checkpoint_async=false when they are on disk. Does
        nothing if this step was the last one that was saved, successfully or not, or resumed from.
        """
        if state.step == self._newest_step:
            return
        self._newest_step, started = state.step, time.perf_counter()
        metrics = gather_objects(state.metrics.state(), state.ranks)
        texts = self._texts(state, metrics) if is_main() else {}
        self._writer.start(state.step, files_of(state.sections() | state.exports()), texts)
        if not self._config.checkpoint_async:
            self._writer.wait()
        self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - started

    def _texts(self, state: TrainState, metrics: list[dict[str, float]]) -> dict[str, str]:
        """Returns the texts of state.json and config.yaml. metrics: `state.metrics.state()` of each rank."""
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
        """Returns, as a metric, how long `save` has kept the run since the last call; {} without a save."""
        seconds, self._stall_seconds = self._stall_seconds, None
        return {} if seconds is None else {"checkpoint_stall_seconds": seconds}

    def pop_saved(self) -> list[Path]:
        """Returns the checkpoints that were completed since the last call; on ranks other than 0, none."""
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def _record_saved(self, folder: Path) -> None:
        # Called on rank 0, by the thread of the save.
        self._saved.append(folder)
        self._prune()

    def record_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float | str]:
        """Records a row of the log for the choice of the best checkpoint. Only rank 0's record is used.

        Returns the best value so far, as best/<metric>, best/step and best/selected_by; {} where the row has
        no evaluation.
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
        """Warns if an evaluation lacks the metric `keep_best`, which chooses the best checkpoint."""
        selection = self._selection
        if selection is None or not selection.is_evaluated(metrics) or selection.value(metrics) is not None:
            return
        names = {selection.short_name(name) for name in metrics} - {None}
        log.warning(
            f"keep_best={self._config.keep_best} is no metric of an evaluation, so that no checkpoint is the "
            f"best: choose from {', '.join(sorted(names))}"
        )

    def _best(self) -> dict[str, float | str] | None:
        """Returns metric, selected_by, step and value of the best evaluation, for state.json; or None."""
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
        else:  # not `close`, in which ranks talk: other ranks may be gone, or have no exception
            others_seconds = None if lost_connection(error) is None else _LAST_OTHERS_SECONDS
            self._writer.wait(timeout_seconds=_LAST_WAIT_SECONDS, others_seconds=others_seconds)

    def close(self) -> None:
        """Waits for the last save, and sets `last_save_failed`. All ranks call it, perhaps repeatedly."""
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
        """Loads into `state` the checkpoint that the key `resume` chooses. All ranks call it.

        Without a checkpoint the state stays that of step 0, with the weights of `init_from` if given. Drops
        the log's rows of later steps. Returns whether the log has the row of this step (True at step 0); if
        not, the state has the metric sums to log this row. Ends all ranks if the checkpoint's step is beyond
        `total_steps`.
        """
        chosen, content = None, {}
        with collective_errors():
            if is_main():
                chosen = choose_checkpoint(self._run_folder, self._config)
        chosen = broadcast_object(chosen)
        if chosen is not None:
            with collective_errors():
                content = load_state_(chosen, state, fingerprint=self._fingerprint)
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
                    weights, arch = state.sections()["weights"], self._config.arch
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
        """Prepares the run folder for going on at `step`; returns whether the log has the row of `step`.

        content: state.json of a checkpoint in this folder; {} without one.
        """
        remove_unfinished(self._run_folder)
        is_logged = cut_metrics_back(self._run_folder, step=step)
        if self._selection is not None:
            best = content.get("best") or {}  # the row of the best step may be missing in the log
            named = (best.get("metric"), best.get("selected_by"))
            if named == (self._selection.metric, self._selection.selected_by):
                self._values[best["step"]] = best["value"]
            for row, _ in read_rows(self._run_folder):
                if (value := self._selection.value(row)) is not None:
                    self._values[row["step"]] = value
        write_text(self._run_folder / CONFIG_FILE, config_to_yaml(self._config))
        return is_logged


def open_checkpoints(config: PretrainConfig, **described: Any) -> CheckpointManager:
    """Creates and locks the run folder (rank 0), and opens a log file there on each rank. All ranks call it.

    described: the arguments `fingerprint` and `dataset_info` of the returned manager.
    """
    with collective_errors():
        folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)
    return CheckpointManager(folder, config=config, **described)


def choose_checkpoint(run_folder: Path, config: PretrainConfig) -> Path | None:
    """Returns the verified checkpoint that the key `resume` asks for; None for a new run.

    - auto: the newest undamaged checkpoint of the run folder; newer damaged ones are renamed
    - must: the same, but ValueError where there is no checkpoint
    - never: None, but ValueError where there is a checkpoint, which the run would overwrite
    - a path: this checkpoint, or the newest one of that run; the same as auto once this run has checkpoints
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
    """Returns the checkpoint for resume=`path`. newest: the newest checkpoint in the run folder, if any."""
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


def load_state_(folder: Path, state: TrainState, *, fingerprint: str) -> dict[str, Any]:
    """Loads a verified checkpoint into `state`; returns the content of state.json.

    Every rank calls it, and none waits for another; any number of ranks may have saved the checkpoint. Raises
    ValueError where the checkpoint has another dataset or other shapes.
    """
    content = read_state(folder)
    if content["dataset_fingerprint"] != fingerprint:
        raise ValueError(f"{folder} was trained on another dataset than data_path: choose another run_name")
    for name, tensors in state.sections().items():
        # resume=PATH may be a run without averages, or without outer momentum, which then begins with zeros.
        is_optional, elsewhere = name in ("outer_optimizer", "ema_state"), state.weights.elsewhere
        load_into_(tensors, folder, name, is_optional=is_optional, elsewhere=elsewhere)
        if name == "ema_state" and tensors and not find_files(folder, name):
            state.average.reset_to_weights()
            state.table.average.reset_to_weights()
            log.info(
                f"{folder} has no averages of its weights: ema begins with the weights as they are there"
            )
    state.strategy.reset_to_weights()
    state.step = content["step"]
    state.metrics.load_state(content["metrics"])
    return content
