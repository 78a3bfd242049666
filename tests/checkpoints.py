"""Creates training states of a tiny model, runs training steps, and saves and reads checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from checkpointing.files import MANIFEST_FILE, manifest_text
from checkpointing.tensors import find_files, load_joined
from config.schema import PretrainConfig
from dataset.description import with_candidates
from dataset.files import load_metadata, open_dataset
from dataset.loader import Batch
from dataset.metadata import Metadata
from dataset.mixture import fingerprint_of
from distributed.world import rank
from models.carry import Carry
from optimizers.learning_rate import learning_rates
from runtime.reading import sha256_of
from tests.tiny import FACTS, tiny_arch, tiny_config
from training.checkpoints import CheckpointManager
from training.clock import StepClock
from training.state import TrainState, build_first_state
from training.step import train_step
from training.strategy import StepResult

FINGERPRINT = "the fingerprint"


def run_config(run: Path, **changes) -> PretrainConfig:
    return tiny_config(checkpoint_path=str(run), **changes)


def open_checkpoints(run: Path, *, fingerprint: str = FINGERPRINT, **changes) -> CheckpointManager:
    run.mkdir(exist_ok=True)
    return CheckpointManager(run, config=run_config(run, **changes), fingerprint=fingerprint)


def blank_state(**changes) -> TrainState:
    return build_first_state(tiny_config(**changes), FACTS, device=torch.device("cpu"))


def begin_training(config: PretrainConfig, metadata: Metadata = FACTS, **options) -> TrainState:
    """Returns the state of training step 0, with the model in training mode and equal weights on all ranks.

    All ranks call it.
    """
    state = build_first_state(config, metadata, device=torch.device("cpu"), **options)
    state.broadcast_model_()
    state.model.train()
    return state


def do_step(
    state: TrainState, config: PretrainConfig, batch: Batch, *, total_steps: int = 20, **options
) -> StepResult:
    """Runs a training step on this rank's slots of a global batch."""
    share = batch.select(slice(state.slots.start, state.slots.stop))
    rates = learning_rates(config, state.step + 1, total_steps=total_steps)
    clock = StepClock(torch.device("cpu"))
    return train_step(state, share, config=config, rates=rates, clock=clock, **options)


def random_state(step: int, **changes) -> TrainState:
    """Returns a state with random numbers. Only the carry and the metrics depend on the rank.

    Shards other than the carry, such as those of a sharded optimizer, are not random.

    step: Training step of the state, and seed of the numbers. changes: Changed keys of the config.
    """
    state = blank_state(**changes)
    state.step = step
    generator = torch.Generator().manual_seed(step)
    for tensor in replicated_tensors(state).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    carry, generator = {}, torch.Generator().manual_seed(-step)  # whatever share of the rest is this rank's
    for name, tensor in state.carry.tensors().items():
        drawn = torch.randint(0, 2**31, (24, *tensor.shape[1:]), generator=generator)
        carry[name] = drawn.to(tensor.dtype)[state.slots.start : state.slots.stop]
    state.carry = Carry.from_tensors(carry)
    state.metrics.add({"count": torch.tensor(rank() + 0.5)})
    return state


def replicated_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Returns {name: tensor} of the tensors of a state that this rank holds in full, not as shards.

    The weights are those that the forward pass reads.
    """
    files = state.sections() | {"weights": state.model.network.state_dict() | state.table.tensors()}
    return {
        f"{name} of {file}": each
        for file, tensors in files.items()
        for name, each in tensors.items()
        if isinstance(each, torch.Tensor)
    }


def state_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    tensors = {**replicated_tensors(state), **state.carry.tensors()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns {name: full tensor} of a checkpoint without its outer optimizer. Shards are joined."""
    parts = ("weights", "ema_weights", "optimizer", "ema_state", "carry")
    found = {part: load_joined(checkpoint, part) for part in parts if find_files(checkpoint, part)}
    return {f"{part}.{name}": value for part, each in found.items() for name, value in each.items()}


def save(run: Path, *steps: int, metrics: dict[int, float] | None = None, **changes) -> CheckpointManager:
    """Saves a checkpoint with a random state at each of `steps`. Returns the closed `CheckpointManager`.

    metrics: {step: value} of the metric that the config key `keep_best` names. The values are also logged.
    """
    with open_checkpoints(run, **changes) as checkpoints:
        for step in steps:
            checkpoints.save(random_state(step))
            if metrics and step in metrics:
                line = {"step": step, changes["keep_best"]: metrics[step]}
                checkpoints.best.record(step, line)
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
    assert not checkpoints.last_save_failed
    return checkpoints


def resume(run: Path, *, fingerprint: str = FINGERPRINT, **changes) -> TrainState:
    state = blank_state(**changes)
    open_checkpoints(run, fingerprint=fingerprint, **changes).resume(state)
    return state


def checkpoint_names(run: Path) -> set[str]:
    return {path.name for path in run.glob("step_*")}


def seal(checkpoint: Path) -> None:
    """Writes a manifest with the digests that the files of the checkpoint have now."""
    paths = [path for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST_FILE]
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    (checkpoint / MANIFEST_FILE).write_text(manifest_text(files))


def flip_bit(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def state_on(data: Path, config: PretrainConfig) -> TrainState:
    """Returns the state of training step 0 of a run on a dataset."""
    metadata = load_metadata(data, "test")
    if config.arch.finds_candidates:
        metadata = with_candidates(open_dataset(data, read_everything=False)).metadata
    return build_first_state(config, metadata, device=torch.device("cpu"))


def save_on(
    data: Path, run: Path, *, train: Callable = lambda state: None, facts: dict | None = None, **arch
) -> Path:
    """Writes a run folder with one checkpoint, of training step 1, for the dataset `data`. Returns `run`.

    train: Function that may change the state before it is saved. facts: Description of the dataset to store
    in the checkpoint. arch: Settings of the tiny model.
    """
    config = run_config(run, data_path=[str(data)], arch=tiny_arch(**arch).model_dump())
    state = state_on(data, config)
    train(state)
    state.step = 1
    run.mkdir(parents=True)
    described = {"fingerprint": FINGERPRINT, "test_fingerprint": fingerprint_of([data], ("test",))}
    with CheckpointManager(run, config=config, **described, dataset_info=facts) as checkpoints:
        checkpoints.save(state)
    return run
