"""Checkpoints: `step_<N>/` in the run folder, all of a run's state, whole or not there.

- weights.safetensors: dense weights, buffers and puzzle table under plain names, usable without this code
- optimizer.safetensors: both moments of every dense weight
- carry_<first>_<end>.safetensors: the slots first .. end - 1 of the global batch, a file for each rank
- state.json: step, metric sums since the last logged line, dataset fingerprint, versions
- config.yaml, manifest.json: the run's config; size and sha256 of every file

Written beside the goal and renamed once complete. Tensors are safetensors and the rest is JSON: nothing is
unpickled. The carry is stored by global slot, so that another number of ranks reads its share.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from config.files import config_to_yaml
from config.schema import PretrainConfig
from dataset.format import Batch, sha256_of
from evaluation.checkpoint_folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    newest_checkpoint,
    verify_checkpoint,
)
from models.halting import Carry
from models.network import State
from parallel.agreement import shared_outcome
from parallel.collectives import barrier, broadcast_object, gather_objects
from parallel.messages import say
from parallel.process_group import is_main
from training.run_folder import cut_metrics_back, write_text
from training.state import TrainState

_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "state.json"
_MOMENTS = ("first_moment", "second_moment")


# -----------------------------------------------------------------------------------------------------------
# saving


def save_checkpoint(state: TrainState, run_folder: Path, *, config: PretrainConfig, fingerprint: str) -> Path:
    """Saves the state of all ranks as `step_<N>` and returns the folder. All ranks call it."""
    goal = run_folder / f"step_{state.step}"
    unfinished = run_folder / f"step_{state.step}.tmp"
    metrics = state.metrics.state()
    with shared_outcome():
        if is_main():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
    barrier()  # the folder is there for everybody
    with shared_outcome():
        files = [_save_carry(unfinished, state)]
        if is_main():
            files.append(_save_tensors(unfinished / WEIGHTS_FILE, state.model.network.state_dict()))
            files.append(_save_tensors(unfinished / _OPTIMIZER_FILE, _moments(state)))
            content = {
                "step": state.step,
                "metrics": metrics,
                "dataset_fingerprint": fingerprint,
                "versions": {"torch": torch.__version__, "numpy": np.__version__},
            }
            files.append(_save_text(unfinished / _STATE_FILE, json.dumps(content, indent=1)))
            files.append(_save_text(unfinished / CONFIG_FILE, config_to_yaml(config)))
        entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
    all_entries = gather_objects(entries)
    with shared_outcome():
        if is_main():
            manifest = {name: entry for part in all_entries for name, entry in sorted(part.items())}
            _save_text(unfinished / MANIFEST_FILE, json.dumps({"files": manifest}, indent=1))
            shutil.rmtree(goal, ignore_errors=True)
            unfinished.rename(goal)
            _sync(run_folder)
    return goal


def _save_carry(folder: Path, state: TrainState) -> Path:
    tensors = {"z_H": state.carry.state.z_H, "z_L": state.carry.state.z_L}
    tensors |= {"steps": state.carry.steps, "halted": state.carry.halted}
    tensors |= {f"data.{name}": tensor for name, tensor in state.carry.data._asdict().items()}
    return _save_tensors(folder / f"carry_{state.slots.start}_{state.slots.stop}.safetensors", tensors)


def _moments(state: TrainState) -> dict[str, torch.Tensor]:
    moments = {}
    for name, parameter in state.model.network.named_parameters():
        moments |= {f"{moment}.{name}": state.dense_optimizer.state[parameter][moment] for moment in _MOMENTS}
    return moments


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)
    return path


def _save_text(path: Path, text: str) -> Path:
    path.write_text(text + "\n")
    _sync(path)
    return path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------
# loading


def resume(state: TrainState, run_folder: Path, *, config: PretrainConfig, fingerprint: str) -> bool:
    """Fills the state from the newest checkpoint, where there is one, and cuts the log back to its step.

    Returns whether the line of that step is logged already; if not, the metric sums that it needs are in the
    state. Then the folder belongs to this start: its config is written. All ranks call it.
    """
    newest = None
    with shared_outcome():
        if is_main():
            newest = newest_checkpoint(run_folder)
            if newest is not None:
                verify_checkpoint(newest)
    newest = broadcast_object(newest)
    if newest is not None:
        with shared_outcome():
            load_checkpoint(newest, state, fingerprint=fingerprint)
        say(f"going on from {newest}")
    is_logged = False
    with shared_outcome():
        if is_main():
            is_logged = cut_metrics_back(run_folder, step=state.step)
            write_text(run_folder / CONFIG_FILE, config_to_yaml(config))
    return broadcast_object(is_logged) or state.step == 0


def load_checkpoint(folder: Path, state: TrainState, *, fingerprint: str) -> None:
    """Fills the state from a checkpoint saved by any number of ranks.

    Every rank calls it, none waits for another.
    """
    content = json.loads((folder / _STATE_FILE).read_text())
    if content["dataset_fingerprint"] != fingerprint:
        raise ValueError(
            f"{folder} was trained on another dataset than the one at data_path: choose another run_name"
        )
    state.step = content["step"]
    state.metrics.load_state(content["metrics"], holds_sums=is_main())

    state.model.network.load_state_dict(load_file(folder / WEIGHTS_FILE))
    moments = load_file(folder / _OPTIMIZER_FILE)
    for name, parameter in state.model.network.named_parameters():
        for moment in _MOMENTS:
            state.dense_optimizer.state[parameter][moment].copy_(moments[f"{moment}.{name}"])
    state.dense_optimizer.param_groups[0]["step"] = state.step

    tensors = _load_slots(folder, state.slots)
    device = state.carry.steps.device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    state.carry = Carry(
        state=State(tensors["z_H"], tensors["z_L"]),
        steps=tensors["steps"],
        halted=tensors["halted"],
        data=Batch(*(tensors[f"data.{name}"] for name in Batch._fields)),
    )


def _load_slots(folder: Path, slots: slice) -> dict[str, torch.Tensor]:
    """The carry of the global slots, put together from the files that hold them."""
    pieces: dict[str, list[torch.Tensor]] = {}
    ranges = []
    for path in folder.glob("carry_*.safetensors"):
        first, end = (int(number) for number in re.findall(r"\d+", path.stem))
        ranges.append((first, end, path))
    for first, end, path in sorted(ranges):
        begin, stop = max(first, slots.start), min(end, slots.stop)
        if begin >= stop:
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                pieces.setdefault(name, []).append(file.get_slice(name)[begin - first : stop - first])
    return {name: torch.cat(parts) for name, parts in pieces.items()}
