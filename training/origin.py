"""What a run takes over from the checkpoint of another run: weights (`init_from`) and known examples."""

from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.files import TRAINED_FILE
from checkpointing.initial import copy_weights_
from checkpointing.pretrained import Checkpoint, find_checkpoint
from config.schema import PretrainConfig
from dataset.equal import Trained, read_trained
from dataset.format import Dataset
from distributed import log
from distributed.errors import collective_errors
from distributed.process_group import is_main
from evaluation.known import find_match
from evaluation.leaks import find_trained
from evaluation.results import is_number
from optimizers.learning_rate import learning_rates
from runtime.metrics_file import read_rows
from training.state import TrainState


def load_initial_weights_(state: TrainState, config: PretrainConfig, dataset: Dataset | None) -> None:
    """Overwrites the weights of all ranks with those of the checkpoint `init_from`. All ranks call it.

    The optimizer state and the step do not change. An error ends all ranks with a message.

    state: State of step 0.
    dataset: Training data, to find the puzzle embeddings of its puzzles in the checkpoint. If None, they are
        found by number.
    """

    def rows_of(checkpoint: Checkpoint) -> np.ndarray | None:
        match = None if dataset is None else find_match(checkpoint, dataset)
        return None if match is None else match.rows

    full_copies = {}
    with collective_errors():
        if is_main():
            weights = state.sections()["weights"]
            full_copies = copy_weights_(weights, config.init_from, config.arch, rows_of=rows_of)
    state.broadcast_model_(full_copies)


def trained_before(config: PretrainConfig, chosen: Path | None, *, is_own: bool) -> Trained | None:
    """Returns the examples on which the checkpoint that this launch starts from was trained.

    Returns None if the run starts from random weights. Raises ValueError if a file is damaged.

    chosen: Checkpoint that the key `resume` selects. If None, the launch starts from `init_from` or from
        random weights.
    is_own: Whether `chosen` is a checkpoint of this run.
    """
    found = None
    if chosen is None and config.init_from is None:
        return None
    if chosen is None:
        found = find_trained(find_checkpoint(config.init_from))
    elif (found := read_trained(chosen / TRAINED_FILE)) is None and not is_own:
        found = find_trained(find_checkpoint(chosen))
    elif found is None:  # an older version saved it: only the examples of `init_from` are unknown
        return Trained.of([], is_complete=config.init_from is None)
    return Trained.of([], is_complete=False) if found is None else found


def log_rate_change(config: PretrainConfig, chosen: Path, content: dict[str, Any], total_steps: int) -> None:
    """Logs the learning rate before and after the step of a checkpoint, if they differ by over 1 %.

    Example: the other run had fewer steps, so its learning rate was lower at its end.

    chosen: Checkpoint of another run (resume=PATH).
    content: Content of its state.json.
    total_steps: Number of steps of this run.
    """
    step, before = content["step"], None
    for row, _ in read_rows(chosen.parent):
        before = row.get("train/lr", before) if row["step"] <= step else before
    after = learning_rates(config, step + 1, total_steps=total_steps)["lr"]
    if is_number(before) and abs(after - before) > 0.01 * before:
        length = content.get("total_steps")
        other = "" if length is None else f", that run had {length}"
        log.info(
            f"the learning rate changes from {before:.3g} to {after:.3g} after step {step}. This run has "
            f"{total_steps} steps{other}."
        )
