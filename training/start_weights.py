"""Beginning with the weights of a checkpoint, of our own or published, instead of random ones."""

from pathlib import Path

import torch
from torch import Tensor

from evaluation.trained_model import find_checkpoint, load_weights
from models import HaltingModel
from parallel import log

_TABLE = "puzzle_emb.weights"


def copy_weights_(model: HaltingModel, path: Path) -> None:
    """Overwrites the model's weights with those of the checkpoint at `path`, with EMA its averages.

    A puzzle table of another size is filled with the mean of its rows. ValueError where anything else does
    not fit. No rank waits for another.
    """
    checkpoint = find_checkpoint(path)
    theirs, ours = load_weights(checkpoint), model.network.state_dict()
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            where = "this run" if name not in ours else "the checkpoint"
            raise ValueError(f"init_from={path} is of another architecture: {where} has no {name}")
        if name == _TABLE and len(theirs[name]) != len(ours[name]):
            log.info(
                f"init_from={path}: its puzzle table has {len(theirs[name])} rows and this run's "
                f"{len(ours[name])}: every row begins as the mean of its rows"
            )
            theirs[name] = _mean_row(theirs[name]).expand(len(ours[name]), -1)
        if theirs[name].shape != ours[name].shape:
            raise ValueError(
                f"init_from={path} is of another size: {name} is {list(theirs[name].shape)} there and "
                f"{list(ours[name].shape)} here"
            )
    with torch.no_grad():
        for name, weight in ours.items():
            weight.copy_(theirs[name])
    log.info(f"beginning with the weights of {checkpoint.path}")


def _mean_row(table: Tensor) -> Tensor:
    return table.double().mean(dim=0, keepdim=True).to(table.dtype)
