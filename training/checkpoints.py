"""The checkpoints of a run: how the run saves them, and resumes from one.

A checkpoint is a folder step_<N> with

- <section>.safetensors for each section of `TrainState.sections` and `exports`; where ranks hold shards, one
  file for each rank, <section>_<rank>_of_<ranks>.safetensors (`checkpointing.tensors`)
- state.json: the step, which is also the position in the data; every rank's metric sums since the last logged
  row; the best value of the evaluations so far; fingerprint and description of the dataset; seq_len; versions
- config.yaml: the run's config

Reading a checkpoint unpickles and executes nothing. `checkpointing.files` writes and verifies the folders.
"""

import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.files import (
    CONFIG_FILE,
    STATE_FILE,
    CheckpointWriter,
    checkpoints_in,
    newest_intact,
    read_state,
    remove_unfinished,
    step_of,
    verify_checkpoint,
)
from checkpointing.initial import copy_weights_
from config.files import config_to_yaml
from config.schema import PretrainConfig
from distributed import log
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors, lost_connection
from distributed.launch import check_folder_is_shared
from distributed.process_group import is_main, world_size
from runtime.metrics_file import cut_back_rows
from runtime.writing import write_text
from training.best import BestStep
from training.run_folder import open_run_folder, writing_errors
from training.state import TrainState

# How long a run that an exception ends waits for a save under way: for the whole save, and, where the
# connection to a rank is lost, for the files of the other ranks.
_LAST_WAIT_SECONDS, _LAST_OTHERS_SECONDS = 60.0, 3.0


class CheckpointManager:
    """The manager of a run's saves and resume. All ranks call the methods together.

    A context manager around the steps: leaving the block, also by an exception, waits for the current save.
    Threads write a checkpoint after `save` has returned, and a failed save is a warning. `close` waits for
    the last save; then `last_save_failed` says on all ranks whether it failed.

    best: the best step so far; rank 0 adds evaluations to it. fingerprint, dataset_info: of the dataset, kept
    in every checkpoint; dataset_info has JSON values.
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
        self.best = BestStep(config)
        self._writer = CheckpointWriter(run_folder, keep=config.keep_checkpoints, best_of=self.best.among)
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
        numbers = state.numbers()
        texts = self._texts(state, numbers) if is_main() else {}
        self._writer.start(state.step, state.sections() | state.exports(), texts)
        if not self._config.checkpoint_async:
            self._writer.wait()
        self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - started

    def _texts(self, state: TrainState, numbers: dict[str, Any]) -> dict[str, str]:
        """Returns the texts of state.json and config.yaml. numbers: `state.numbers()`."""
        content = {
            **numbers,
            "best": self.best.state(),
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
        return [self._writer.saved.popleft() for _ in range(len(self._writer.saved))]

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
            self._writer.remove_old()  # an evaluation after the save may have found another best
        self.last_save_failed = broadcast_object(self._writer.failure is not None)

    def resume(self, state: TrainState, *, total_steps: int | None = None) -> bool:
        """Loads into `state` the checkpoint that the key `resume` chooses. All ranks call it.

        Without a checkpoint the state stays that of step 0, with the weights of `init_from` if given. Drops
        the log's rows of later steps. Returns whether the log has the row of this step (True at step 0); if
        not, the state has the metric sums to log this row. Ends all ranks if the checkpoint is of another
        dataset or other shapes, or its step is beyond `total_steps`.
        """
        folder, chosen, content = self._run_folder, None, {}
        with collective_errors():
            if is_main() and (chosen := choose_checkpoint(folder, self._config)):
                content = read_state(chosen)
        chosen, content = broadcast_object((chosen, content))
        if chosen is not None:
            with collective_errors():
                if content["dataset_fingerprint"] != self._fingerprint:
                    other = f"{chosen} was trained on another dataset than data_path"
                    raise ValueError(f"{other}: choose another run_name")
                if total_steps is not None and content["step"] > total_steps:
                    ends = f"this run ends at step {total_steps}: give more epochs or train_steps"
                    raise ValueError(f"{chosen} is at step {content['step']}, but {ends}")
                missing = state.load_(chosen, content)
            if "ema_state" in missing:
                log.info(f"{chosen} has no averages: ema begins with the weights as they are there")
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
        rows = []
        with collective_errors():
            if is_main():
                with writing_errors(folder):
                    remove_unfinished(folder)
                    rows = cut_back_rows(folder, step=state.step)
                    write_text(folder / CONFIG_FILE, config_to_yaml(self._config))
                is_own = chosen is not None and chosen.parent == folder
                self.best.load_state(content["best"] if is_own else None, rows)
        is_logged = bool(rows) and rows[-1]["step"] == state.step
        return broadcast_object(is_logged) or state.step == 0


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
    newest = newest_intact(own, are_ours=True)
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
    found = newest_intact(checkpoints_in(path), are_ours=False)
    if found is None:
        raise ValueError(f"resume={path}: there is no checkpoint step_<N> in it")
    return found
