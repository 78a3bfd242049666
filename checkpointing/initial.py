"""The weights that a run begins with where `init_from` names a checkpoint."""

import torch
from torch import Tensor

from checkpointing.pretrained import ARCH_WORD, find_checkpoint, load_weights
from config.architecture import Architecture
from config.files import changed_words, load_defaults
from models.network import PuzzleEmbedding
from parallel import log
from parallel.shards import Shard, Tensors

_TABLE = PuzzleEmbedding.weights_name


def copy_weights_(targets: Tensors, location: str, arch: Architecture) -> dict[str, Tensor]:
    """Overwrites the weights of this rank with a checkpoint's, with EMA with its averages. arch: of the run.

    A puzzle table of another size is filled with the mean of its rows. ValueError where anything else does
    not fit, with the keys that the checkpoint's arch needs. No rank waits for another. Returns by name the
    full copies of sharded weights, which are not overwritten.
    """
    checkpoint = find_checkpoint(location)
    try:
        spread = fill_(targets, load_weights(checkpoint), source=f"init_from={location}")
    except ValueError as error:
        words = " ".join(_words_for(checkpoint.arch, instead_of=arch))
        cure = f"{ARCH_WORD}, or {words}" if words else "data of its vocabulary and length"
        raise ValueError(f"{error}: give {cure}") from None
    log.info(f"beginning with the weights of {checkpoint}")
    return spread


def _words_for(arch: Architecture, *, instead_of: Architecture) -> list[str]:
    """Lists the words of a command line that make one arch of another."""
    words, own = [], instead_of.model_dump()
    if arch.name != instead_of.name:
        words, own = [f"arch={arch.name}"], load_defaults(f"arch/{arch.name}")
    return words + changed_words({"arch": arch.model_dump()}, {"arch": own})


def fill_(targets: Tensors, stored: dict[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Overwrites weights as `copy_weights_` does, and says so of the table; source: `stored` in messages."""
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
