"""Loads the weights of another model at the start of a run (config key `init_from`)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpointing.finding import ARCH_WORD, find_checkpoint
from checkpointing.loading import load_weights, take_rows
from config.architecture import Architecture
from config.files import changed_words, load_arch_defaults
from dataset.metadata import Dataset
from distributed import log
from distributed.shards import Shard, Tensors
from evaluation.known import find_match
from models import network_class
from models.puzzle_embedding import PuzzleEmbedding

_TABLE = PuzzleEmbedding.weights_name


def copy_weights_(
    targets: Tensors, location: str, arch: Architecture, dataset: Dataset | None = None
) -> dict[str, Tensor]:
    """Copies the weights of a checkpoint into the full tensors of this rank. Does not communicate.

    Returns {name: full weight} for the weights of which this rank has only a shard. The caller sends them to
    all ranks. Uses the moving averages (EMA) if the checkpoint contains them. Raises ValueError if names or
    shapes of weights differ. Only the number of puzzle embeddings may differ. The message lists the config
    keys to set. Tensors that describe the training data (`Network.of_data`) do not change.

    targets: {name: full tensor or shard} of this rank, changed in place.
    location: Checkpoint: a path or an address hf://OWNER/NAME.
    arch: Architecture of this run.
    dataset: Training data. Each puzzle gets the stored embedding of the puzzle with the same name, and a new
        puzzle gets the mean of all. If `dataset` is None or the puzzles have no names, the numbers of
        embeddings decide. If they are equal, stored embedding i is copied to embedding i. Otherwise, each
        embedding becomes the mean.
    """
    checkpoint, network = find_checkpoint(location), network_class(arch.name)
    current, stored = (
        {name: tensor for name, tensor in tensors.items() if name not in network.of_data}
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
    overrides, current = [], instead_of.model_dump()
    if arch.name != instead_of.name:
        overrides, current = [f"arch={arch.name}"], load_arch_defaults(arch.name)
    return overrides + overrides_of_arch(arch, current)


def overrides_of_arch(arch: Architecture, defaults: dict[str, Any]) -> list[str]:
    """Returns command-line arguments for the values of `arch` that differ from `defaults`.

    Example: ["arch.hidden_size=128"]. The key `forward_dtype` is included only if it is float32, because a
    model trained in float32 may need this precision.

    defaults: Values of the section `arch` to compare with, such as {"hidden_size": 512, ...}.
    """
    values = arch.model_dump()
    if values["forward_dtype"] != "float32":
        del values["forward_dtype"]
    return changed_words({"arch": values}, {"arch": defaults})


def fill_(
    targets: Tensors, stored: dict[str, Tensor], *, source: str, rows: np.ndarray | None = None
) -> dict[str, Tensor]:
    """Copies weights into the full tensors of this rank. Shards do not change.

    Returns {name: full weight} for the weights of which this rank has only a shard. Raises ValueError if
    names or shapes differ. Only the number of puzzle embeddings may differ.

    targets: {name: full tensor or shard} of this rank, changed in place.
    stored: {name: full weight}.
    source: Origin of `stored`, for messages.
    rows: For each puzzle embedding of this run, the index of the stored embedding to copy, int64 [n]. -1
        selects the mean of all stored embeddings. If None and the numbers of embeddings are equal, stored
        embedding i is copied to embedding i. If None and the numbers differ, each becomes the mean.
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
