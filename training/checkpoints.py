"""The checkpoints of a run: how the run saves them, and how it resumes from one.

The order of the calls in the life of a checkpoint is:

A save, after each step for which a checkpoint is due, and at the end of a launch:

1. pretrain.py: `run_steps` calls `CheckpointManager.save` (this file).
2. On rank 0, `save` creates the contents of state.json (with the step and the metric sums of each rank), of
   config.yaml, and of trained_on.safetensors. training/state.py: `TrainState.sections` and `exports` return
   the tensors of this rank.
3. checkpointing/writer.py: `CheckpointWriter.start` copies the tensors to host memory. A thread on each rank
   writes the files of this rank into a temporary folder (`save_section` in checkpointing/tensors.py). Rank 0
   writes manifest.json, and renames the folder to step_<N>. Training continues meanwhile, unless the config
   has checkpoint_async=false.

A resume, at the start of the next launch:

4. pretrain.py: `train` calls `open_run_folder` (training/run_folder.py), which compares the config with that
   of the stored run. Then it calls `CheckpointManager.resume` (this file).
5. checkpointing/files.py: `choose_checkpoint` chooses a checkpoint on rank 0, and compares its files with the
   manifest. Rank 0 reads state.json and trained_on.safetensors of the checkpoint.
6. training/state.py: `TrainState.load_` overwrites the state of step 0. `load_into_`
   (checkpointing/tensors.py) reads the tensors and shards of this rank from any number of files.
7. `resume` removes rows of later steps from metrics.jsonl (runtime/metrics_file.py), and restores the best
   metric so far (training/best.py).
8. pretrain.py: `run_steps` reads batches from the next step on. If the row of the loaded step is already
   logged, `Monitor` (training/monitor.py) resets the metric sums. Exception: that row was logged only because
   `max_steps` ended the previous launch.

What depends only on the step and the config is not stored, such as random numbers (models/random.py) and the
position in the data (dataset/plan.py). With local steps, a checkpoint is saved only after a step in which the
ranks merge their weights.

A checkpoint is a folder step_<N>. It contains tensors (in files for each section, such as "optimizer"),
state.json, config.yaml, trained_on.safetensors with hashes of the training examples, and manifest.json with
the size and hash of each file. Reading it does not unpickle or execute anything.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field

from checkpointing.files import (
    CONFIG_FILE,
    STATE_FILE,
    TRAINED_FILE,
    choose_checkpoint,
    read_state,
    remove_unfinished_checkpoints,
)
from checkpointing.writer import CheckpointWriter
from config.architecture import Strict
from config.schema import PretrainConfig, validate_config
from dataset.equal import Trained
from dataset.metadata import Dataset
from distributed import log
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors, lost_connection
from distributed.world import is_main, world_size
from evaluation.leaks import find_trained_before
from runtime.metrics_file import cut_back_rows
from runtime.writing import to_yaml, write_text
from training.best import BestStep
from training.initial import copy_weights_
from training.run_folder import write_identities, writing_errors
from training.schedule import log_rate_change
from training.state import TrainState

if TYPE_CHECKING:
    from training.data import RunData

# If an exception ends the run during a save, this rank waits for the save: at most 60 s in total. If the
# connection to a rank is lost, rank 0 waits at most 3 s for the files of the other ranks.
_LAST_WAIT_SECONDS, _LAST_OTHERS_SECONDS = 60.0, 3.0


class _Saved(Strict):
    """The entries of state.json that `CheckpointManager.resume` needs, and their types."""

    step: Annotated[int, Field(ge=0, lt=2**53)]
    metrics: list[dict[str, float]]
    best: dict[str, Any] | None
    dataset_fingerprint: str

    def mistakes(self) -> Iterator[str]:
        if not self.metrics or "steps_summed" not in self.metrics[0]:
            yield "metrics has no steps_summed"


class CheckpointManager:
    """Saves the checkpoints of a run, and resumes the run from one. All ranks call the methods together.

    A manager is a context manager around the training steps. At the end of the block, it waits for the
    current save, after an exception at most 60 s. A failed save causes a warning, and training continues. If
    the last save fails, `close` sets `last_save_failed`.

    Args:
        run_folder: Folder that contains the checkpoints.
        config: Config of the run.
        fingerprint: Hash of the dataset, stored in every checkpoint.
        test_fingerprint: Hash of the test splits of the dataset, stored in every checkpoint.
        dataset_info: Description of the dataset as JSON values, stored in every checkpoint.
        joins_repeats: Whether equal puzzles are either all trained on or all held out for validation, stored
            in every checkpoint.
        trained_on: Function (step) -> hashes of this run's examples that were trained on up to the step.
            Called only on rank 0. If None, checkpoints do not contain them.
        dataset: Training data. With `init_from`, each puzzle gets the stored embedding of the puzzle with the
            same name, and a new puzzle gets the mean of all. If `dataset` is None or the puzzles have no
            names, the numbers of embeddings decide. If they are equal, stored embedding i is copied to
            embedding i. Otherwise, each embedding becomes the mean.

    Attributes:
        best: Remembers evaluations, and finds the best step so far (`BestStep`).
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
        self._run_folder, self._config, self._dataset = run_folder, config, dataset
        self._described = {
            "dataset_fingerprint": fingerprint,
            "test_fingerprint": test_fingerprint,
            "dataset": dataset_info,
            "joins_repeats": joins_repeats,
        }
        self._trained_on = trained_on
        self._trained_before: Trained | None = None  # examples of earlier launches and runs, on rank 0
        self.best = BestStep(config)
        self._writer = CheckpointWriter(run_folder, keep=config.keep_checkpoints, best_of=self.best.best_of)
        self._total_steps: int | None = None  # of the run
        self._stall_seconds: float | None = None
        self._newest_step: int | None = None  # step of the last save, or of the loaded checkpoint of this run
        self.last_save_failed = False

    @classmethod
    def of_run(cls, config: PretrainConfig, data: "RunData") -> "CheckpointManager":
        """Returns the checkpoint manager of a run. Call it after `open_run_folder`."""
        return cls(
            Path(config.checkpoint_path),
            config=config,
            fingerprint=data.fingerprint,
            test_fingerprint=data.test_fingerprint,
            dataset_info=data.info().to_json(),
            joins_repeats=data.joins_repeats,
            trained_on=data.trained_on,
            dataset=data.dataset,
        )

    def save(self, state: TrainState) -> None:
        """Saves the state of all ranks as a checkpoint, the folder step_<N>. All ranks call it.

        If this run has resumed from the checkpoint of the current step, or if `save` was already called for
        this step, does nothing. Otherwise, waits until the previous save has ended. Returns when the tensors
        of this rank are copied to host memory. A thread then writes the files. With
        checkpoint_async=false, `save` returns only when this rank has written its files, and on rank 0 only
        when all ranks have.
        """
        if state.step == self._newest_step:
            return
        self._newest_step, started = state.step, time.perf_counter()
        # On rank 0, the metric sums of each rank: [{"loss": 70.5, ..., "steps_summed": 10}, ...].
        sums = state.metrics.gather()
        small_files = self._small_files(state, sums) if is_main() else {}
        self._writer.start(state.step, state.sections() | state.exports(), small_files)
        if not self._config.checkpoint_async:
            self._writer.wait()
        self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - started

    def _small_files(self, state: TrainState, sums: list[dict[str, float]]) -> dict[str, bytes]:
        content = {
            "step": state.step,
            "metrics": sums,
            # The best evaluation so far: {"metric", "selected_by", "step", "value"}, or None.
            "best": self.best.state(),
            **self._described,
            "seq_len": state.carry.data.inputs.shape[-1],
            "total_steps": self._total_steps,
            "world_size": world_size(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }
        small_files = {
            STATE_FILE: (json.dumps(content, indent=1) + "\n").encode(),
            CONFIG_FILE: to_yaml(self._config.model_dump()).encode(),
        }
        if (trained := self.trained_at(state.step)) is not None:
            # The arrays "hashes" (if there are many, only a sample), "rate" of the sample, and "is_complete".
            small_files[TRAINED_FILE] = trained.to_bytes()
        return small_files

    def trained_at(self, step: int) -> Trained | None:
        """Returns hashes of all examples on which the weights at training step `step` may be trained.

        These are all training examples of the dataset folders that were used up to this step. The result
        includes the training examples of the checkpoint that the run started from. If some
        examples are unknown, the field `is_complete` of the result is False. Call it after `resume`. Returns
        None on ranks other than 0, and if `trained_on` of the constructor is None.
        """
        if not is_main() or self._trained_on is None:
            return None
        return self._trained_on(step).join(self._trained_before)

    def resume(self, state: TrainState, *, total_steps: int | None = None) -> bool:
        """Loads the checkpoint that the config key `resume` selects into `state`. All ranks call it.

        If `resume` selects no checkpoint and the key `init_from` is set, loads only the weights of the
        checkpoint that `init_from` names. Removes rows of later steps from metrics.jsonl, and writes
        config.yaml (in a new run also identities.npz, if needed) into the run folder. Ends all ranks with a
        message if the checkpoint does not match this run.

        Args:
            state: State of step 0.
            total_steps: Number of steps of the run. A checkpoint of a later step is an error. If None, the
                step is not checked.

        Returns:
            Whether metrics.jsonl contains the row of the loaded step. If False, and the step has a row, the
            caller must log it. `state.metrics` contains the metric sums.
        """
        folder, config, chosen, content, is_this_run = self._run_folder, self._config, None, {}, False
        self._total_steps = total_steps
        # Rank 0 chooses an intact checkpoint of this run, or of another run (resume=PATH). It also removes
        # unfinished checkpoints of killed processes.
        with collective_errors():
            if is_main():
                if chosen := choose_checkpoint(folder, config):
                    content = read_state(chosen)
                with writing_errors(folder):
                    remove_unfinished_checkpoints(folder)
                is_this_run = chosen is not None and chosen.parent == folder
                # If `chosen` is a checkpoint, read its trained_on.safetensors.
                self._trained_before = find_trained_before(config, chosen, is_this_run=is_this_run)
                if chosen is not None:
                    self._check(chosen, content, is_this_run=is_this_run)
        chosen, content, is_this_run = broadcast_object((chosen, content, is_this_run))

        if chosen is not None:
            state.load_(chosen, content)
            # With resume=PATH, also save the first step if it is due: its evaluation may remain the best.
            self._newest_step = state.step if is_this_run else None
            log.info(f"resuming from {chosen}")
            if is_main() and not is_this_run and total_steps is not None:
                log_rate_change(config, chosen, content, total_steps)
        elif config.init_from is not None:
            full_weights = {}
            with collective_errors():
                if is_main():
                    weights = state.sections()["weights"]
                    full_weights = copy_weights_(weights, config.init_from, config.arch, self._dataset)
            state.broadcast_model_(full_weights)

        # Rank 0 removes the rows of metrics.jsonl after the step of the checkpoint, because this launch logs
        # them again. The other rows contain the evaluations, from which `best` is restored. If the row of the
        # best evaluation is lost, its value is known from state.json.
        rows = []
        with collective_errors():
            if is_main():
                with writing_errors(folder):
                    rows = cut_back_rows(folder, step=state.step)
                    write_text(folder / CONFIG_FILE, to_yaml(config.model_dump()))
                    write_identities(folder, config.arch, self._dataset, is_new=chosen is None)
                self.best.load_state(content["best"] if is_this_run else None, rows)
        is_logged = bool(rows) and rows[-1]["step"] == state.step
        return broadcast_object(is_logged)

    def _check(self, chosen: Path, content: dict[str, Any], *, is_this_run: bool) -> None:
        needed = {key: content[key] for key in _Saved.model_fields if key in content}
        try:
            validate_config(_Saved, needed, where=str(chosen / STATE_FILE))
        except ValueError as error:
            raise ValueError(f"{error}. Choose another checkpoint.") from None
        if content["dataset_fingerprint"] != self._described["dataset_fingerprint"]:
            other = f"{chosen} was trained on another dataset than data_path"
            instead = f"Set init_from={chosen} instead of resume, or data_path to its dataset."
            if is_this_run:
                instead = f"Choose another {self._config.folder_key}."
            raise ValueError(f"{other}. {instead}")
        if self._total_steps is not None and content["step"] > self._total_steps:
            ends = f"this run ends at step {self._total_steps}. Increase epochs or train_steps."
            raise ValueError(f"{chosen} is at step {content['step']}, but {ends}")

    def pop_stall_seconds(self) -> dict[str, float]:
        """Returns the seconds spent in `save` since the previous call of this method.

        The result is {"checkpoint_stall_seconds": seconds}, or {} if nothing was saved since then.
        """
        seconds, self._stall_seconds = self._stall_seconds, None
        return {} if seconds is None else {"checkpoint_stall_seconds": seconds}

    def pop_saved(self) -> list[Path]:
        """Returns the folders of the checkpoints that were written since the previous call of `pop_saved`.

        Returns [] on ranks other than 0.
        """
        return [self._writer.saved.popleft() for _ in range(len(self._writer.saved))]

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
        else:  # not `close`, because it communicates: other ranks may have ended, or may not have failed
            others_seconds = None if lost_connection(error) is None else _LAST_OTHERS_SECONDS
            self._writer.wait(is_last=True, timeout_seconds=_LAST_WAIT_SECONDS, others_seconds=others_seconds)

    def close(self) -> None:
        """Waits until the last checkpoint is saved, and sets `last_save_failed`. All ranks call it.

        If the config key `keep_checkpoints` is set, then removes all checkpoints except the newest ones (as
        many as the key says) and the best. A second call does no harm.
        """
        self._writer.wait(is_last=True)
        if is_main():
            self._writer.remove_old()  # again, because an evaluation after the save may have found a new best
        self.last_save_failed = broadcast_object(self._writer.failure is not None)
