"""Loads the initial weights of a run from the checkpoint that `init_from` names."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpointing.pretrained import ARCH_WORD, Checkpoint, find_checkpoint, load_weights, take_rows
from config.architecture import Architecture
from config.files import changed_words, load_defaults
from distributed import log
from distributed.shards import Shard, Tensors
from models import network_class
from models.puzzle_embedding import PuzzleEmbedding
from models.search import Search

_TABLE = PuzzleEmbedding.weights_name


def copy_weights_(
    targets: Tensors,
    location: str,
    arch: Architecture,
    *,
    rows_of: Callable[[Checkpoint], np.ndarray | None] = lambda _: None,
) -> dict[str, Tensor]:
    """Copies the averages (EMA) of a checkpoint, or else its raw weights, into this rank's full tensors.

    Shards are not changed. For these, it returns {name: full weight}, and the caller sends these weights to
    all ranks. This function does not communicate.

    Puzzle embeddings are those of `rows_of`. If it returns None, and the puzzle table has another size, every
    row becomes the mean of the checkpoint's rows. Tensors that a search computes from this run's data are not
    changed (`Search.of_data`). Raises ValueError for any other difference. The message lists the keys to set.

    targets: Weights of this rank. rows_of: Returns the row of the checkpoint's puzzle table for each puzzle
    identifier of this run, as in `take_rows`, or None if they are equal.
    """
    checkpoint, network = find_checkpoint(location), network_class(arch.name)
    of_data = network.of_data if issubclass(network, Search) else ()
    own, stored = (
        {name: each for name, each in tensors.items() if name not in of_data}
        for tensors in (targets, load_weights(checkpoint))
    )
    try:
        whole = fill_(own, stored, source=f"init_from={location}", rows=rows_of(checkpoint))
    except ValueError as error:
        words = " ".join(_words_for(checkpoint.arch, instead_of=arch))
        hint = (
            f"Set {ARCH_WORD}, or {words}." if words else "Choose a dataset with its vocabulary and length."
        )
        raise ValueError(f"{error}. {hint}") from None
    log.info(f"starting with the weights of {checkpoint}")
    return whole


def _words_for(arch: Architecture, *, instead_of: Architecture) -> list[str]:
    """Returns the key=value overrides that turn the architecture `instead_of` into `arch`."""
    words, own = [], instead_of.model_dump()
    if arch.name != instead_of.name:
        words, own = [f"arch={arch.name}"], load_defaults(f"arch/{arch.name}")
    return words + words_of_arch(arch, own)


def words_of_arch(arch: Architecture, defaults: dict[str, Any]) -> list[str]:
    """Returns the key=value overrides that turn `defaults` into an architecture for the weights of `arch`.

    The result includes the number format only if it is float32, because a model trained in float32 may need
    that precision. The weights themselves are float32 in every format.
    """
    values = arch.model_dump()
    if values["forward_dtype"] != "float32":
        del values["forward_dtype"]
    return changed_words({"arch": values}, {"arch": defaults})


def fill_(
    targets: Tensors, stored: dict[str, Tensor], *, source: str, rows: np.ndarray | None = None
) -> dict[str, Tensor]:
    """Overwrites the full tensors of `targets` with `stored`. Returns {name: full weight} for the shards.

    If the puzzle table has another size, every row becomes the mean of the stored rows. Raises ValueError if
    names or other shapes differ.

    targets: Weights of this rank.
    stored: {name: full weight}.
    source: Origin of `stored`, for messages.
    rows: Row of the stored puzzle table for each row of this run, as in `take_rows`. If None, the same.
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
