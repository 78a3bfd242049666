"""The contenders of the training step: ours, as a run steps, and the public code's.

Both begin with the same weights and see the same random batches. `calls` says which of the calls inside a
step make which part of it, so that parts are timed in the real step and not in a copy of it.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import training.step
from benchmarks.harness import now
from benchmarks.train_step.published import PublishedTrainer
from benchmarks.trainee import TOTAL_STEPS, Trainee, random_batch
from dataset.loader import Batch
from training.metrics import FiniteCheck

PARTS = ("data", "forward", "backward", "sync", "optimizers", "logging")
OURS = {
    "eager": "ours",
    "compiled": "ours_compiled",
    "deferred_eager": "ours_deferred",
    "deferred_compiled": "ours_deferred_compiled",
}
FLASH_ATTENTION = "published_flash_attention"
CONTENDERS = ("published", FLASH_ATTENTION, "published_compiled", *OURS.values())
_BATCHES = 4

# By part: the attributes (owner, name) that a step calls for it.
Calls = dict[str, list[tuple[Any, str]]]


class Ours:
    """A run's own loop around its step, without what happens only now and then."""

    def __init__(self, name: str, config: SimpleNamespace, metadata: SimpleNamespace, device: torch.device):
        arch = vars(config.arch) | {"q_target": "deferred" if "deferred" in name else "exact"}
        config = SimpleNamespace(**vars(config) | {"arch": SimpleNamespace(**arch)})
        self._device, self._batches = device, _batches(config, metadata, device)
        self._trainee = Trainee(config, device, metadata=metadata, compiles=name.endswith("compiled"))
        self.state = self._trainee.state
        self.state.carry.halted.fill_(False)
        self.state.carry.steps.copy_(_spread_steps(config))
        self._finite = FiniteCheck(device)

    def step(self) -> training.step.StepResult:
        result = self._trainee.step(self.take_batch())
        self.log(result)
        return result

    def take_batch(self) -> Batch:
        return next(self._batches).to(self._device)

    def log(self, result: training.step.StepResult) -> None:
        self._finite.add(self.state.step, set_name="all", loss=result.loss, grad_norm=result.grad_norm)

    def calls(self) -> Calls:
        gradients, sparse = self.state.gradients, self.state.sparse_optimizer
        return {
            "data": [(self, "take_batch")],
            "forward": [(gradients, "model"), (self.state.model.network, "losses")],
            "backward": [(torch.Tensor, "backward")],
            "sync": [(gradients, "finish"), (sparse, "all_gather_gradients")],
            "optimizers": [
                (gradients, "zero"),
                (torch.linalg, "vector_norm"),
                *((optimizer, "step") for optimizer in self.state.dense_optimizers),
                (sparse, "step"),
            ],
            "logging": [(self.state.metrics, "add"), (self, "log")],
        }


class Published:
    """The public code's step."""

    def __init__(self, name: str, config: SimpleNamespace, metadata: SimpleNamespace, device: torch.device):
        self._device, self._batches = device, _batches(config, metadata, device)
        ours = Trainee(config, torch.device("cpu"), metadata=metadata)
        self.trainer = PublishedTrainer(
            config,
            metadata,
            ours.state.model.network.state_dict(),
            device=device,
            compile_whole=name.endswith("compiled"),
            flash_attention=name == FLASH_ATTENTION,
        )
        batch = next(_batches(config, metadata, device)).to(device)._asdict()
        carry = self.trainer.initial_carry({name: batch[name] for name in batch if name != "rows"})
        carry.halted.fill_(False)
        carry.steps.copy_(_spread_steps(config))
        self.trainer.carry = carry

    def step(self) -> None:
        self.trainer.step(self.take_batch(), total_steps=TOTAL_STEPS)

    def take_batch(self) -> dict[str, torch.Tensor]:
        batch = next(self._batches)._asdict()
        return {name: column.to(self._device) for name, column in batch.items() if name != "rows"}

    def calls(self) -> Calls:
        optimizers = [optimizer for optimizer, _ in self.trainer.optimizers]
        return {
            "data": [(self, "take_batch")],
            "forward": [(self.trainer, "model")],
            "backward": [(torch.Tensor, "backward")],
            "sync": [],  # nothing to do in one process
            "optimizers": [(each, name) for each in optimizers for name in ("step", "zero_grad")],
            "logging": [(self.trainer, "read")],
        }


def contenders_of(arch_name: str, *, no_ACT_continue: bool) -> tuple[str, ...]:
    """Returns the contenders that an architecture has."""
    return tuple(
        name
        for name in CONTENDERS
        if not ("deferred" in name and no_ACT_continue)
        and not (name == FLASH_ATTENTION and arch_name != "hrm")
    )


def build_contender(
    name: str, config: SimpleNamespace, metadata: SimpleNamespace, device: torch.device
) -> Ours | Published:
    return (Ours if name in OURS.values() else Published)(name, config, metadata, device)


def _spread_steps(config: SimpleNamespace) -> torch.Tensor:
    """Puts slots at every step of their puzzles, as in a run: in each step as many stop."""
    slots = torch.arange(config.global_batch_size, dtype=torch.int32)
    return slots * config.arch.halt_max_steps // config.global_batch_size


def _batches(config: SimpleNamespace, metadata: SimpleNamespace, device: torch.device) -> Iterator[Batch]:
    """Repeats a few batches on the CPU, the same for every contender; in pinned memory for a CUDA device."""
    cpu = torch.device("cpu")
    batches = (
        random_batch(config.global_batch_size, seed=seed, device=cpu, metadata=metadata)
        for seed in range(_BATCHES)
    )
    if device.type == "cuda":
        batches = (Batch(*(column.pin_memory() for column in batch)) for batch in batches)
    return itertools.cycle(batches)


@contextlib.contextmanager
def timed_calls(calls: Calls, device: torch.device) -> Iterator[dict[str, float]]:
    """Within, adds up the seconds of the calls of each part. No call may contain another."""
    seconds = dict.fromkeys(calls, 0.0)

    def timed(function: Callable, part: str) -> Callable:
        def call(*arguments, **options):
            begin = now(device)
            result = function(*arguments, **options)
            seconds[part] += now(device) - begin
            return result

        return call

    with contextlib.ExitStack() as stack:
        for part, attributes in calls.items():
            for owner, name in attributes:
                stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), part)))
        yield seconds
