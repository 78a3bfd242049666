"""Creates tiny configs, models and batches for tests. Every value can be changed."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config.architecture import Architecture, architectures
from config.files import load_defaults
from config.schema import PretrainConfig, validate_config
from dataset.files import load_metadata
from dataset.loader import Batch
from dataset.metadata import IGNORE_LABEL_ID, Metadata
from distributed.launch import Program
from distributed.watchdog import Watchdog
from models import HaltingModel, build_model
from models.carry import Carry, StepOutput
from models.network import Network
from models.objective import Sums
from models.random import SlotRng
from tests.ranks import NUM_THREADS

# Command-line overrides for the model of `tiny_arch`. Only q_target and exploration have other values.
OVERRIDES = (
    *("arch.hidden_size=32", "arch.num_heads=2", "arch.H_layers=1", "arch.L_layers=1"),
    *("arch.halt_max_steps=4", "arch.forward_dtype=float32", "global_batch_size=24", "epochs=4"),
    *("eval_interval=2", "lr=1e-3", "puzzle_emb_lr=1e-2", "lr_warmup_steps=3"),
    *("device=cpu", f"cpu_threads={NUM_THREADS}"),
)

# Metrics that differ between equal runs, because they depend on the machine.
TIMINGS = {
    f"train/{name}"
    for name in (
        *("step_seconds", "examples_per_second", "sync_seconds", "sync_share", "data_wait_seconds"),
        *("compute_seconds_slowest_rank", "compute_seconds_fastest_rank", "slowest_rank"),
        *("peak_memory_bytes", "peak_memory_rank"),
    )
}
STALL = "train/checkpoint_stall_seconds"  # in the line after a save

FACTS = Metadata(
    **{"vocab_size": 7, "seq_len": 16, "num_puzzle_identifiers": 20, "sets": ("all",), "pad_id": 0},
    **{"ignore_label_id": None, "blank_identifier_id": 0, "total_groups": 1, "mean_puzzle_examples": 1.0},
    candidates=(*range(9, 14), *range(16, 49, 8)),  # token 1 is a blank, 2 to 6 are digits
)

_TINY = {"hidden_size": 32, "num_heads": 2, "puzzle_emb_ndim": 32, "forward_dtype": "float32"}
_RECURSIVE = {"H_cycles": 2, "L_cycles": 2, "L_layers": 1, "halt_max_steps": 4, "halt_exploration_prob": 0.3}
_OF_TRM = {**_RECURSIVE, "puzzle_emb_len": 3}  # and its variants
_OWN = {
    "hrm": {**_RECURSIVE, "H_layers": 1, "q_target": "deferred"},
    "urm": _RECURSIVE,
    "fprm": {
        **{**_RECURSIVE, "H_cycles": 1, "puzzle_emb_len": 0},
        **{"eval_halt_max_steps": 6, "init_noise": 0.0, "fp_thresh": 0.5},
    },
    "flow": {**_OF_TRM, "eval_halt_max_steps": 6, "own_predictions": 1.0},
    "serrm": {**_RECURSIVE, "head_dim": 12, "num_heads_t": 3, "head_dim_t": 6, "add_tokens": 2},
    "transformer": {"num_layers": 2},
    "ldt": {"num_layers": 2, "loops": 2, "puzzle_emb_ndim": 0, "halt_max_steps": 4, "eval_halt_max_steps": 6},
}


def tiny_arch(name: str = "hrm", **changes: Any) -> Architecture:
    values = load_defaults(f"arch/{name}") | _TINY | _OWN.get(name, _OF_TRM) | changes
    return validate_config(architectures()[name], values)


def tiny_config(**changes: Any) -> PretrainConfig:
    values = load_defaults("pretrain")
    values |= {"lr": 1e-3, "puzzle_emb_lr": 1e-2, "global_batch_size": 24, "epochs": 4, "eval_interval": 2}
    values |= {"lr_warmup_steps": 3, "device": "cpu", "wandb_mode": "disabled"}
    return validate_config(PretrainConfig, {**values, "arch": tiny_arch().model_dump(), **changes})


def tiny_model(name: str = "hrm", *, seed: int = 0, **changes: Any) -> HaltingModel:
    """Returns a model with random weights. The Q head and the puzzle embeddings are random too, not zeros.

    name: Name of the model, such as "trm". changes: Changed settings of the model.
    """
    torch.manual_seed(seed)
    model = build_model(tiny_arch(name, **changes), FACTS)
    draw_small_parts_(model.network)
    return model


@torch.no_grad()
def draw_small_parts_(network: Network) -> None:
    """Sets the Q head and the puzzle embeddings to random values, if the network has them.

    Otherwise, they would be zeros.
    """
    if hasattr(network, "q_head"):
        network.q_head.weight.normal_()
        network.q_head.bias.normal_()
    if network.puzzle_emb is not None:
        network.puzzle_emb.weights.normal_()


def draws_of(batch_size: int, **arrays: torch.Tensor) -> SlotRng:
    """Returns the random numbers of training step 1. arrays: Random arrays that the network reads."""
    return SlotRng.of_training(0, step=1, slots=slice(0, batch_size), device=torch.device("cpu"), **arrays)


def run_step(
    model: HaltingModel,
    carry: Carry,
    batch: Batch,
    *,
    rng: SlotRng | None = None,
    arrays: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> StepOutput:
    """Refills halted slots from a batch and runs one thinking step, in the model's mode.

    rng: Random numbers. arrays: Random arrays that the network reads. They replace `rng` by the random
    numbers of training step 1. changes: Changed fields of `Reasoning`.
    """
    return run_losses(model, carry, batch, rng=rng, arrays=arrays, **changes)[0]


def run_losses(
    model: HaltingModel, carry: Carry, batch: Batch, *, rng=None, arrays=None, **changes
) -> tuple[StepOutput, Callable[[], tuple[torch.Tensor, Sums]]]:
    """Refills halted slots from a batch and runs one thinking step, in the model's mode.

    Returns (output, function that computes the loss and the metric sums of this output).

    rng: Random numbers. arrays: Random arrays that the network reads. They replace `rng` by the random
    numbers of training step 1. changes: Changed fields of `Reasoning`.
    """
    own = model.reasoning if model.training else model.eval_reasoning("max")
    reasoning = dataclasses.replace(own, **changes)
    rng = draws_of(len(batch.rows), **arrays) if arrays else rng
    before = model.refill(carry, batch, reasoning, rng)
    output = model(before, reasoning, rng)
    divisors = {"slots": len(batch.rows), **model.network.objective.divisors(before)}
    options = {"divisors": divisors, "reasoning": reasoning, "rng": rng}
    return output, functools.partial(model.network.objective.losses, model.network, before, output, **options)


@torch.no_grad()
def redraw_(model: HaltingModel, *, seed: int) -> None:
    """Sets weights and initial states to random numbers of NumPy.

    The random numbers of torch may differ between its versions.
    """
    generator = np.random.default_rng(seed)
    drawn = list(model.parameters())
    drawn += [each for name, each in model.named_buffers() if name.endswith("_init")]
    for tensor in drawn:
        std = tensor.shape[-1] ** -0.5 if tensor.ndim <= 2 else 1.0
        tensor.copy_(torch.from_numpy(generator.normal(scale=std, size=tensor.shape)))


def halting_model(folder: Path, name: str = "trm", *, steps: int, **changes: Any) -> HaltingModel:
    """Returns a model for a dataset. Some puzzles halt after the first thinking step, some later, some never.

    Different puzzles get different answers. steps: Largest number of thinking steps. changes: Changed
    settings of the model.
    """
    metadata = load_metadata(folder, "test")
    model = build_model(tiny_arch(name, halt_max_steps=steps, **changes), metadata)
    redraw_(model, seed=1 if name in ("trm", "serrm") else 0)
    with torch.no_grad():
        if name == "serrm":  # its head is its only certainty
            model.network.lm_head.weight.mul_(30)
        else:
            model.network.q_head.weight.mul_(6)
            model.network.q_head.bias.copy_(torch.tensor([-0.5 if name == "hrm" else -5.0, 0.0]))
    return model


def random_batch(batch_size: int, *, seed: int = 0) -> Batch:
    """Returns a batch of random tokens, labels and puzzle identifiers. A third of the cells is not scored."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    labels = draw(FACTS.vocab_size, batch_size, FACTS.seq_len)
    labels[draw(3, batch_size, FACTS.seq_len) == 0] = IGNORE_LABEL_ID
    return Batch(
        inputs=draw(FACTS.vocab_size, batch_size, FACTS.seq_len),
        labels=labels,
        puzzle_identifiers=draw(FACTS.num_puzzle_identifiers, batch_size),
        rows=torch.arange(batch_size),
    )


def run_of(config: PretrainConfig) -> Program[PretrainConfig]:
    """Returns the `Program` of a run on this rank, with a watchdog that is not started."""
    return Program(config, torch.device("cpu"), Watchdog(init_timeout_seconds=600, step_timeout_seconds=120))


def logged_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl without metrics that depend on the machine, such as times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in {*TIMINGS, STALL}} for row in rows]


def assert_same_row(ours: dict[str, Any], theirs: dict[str, Any], *, tolerance: float) -> None:
    """Raises AssertionError if two rows of a log differ. tolerance: Of numbers, relative and absolute."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        is_word = isinstance(value, str)
        assert ours[name] == (value if is_word else pytest.approx(value, rel=tolerance, abs=tolerance)), name


def embed(network: Network, batch: Batch) -> torch.Tensor:
    """Returns the embedded puzzles of a batch, for a network that reads tokens."""
    return network.embed(batch.inputs, batch.puzzle_identifiers)
