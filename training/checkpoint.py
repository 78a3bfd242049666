"""What is in a checkpoint: all of a run's state, as tensors and texts by file, and back again.

- weights.safetensors: dense weights, buffers and puzzle table under plain names, usable without this code
- optimizer.safetensors, or where each rank has a share optimizer_<r>_of_<w>.safetensors: the moments of every
  dense weight (the puzzle table's optimizer keeps nothing)
- optimizer_rank_<r>.safetensors in its place, with `local_steps`: the moments of each rank; and
  outer_optimizer.safetensors: the momentum of its outer optimizer
- ema_weights.safetensors: with EMA, the averages in the place of the weights, as usable alone; and
  ema_state.safetensors: the same as they are kept, each row of the puzzle table as of when it last changed
- carry_<first>_<end>.safetensors: the slots first .. end - 1 of the global batch, a file for each rank
- state.json: step, which is also the position in the data; every rank's metric sums since the last logged
  line; the best value of the evaluations before; fingerprint and facts of the dataset, seq_len, digest of the
  config, W&B run, versions
- config.yaml: the run's config

Tensors are safetensors and the rest is text: nothing is unpickled or executed. What is spread over ranks each
of them writes for itself, into files <name>_<r>_of_<w>.safetensors, and the carry by
global slot, so that another number of ranks reads its share.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from checkpointing.files import CONFIG_FILE, EMA_WEIGHTS_FILE, STATE_FILE, WEIGHTS_FILE, read_state
from checkpointing.tensors import does_not_fit, files_of, load_into_
from config.files import config_to_yaml
from config.schema import PretrainConfig
from models.halting import Carry
from parallel.process_group import rank, world_size
from parallel.shards import Slice, tensor_of
from training.state import TrainState

_OPTIMIZER_FILE = "optimizer.safetensors"
_OF_RANK = re.compile(r"optimizer_rank_(\d+)\.safetensors")
_OUTER_FILE = "outer_optimizer.safetensors"
_EMA_FILE = "ema_state.safetensors"
_CARRY_FILE = re.compile(r"carry_(\d+)_(\d+)\.safetensors")


def tensors_of(state: TrainState) -> dict[str, dict[str, Tensor | Slice]]:
    """Returns the tensors of each file that this rank writes."""
    weights = state.weights()
    files = {f"carry_{state.slots.start}_{state.slots.stop}.safetensors": state.carry.tensors()}
    files |= files_of(WEIGHTS_FILE, weights)
    if state.outer is None:
        files |= files_of(_OPTIMIZER_FILE, state.moments())
    else:
        files[f"optimizer_rank_{rank()}.safetensors"] = state.moments()
        files |= files_of(_OUTER_FILE, state.outer.state())
    if state.ema is not None:
        files |= files_of(EMA_WEIGHTS_FILE, weights | state.ema.values(step=state.step))
        files |= files_of(_EMA_FILE, state.ema.state())
    return files


def texts_of(
    state: TrainState,
    *,
    metrics: list[dict[str, float]],
    config: PretrainConfig,
    best: dict[str, Any] | None,
    fingerprint: str,
    facts: dict[str, Any] | None,
    wandb_run_id: str | None,
) -> dict[str, str]:
    """Returns the text of each file that is no tensors, all of them rank 0's.

    metrics: `state.metrics.state()` of every rank. best: of the metric `keep_best`. facts: of the dataset, as
    JSON values (`dataset.description`).
    """
    config_text = config_to_yaml(config)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    content = {
        "step": state.step,
        "metrics": metrics,
        "best": best,
        "dataset_fingerprint": fingerprint,
        "dataset": facts,
        "seq_len": state.carry.data.inputs.shape[-1],
        "config_sha256": hashlib.sha256(config_text.encode()).hexdigest(),
        "wandb_run_id": wandb_run_id,
        "world_size": world_size(),
        "versions": versions,
    }
    return {STATE_FILE: json.dumps(content, indent=1) + "\n", CONFIG_FILE: config_text}


def load_content(folder: Path, files: Iterable[str], state: TrainState, *, fingerprint: str) -> None:
    """Fills the state from the verified `files` of a checkpoint that any number of ranks saved.

    Every rank calls it, none waits for another. ValueError where it is of other data or another shape.
    """
    content = read_state(folder)
    if content["dataset_fingerprint"] != fingerprint:
        raise ValueError(f"{folder} was trained on another dataset than data_path: choose another run_name")
    load_into_(state.weights(), folder, WEIGHTS_FILE)
    _load_moments_(folder, files, state)
    if state.outer is not None:
        state.outer.restart()
        if state.outer.state() and _OUTER_FILE in files:  # resume=PATH may be a run without
            load_into_(state.outer.state(), folder, _OUTER_FILE)
    if state.ema is not None:
        load_into_(state.ema.state(), folder, _EMA_FILE)

    ours = state.carry.tensors()
    # Earlier versions kept z_H and z_L for the transformer too, which has no use for them.
    carry = {k: v for k, v in _load_slots(folder, files, state.slots).items() if k in ours}
    _check_fits(carry, ours, folder)
    device = state.carry.steps.device
    state.carry = Carry.from_tensors({name: tensor.to(device) for name, tensor in carry.items()})

    state.step = content["step"]
    state.metrics.load_state(content["metrics"], rank=rank(), world_size=world_size())


def _load_moments_(folder: Path, files: Iterable[str], state: TrainState) -> None:
    """Reads the moments; with `local_steps` this rank's, or the mean of those of another number of ranks."""
    names = {int(match[1]): match[0] for match in map(_OF_RANK.fullmatch, sorted(files)) if match}
    moments = state.moments()
    if state.outer is not None and len(names) == world_size():
        names = {rank(): names[rank()]}
    for number, name in enumerate(names.values() or [_OPTIMIZER_FILE], 1):
        before = {key: tensor_of(each).clone() for key, each in moments.items()} if number > 1 else {}
        load_into_(moments, folder, name)
        for key, value in before.items():
            tensor_of(moments[key]).lerp_(value, 1 - 1 / number)


def _load_slots(folder: Path, files: Iterable[str], slots: slice) -> dict[str, Tensor]:
    """Reads the carry of the global slots, from the files that hold them."""
    pieces: dict[str, list[Tensor]] = {}
    ranges = [tuple(map(int, match.groups())) for match in map(_CARRY_FILE.fullmatch, files) if match]
    num_slots = (slots.stop - slots.start) * world_size()
    num_saved = sum(end - first for first, end in ranges)
    if num_slots != num_saved:
        raise ValueError(f"{folder} has {num_saved} slots, this run {num_slots}: give that global_batch_size")
    for first, end in sorted(ranges):
        begin, stop = max(first, slots.start), min(end, slots.stop)
        if begin < stop:
            with safe_open(folder / f"carry_{first}_{end}.safetensors", framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                    pieces.setdefault(name, []).append(file.get_slice(name)[begin - first : stop - first])
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _check_fits(values: dict[str, Tensor], like: dict[str, Tensor], folder: Path) -> None:
    ours, theirs = (
        {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()}
        for tensors in (like, values)
    )
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise does_not_fit(folder, name, there=theirs.get(name), here=ours.get(name))
