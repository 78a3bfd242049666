"""The checkpoints of a run: how the run saves them, and how it resumes from one.

The life of a checkpoint, in the order of the calls:

1. pretrain.py, `run_steps`, calls `CheckpointManager.save` after each step for which a checkpoint is due.
2. `CheckpointManager.save` (this file) collects the tensors of this rank (training/state.py, `sections` and
   `exports`) and the texts of state.json and config.yaml.
3. `CheckpointWriter.start` (checkpointing/files.py) copies the tensors to host memory. Training continues.
4. `CheckpointWriter._write` runs in a thread. It writes each section with `save_section`
   (checkpointing/tensors.py), and on rank 0 also the texts.
5. On rank 0, `CheckpointWriter._write` collects the sizes and hashes of all ranks (`_files_of_all`), writes
   the manifest, and renames the folder to step_<N>. `CheckpointWriter.remove_old` removes older checkpoints.
6. In the next launch, pretrain.py, `train`, calls `CheckpointManager.resume` (this file).
7. `choose_checkpoint` (this file, rank 0) chooses a checkpoint. `verify_checkpoint` (checkpointing/files.py)
   compares its files with the manifest.
8. `TrainState.load_` (training/state.py) reads this rank's part with `load_into_` (checkpointing/tensors.py).
9. `Weights.gather_` (optimizers/weights.py) copies the loaded weights into the weights of the forward pass.
10. `cut_back_rows` (runtime/metrics_file.py) removes rows of later steps from metrics.jsonl.

A checkpoint is a folder step_<N> with these files:

- <section>.safetensors for each section of `TrainState.sections` and `TrainState.exports`. If ranks hold
  shards of a section, each rank also writes <section>_<rank>_of_<ranks>.safetensors.
- state.json: The step, from which the position in the data follows. The metric sums of every rank since the
  last logged row. The best evaluation so far. Fingerprint and description of the dataset, seq_len, versions.
- config.yaml: The config of the run.
- trained_on.safetensors: Hashes of the examples that were trained on.
- manifest.json: Size and hash of each file.

Reading a checkpoint does not unpickle or execute anything.
"""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.files import (
    CONFIG_FILE,
    IDENTITIES_FILE,
    STATE_FILE,
    TRAINED_FILE,
    CheckpointWriter,
    checkpoints_in,
    explain_missing,
    newest_intact,
    read_state,
    remove_unfinished,
    step_of,
    verify_checkpoint,
)
from checkpointing.initial import copy_weights_
from checkpointing.pretrained import Checkpoint, find_checkpoint
from config.files import config_to_yaml
from config.schema import PretrainConfig
from dataset.equal import Trained, read_trained
from dataset.format import Dataset
from dataset.identities import identities_of
from distributed import log
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors, lost_connection
from distributed.launch import check_folder_is_shared
from distributed.process_group import is_main, world_size
from evaluation.known import find_match, has_rows_to_match
from evaluation.leaks import find_trained
from evaluation.results import is_number
from optimizers.learning_rate import learning_rates
from runtime.metrics_file import cut_back_rows, read_rows
from runtime.writing import replace_file, write_text
from training.best import BestStep
from training.run_folder import open_run_folder, writing_errors
from training.state import TrainState

# If an exception ends the run during a save, this rank waits for the save: at most 60 s in total. If the
# connection to a rank is lost, rank 0 waits at most 3 s for the files of the other ranks.
_LAST_WAIT_SECONDS, _LAST_OTHERS_SECONDS = 60.0, 3.0


