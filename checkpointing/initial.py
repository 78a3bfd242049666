"""Loads the initial weights of a run from the checkpoint that `init_from` names."""

from typing import Any

import torch
from torch import Tensor

from checkpointing.pretrained import ARCH_WORD, find_checkpoint, load_weights
from config.architecture import Architecture
from config.files import changed_words, load_defaults
from distributed import log
from distributed.shards import Shard, Tensors
from models import network_class
from models.puzzle_embedding import PuzzleEmbedding
from models.search import Search

_TABLE = PuzzleEmbedding.weights_name


def copy_weights_(targets: Tensors, location: str, arch: Architecture) -> dict[str, Tensor]:
    """Overwrites this rank's weights with the averages of a checkpoint, or without averages its raw weights.

    targets: this rank's weights; tensors are overwritten, shards are not. Returns {name: whole weight} for
    the shards, to be sent to all ranks. Sends no message. A puzzle table of another size is filled with the
    mean of the checkpoint's rows, and facts of this run's data (`of_data`) stay; any other difference raises
    ValueError, with keys that fit.
    """
    checkpoint, network = find_checkpoint(location), network_class(arch.name)
    of_data = network.of_data if issubclass(network, Search) else ()
    own, stored = (
        {name: each for name, each in tensors.items() if name not in of_data}
        for tensors in (targets, load_weights(checkpoint))
    )
    try:
        whole = fill_(own, stored, source=f"init_from={location}")
    except ValueError as error:
        words = " ".join(_words_for(checkpoint.arch, instead_of=arch))
        cure = f"{ARCH_WORD}, or {words}" if words else "data of its vocabulary and length"
        raise ValueError(f"{error}: give {cure}") from None
    log.info(f"beginning with the weights of {checkpoint}")
    return whole


def _words_for(arch: Architecture, *, instead_of: Architecture) -> list[str]:
    """Returns the key=value words that turn the architecture `instead_of` into `arch`."""
    words, own = [], instead_of.model_dump()
    if arch.name != instead_of.name:
        words, own = [f"arch={arch.name}"], load_defaults(f"arch/{arch.name}")
    return words + words_of_arch(arch, own)


def words_of_arch(arch: Architecture, defaults: dict[str, Any]) -> list[str]:
    """Returns the key=value words that turn `defaults` into an architecture that fits the weights of `arch`.

    The number format is not part of it, because weights are float32 in every format. But float32 stays
    float32: a model that was trained in it may need the precision.
    """
    values = arch.model_dump()
    if values["forward_dtype"] != "float32":
        del values["forward_dtype"]
    return changed_words({"arch": values}, {"arch": defaults})


def fill_(targets: Tensors, stored: dict[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Overwrites the tensors of `targets` with `stored`; returns {name: whole weight} for the shards.

    stored: {name: whole weight}. source: their origin, for messages. ValueError for other names or shapes.
    """
    if missing := sorted(targets.keys() ^ stored.keys()):
        where = "this run" if missing[0] not in targets else "the checkpoint"
        raise ValueError(f"{source} is of another architecture: {where} has no {missing[0]}")
    stored = dict(stored)
    for name, target in targets.items():
        value, shape = stored[name], tuple(target.shape)
        if name == _TABLE and len(value) != shape[0]:
            log.info(
                f"{source}: its puzzle table has {len(value)} rows and this run's {shape[0]}: "
                "every row begins as the mean of its rows"
            )
            stored[name] = value = value.double().mean(dim=0).to(value.dtype).expand(shape[0], -1)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{source} is of another size: {name} is {list(value.shape)} there and {list(shape)} here"
            )
    with torch.no_grad():
        for name, target in targets.items():
            if isinstance(target, Tensor):
                target.copy_(stored[name])
    return {name: stored[name] for name, target in targets.items() if isinstance(target, Shard)}
