"""What a run takes over from the checkpoint of another run: weights (`init_from`) and known examples."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpointing.files import TRAINED_FILE
from checkpointing.finding import ARCH_WORD, find_checkpoint
from checkpointing.loading import load_weights, take_rows
from config.architecture import Architecture
from config.files import changed_words, load_defaults
from config.schema import PretrainConfig
from dataset.equal import Trained, read_trained
from dataset.format import Dataset
from distributed import log
from distributed.errors import collective_errors
from distributed.process_group import is_main
from distributed.shards import Shard, Tensors
from evaluation.known import find_match
from evaluation.leaks import find_trained
from evaluation.metric_tables import is_number
from models import network_class
from models.puzzle_embedding import PuzzleEmbedding
from models.search import Search
from optimizers.learning_rate import learning_rates
from runtime.metrics_file import read_rows
from training.state import TrainState

_TABLE = PuzzleEmbedding.weights_name


def load_initial_weights_(state: TrainState, config: PretrainConfig, dataset: Dataset | None) -> None:
    """Overwrites the weights of all ranks with those of the checkpoint `init_from`. All ranks call it.

    The optimizer state and the step do not change. An error ends all ranks with a message.

    state: State of step 0. dataset: Training data, see `copy_weights_`.
    """
    full_copies = {}
    with collective_errors():
        if is_main():
            weights = state.sections()["weights"]
            full_copies = copy_weights_(weights, config.init_from, config.arch, dataset)
    state.broadcast_model_(full_copies)


def copy_weights_(
    targets: Tensors, location: str, arch: Architecture, dataset: Dataset | None = None
) -> dict[str, Tensor]:
    """Copies the weights of a checkpoint into the full tensors of this rank. Shards do not change.

    Returns {name: full weight} for the shards. The caller sends these weights to all ranks, because this
    function does not communicate. The weights are averages (EMA) if the checkpoint contains them.

    Raises ValueError if names or shapes of weights differ. The message lists the config keys to set. There
    are two exceptions. If the puzzle table has another size, and the puzzles are unknown, every row becomes
    the mean of the checkpoint's rows. Tensors that a search computes from the data of this run do not change.

    targets: Weights of this rank. location: Checkpoint, as in `find_checkpoint`. arch: Architecture of this
    run. dataset: Training data, to find the embeddings of its puzzles. If None, they are found by number.
    """
    checkpoint, network = find_checkpoint(location), network_class(arch.name)
    of_data = network.of_data if issubclass(network, Search) else ()
    current, stored = (
        {name: tensor for name, tensor in tensors.items() if name not in of_data}
        for tensors in (targets, load_weights(checkpoint))
    )
    try:
        match = None if dataset is None else find_match(checkpoint, dataset)
        rows = None if match is None else match.rows
        full_weights = fill_(current, stored, source=f"init_from={location}", rows=rows)
    except ValueError as error:
        overrides = " ".join(_overrides_for(checkpoint.arch, instead_of=arch))
        hint = (
            f"Set {ARCH_WORD}, or {overrides}."
            if overrides
            else "Choose a dataset with its vocabulary and length."
        )
        raise ValueError(f"{error}. {hint}") from None
    log.info(f"starting with the weights of {checkpoint}")
    return full_weights


def _overrides_for(arch: Architecture, *, instead_of: Architecture) -> list[str]:
    """Returns the command-line overrides (key=value) that turn the architecture `instead_of` into `arch`."""
    overrides, current = [], instead_of.model_dump()
    if arch.name != instead_of.name:
        overrides, current = [f"arch={arch.name}"], load_defaults(f"arch/{arch.name}")
    return overrides + overrides_of_arch(arch, current)


def overrides_of_arch(arch: Architecture, defaults: dict[str, Any]) -> list[str]:
    """Returns the command-line overrides that turn `defaults` into an architecture for weights of `arch`.

    The key `forward_dtype` is included only if it is float32. A model trained in float32 may need this
    precision. Otherwise, the run may choose its dtype, because stored weights are always float32.
    """
    values = arch.model_dump()
    if values["forward_dtype"] != "float32":
        del values["forward_dtype"]
    return changed_words({"arch": values}, {"arch": defaults})


def fill_(
    targets: Tensors, stored: dict[str, Tensor], *, source: str, rows: np.ndarray | None = None
) -> dict[str, Tensor]:
    """Copies weights into the full tensors of this rank. Returns {name: full weight} for the shards.

    If the puzzle table has another size, every row becomes the mean of the stored rows. Raises ValueError if
    names or other shapes differ.

    targets: Weights of this rank, full tensors or shards. stored: {name: full weight}. source: Origin of
    `stored`, for messages. rows: Row of the stored puzzle table for each row of this run, int64 [n], or -1
    for the mean of all rows. If None, the same row.
    """
    if missing := sorted(targets.keys() ^ stored.keys()):
        where = "this run" if missing[0] not in targets else "the checkpoint"
        raise ValueError(
            f"{source} does not match the architecture of this run: {where} has no weight {missing[0]}"
        )
    stored = dict(stored)
    if rows is not None and _TABLE in stored:
        num_missing = int((rows < 0).sum())
        log.info(
            f"{source}: {len(rows) - num_missing} of {len(rows)} puzzle embeddings are copied. The others "
            f"({num_missing}) are unknown to the checkpoint. They start as the mean of its rows."
        )
        stored[_TABLE] = take_rows(stored[_TABLE], rows)
    for name, target in targets.items():
        value, shape = stored[name], tuple(target.shape)
        if name == _TABLE and len(value) != shape[0]:
            log.info(
                f"{source}: the puzzle table has {len(value)} rows in the checkpoint, but {shape[0]} in this "
                "run. Every row starts as the mean of the checkpoint's rows."
            )
            stored[name] = value = value.double().mean(dim=0).to(value.dtype).expand(shape[0], -1)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{source} does not match this run: {name} has shape {list(value.shape)} in the checkpoint, "
                f"but {list(shape)} in this run"
            )
    with torch.no_grad():
        for name, target in targets.items():
            if isinstance(target, Tensor):
                target.copy_(stored[name])
    return {name: stored[name] for name, target in targets.items() if isinstance(target, Shard)}


def trained_before(config: PretrainConfig, chosen: Path | None, *, is_this_run: bool) -> Trained | None:
    """Returns the examples on which the checkpoint that this launch starts from was trained.

    Returns None if the run starts from random weights. Raises ValueError if a file is damaged.

    chosen: Checkpoint that the key `resume` selects. If None, the launch starts from `init_from` or from
        random weights.
    is_this_run: Whether `chosen` is a checkpoint of this run.
    """
    found = None
    if chosen is None and config.init_from is None:
        return None
    if chosen is None:
        found = find_trained(find_checkpoint(config.init_from))
    elif (found := read_trained(chosen / TRAINED_FILE)) is None and not is_this_run:
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
            f"the learning rate changes from {before:.3g} to {after:.3g} after step {step}, because this run "
            f"has another schedule than {chosen.parent}. This run has {total_steps} steps{other}."
        )