class CheckpointManager:
    """Saves the checkpoints of a run, and resumes the run from one. All ranks call the methods together.

    It is a context manager around the training steps. Leaving the block, also by an exception, waits for the
    current save. A failed save only causes a warning.

    Args:
        run_folder: Folder that contains the checkpoints.
        config: Config of the run.
        fingerprint: Hash of the dataset, stored in every checkpoint.
        test_fingerprint: Hash of its test splits, stored in every checkpoint.
        dataset_info: Description of the dataset as JSON values, stored in every checkpoint.
        joins_repeats: Whether the run holds out equal puzzles together, stored in every checkpoint.
        trained_on: Function (step) -> examples of this run's data that were trained on up to the step. Called
            only on rank 0. If None, checkpoints do not contain them.
        dataset: Training data. The identities of its puzzles are stored once in the run folder, and
            `init_from` finds their embeddings. If None, embeddings are found by number.

    Attributes:
        best: The best step so far. `Monitor.log` adds evaluations to it on rank 0.
        last_save_failed: Whether the last save failed, equal on all ranks. Valid after `close`.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        config: PretrainConfig,
        fingerprint: str,
        test_fingerprint: str | None = None,
        dataset_info: dict[str, Any] | None = None,
        joins_repeats: bool = True,
        trained_on: Callable[[int], Trained] | None = None,
        dataset: Dataset | None = None,
    ):
        self._run_folder, self._config, self._fingerprint = run_folder, config, fingerprint
        self._test_fingerprint, self._dataset_info = test_fingerprint, dataset_info
        self._joins_repeats = joins_repeats
        self._of_data = trained_on
        self._dataset = dataset
        self._before: Trained | None = None  # examples of the checkpoint that this launch started from
        self.best = BestStep(config)
        self._writer = CheckpointWriter(run_folder, keep=config.keep_checkpoints, best_of=self.best.among)
        self._total_steps: int | None = None  # of the run
        self._stall_seconds: float | None = None
        self._newest_step: int | None = None  # step of the last save, or of the checkpoint resumed from
        self.last_save_failed = False

    def save(self, state: TrainState) -> None:
        """Saves the state of all ranks as step_<N>. All ranks call it.

        Returns when the tensors are copied to host memory. With checkpoint_async=false, it returns when this
        rank has written its files. Does nothing if the last save was of the same step, even if it failed, or
        if the run was resumed from this step.
        """
        if state.step == self._newest_step:
            return
        self._newest_step, started = state.step, time.perf_counter()
        numbers = state.numbers()
        contents = self._contents(state, numbers) if is_main() else {}
        self._writer.start(state.step, state.sections() | state.exports(), contents)
        if not self._config.checkpoint_async:
            self._writer.wait()
        self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - started

    def _contents(self, state: TrainState, numbers: dict[str, Any]) -> dict[str, bytes]:
        """Returns {file name: content} of the small files. numbers: Result of `state.numbers()`."""
        content = {
            **numbers,
            "best": self.best.state(),
            "dataset_fingerprint": self._fingerprint,
            "test_fingerprint": self._test_fingerprint,
            "dataset": self._dataset_info,
            "joins_repeats": self._joins_repeats,
            "seq_len": state.carry.data.inputs.shape[-1],
            "total_steps": self._total_steps,
            "world_size": world_size(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }
        texts = {STATE_FILE: json.dumps(content, indent=1) + "\n", CONFIG_FILE: config_to_yaml(self._config)}
        contents = {name: text.encode() for name, text in texts.items()}
        if (trained := self.trained_on(state.step)) is not None:
            contents[TRAINED_FILE] = trained.to_bytes()
        return contents

    def trained_on(self, step: int) -> Trained | None:
        """Returns the examples that were trained on up to a step, also before this run.

        Call it after `resume`. Returns None except on rank 0.
        """
        return self._of_data(step).join(self._before) if is_main() and self._of_data is not None else None

    def _tell_of_rate(self, chosen: Path, content: dict[str, Any], total_steps: int) -> None:
        """Logs the learning rate before and after resume=PATH, if the next step changes it by over 1 %.

        chosen, content: Checkpoint of another run, and its state.json.
        """
        step, before = content["step"], None
        for row, _ in read_rows(chosen.parent):
            before = row.get("train/lr", before) if row["step"] <= step else before
        after = learning_rates(self._config, step + 1, total_steps=total_steps)["lr"]
        if is_number(before) and abs(after - before) > 0.01 * before:
            length = content.get("total_steps")
            other = "" if length is None else f", that run had {length}"
            log.info(
                f"the learning rate changes from {before:.3g} to {after:.3g} after step {step}. This run has "
                f"{total_steps} steps{other}."
            )

    def _trained_before(self, chosen: Path | None) -> Trained | None:
        """Returns the examples of the checkpoint that this launch starts from: `chosen`, or `init_from`.

        Returns None if the run starts from random weights.
        """
        config, found = self._config, None
        if chosen is None and config.init_from is None:
            return None
        if chosen is None:
            found = find_trained(find_checkpoint(config.init_from))
        elif (found := read_trained(chosen / TRAINED_FILE)) is None and chosen.parent != self._run_folder:
            found = find_trained(find_checkpoint(chosen))
        elif found is None:  # an older version saved it: only the examples of `init_from` are unknown
            return Trained.of([], is_complete=config.init_from is None)
        return Trained.of([], is_complete=False) if found is None else found

    def pop_stall_seconds(self) -> dict[str, float]:
        """Returns the time spent in `save` since the last call, as a metric. {} without a save."""
        seconds, self._stall_seconds = self._stall_seconds, None
        return {} if seconds is None else {"checkpoint_stall_seconds": seconds}

    def pop_saved(self) -> list[Path]:
        """Returns the checkpoints that were completed since the last call. Empty except on rank 0."""
        return [self._writer.saved.popleft() for _ in range(len(self._writer.saved))]

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
        else:  # not `close`, because it communicates: other ranks may have ended, or may not have failed
            others_seconds = None if lost_connection(error) is None else _LAST_OTHERS_SECONDS
            self._writer.wait(timeout_seconds=_LAST_WAIT_SECONDS, others_seconds=others_seconds)

    def close(self) -> None:
        """Waits for the last save, and sets `last_save_failed`. All ranks call it. It may be called again."""
        self._writer.wait()
        if is_main():
            self._writer.remove_old()  # again, because an evaluation after the save may have found a new best
        self.last_save_failed = broadcast_object(self._writer.failure is not None)

    def resume(self, state: TrainState, *, total_steps: int | None = None) -> bool:
        """Loads the checkpoint that the key `resume` selects into `state`. All ranks call it.

        Without a checkpoint, the state stays at step 0. If `init_from` is set, it gets the weights of that
        checkpoint. Removes rows of later steps from metrics.jsonl. Ends all ranks with a message if the
        checkpoint belongs to another dataset, has other shapes, or its step is greater than `total_steps`.

        Args:
            state: State of step 0.
            total_steps: Number of steps of the run. If None, the step of the checkpoint is not checked.

        Returns:
            Whether metrics.jsonl contains a row of this step. True at step 0. If False, `state.metrics`
            contains the sums for this row, and the caller must log it.
        """
        folder, chosen, content = self._run_folder, None, {}
        self._total_steps = total_steps
        with collective_errors():
            if is_main():
                if chosen := choose_checkpoint(folder, self._config):
                    content = read_state(chosen)
                self._before = self._trained_before(chosen)
        chosen, content = broadcast_object((chosen, content))
        if chosen is not None:
            with collective_errors():
                if content["dataset_fingerprint"] != self._fingerprint:
                    other = f"{chosen} was trained on another dataset than data_path"
                    raise ValueError(f"{other}. Choose another run_name.")
                if total_steps is not None and content["step"] > total_steps:
                    ends = f"this run ends at step {total_steps}. Increase epochs or train_steps."
                    raise ValueError(f"{chosen} is at step {content['step']}, but {ends}")
                missing = state.load_(chosen, content)
            if "ema_state" in missing:
                log.info(f"{chosen} contains no averages (EMA). The averages start as its weights.")
            state.weights.gather_()
            self._newest_step = state.step
            log.info(f"resuming from {chosen}")
            if is_main() and chosen.parent != folder and total_steps is not None:
                self._tell_of_rate(chosen, content, total_steps)
        elif self._config.init_from is not None:
            full_copies = {}
            with collective_errors():
                if is_main():
                    weights, arch = state.sections()["weights"], self._config.arch
                    init_from = self._config.init_from
                    full_copies = copy_weights_(weights, init_from, arch, rows_of=self._rows_of)
            state.broadcast_model_(full_copies)
        rows = []
        with collective_errors():
            if is_main():
                with writing_errors(folder):
                    remove_unfinished(folder)
                    rows = cut_back_rows(folder, step=state.step)
                    write_text(folder / CONFIG_FILE, config_to_yaml(self._config))
                    self._write_identities(is_new=chosen is None)
                is_own = chosen is not None and chosen.parent == folder
                self.best.load_state(content["best"] if is_own else None, rows)
        is_logged = bool(rows) and rows[-1]["step"] == state.step
        return broadcast_object(is_logged) or state.step == 0

    def _rows_of(self, checkpoint: Checkpoint) -> np.ndarray | None:
        match = find_match(checkpoint, self._dataset) if self._dataset is not None else None
        return None if match is None else match.rows

    def _write_identities(self, *, is_new: bool) -> None:
        path, data = self._run_folder / IDENTITIES_FILE, self._dataset
        if is_new:
            path.unlink(missing_ok=True)  # of an earlier run in this folder
        if path.exists() or data is None or not has_rows_to_match(self._config.arch, data):
            return
        if (identities := identities_of(data)) is not None:
            with replace_file(path, "wb") as file:
                file.write(identities.to_bytes())


def choose_checkpoint(run_folder: Path, config: PretrainConfig) -> Path | None:
    """Returns the checkpoint that the key `resume` selects, after verifying it. None for a new run.

    - auto: The newest intact checkpoint in the run folder. Newer damaged ones are renamed.
    - must: The same as auto. Raises ValueError if there is no checkpoint.
    - never: None. Raises ValueError if there is a checkpoint, because the run would overwrite it.
    - a path: If this run has a checkpoint, the same as auto. Otherwise the checkpoint at this path, or the
      newest intact one if the path is a run folder.
    """
    own = checkpoints_in(run_folder)
    if config.resume == "never":
        if own:
            raise ValueError(
                f"resume=never, but {run_folder} already contains {own[-1].name}. Choose another run_name, "
                "or set resume=auto."
            )
        return None
    newest = newest_intact(own, are_ours=True)
    if config.resume == "must" and newest is None:
        raise ValueError(f"resume=must, but {run_folder} has no checkpoint. Set resume=auto for a new run.")
    if config.resume in ("auto", "must"):
        return newest
    return _choose_from(Path(config.resume), run_folder, newest)


def _choose_from(path: Path, run_folder: Path, newest: Path | None) -> Path:
    """Returns the checkpoint for resume=`path`. newest: This run's newest intact checkpoint, if any."""
    if newest is not None:
        if path.resolve().parent == run_folder.resolve() and path.resolve() != newest.resolve():
            raise ValueError(
                f"resume={path} is not the newest checkpoint of this run ({newest.name}). Choose another "
                "run_name to start a new run from it."
            )
        log.info(f"resume={path} has no effect, because {run_folder} already has checkpoints")
        return newest
    if not path.exists():
        raise ValueError(f"resume={explain_missing(path)}")
    if not path.is_dir():
        raise ValueError(
            f"resume={path} is not a folder. Set resume to auto, never, must, a run folder, or a step_<N> "
            "folder in one."
        )
    if step_of(path) is not None:
        verify_checkpoint(path)
        return path
    found = newest_intact(checkpoints_in(path), are_ours=False)
    if found is None:
        raise ValueError(f"resume={path} contains no checkpoint step_<N>. Choose another folder.")
    return found


def open_checkpoints(config: PretrainConfig, **described: Any) -> CheckpointManager:
    """Opens the run folder, and returns its checkpoint manager. All ranks call it.

    Rank 0 creates and locks the folder. Each rank opens a log file in it. An error ends all ranks with a
    message.

    Args:
        config: Config of the run.
        **described: The arguments of `CheckpointManager` that describe the data: `fingerprint`,
            `test_fingerprint`, `dataset_info`, `joins_repeats`, `trained_on` and `dataset`.
    """
    with collective_errors():
        folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)
    return CheckpointManager(folder, config=config, **described)
