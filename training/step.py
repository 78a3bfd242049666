"""One training step: forward and backward, the sum over ranks, the update, the average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config.schema import PretrainConfig
from dataset.loader import Batch
from models.carry import Carry, Counts, Reasoning, Sums
from models.random import Draws
from parallel.strategy import Synced
from training.clock import StepClock
from training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step, on the device. sums: of this rank's metrics. synced: what all ranks know."""

    sums: Sums
    synced: Synced


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: PretrainConfig,
    rates: dict[str, float],
    clock: StepClock,
    reasoning_at: Callable[[int], Reasoning] | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Advances the state by one step on this rank's share of the batch. All ranks call it.

    Refills the slots, fetches the rows of their puzzles and counts over ranks what the losses are divided by;
    forward and backward; sums the gradients over ranks; clips them; updates weights and rows; synchronises
    the weights of all ranks, now or after a later step; updates the average.

    rates: lr and puzzle_emb_lr of this step. reasoning_at: of each step, as a curriculum has it; None: as the
    architecture has it. is_asked_to_stop: asked late in the step, for all ranks to know.
    """
    state.step += 1
    began = begin(state, batch, config, reasoning_at or (lambda _: state.model.reasoning))
    with clock.measure("sync"):
        state.table.prefetch(torch.cat([boards.data.puzzle_identifiers for boards in began.boards]))
        counts = state.strategy.reduce_counts(began.counts)
    state.strategy.begin(is_asked_to_stop=is_asked_to_stop)
    sums = forward_and_backward(state, began, counts)
    with clock.measure("sync"):
        state.strategy.reduce_gradients(step=state.step)
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    with clock.measure("sync"):
        synced = state.strategy.synchronize(grad_norm, step=state.step)
    state.average.update(synced.steps)
    sums["grad_norm"] = grad_norm / state.ranks.size  # this rank's share of what all have
    state.metrics.add(sums)
    return StepResult(sums, synced)


class Began(NamedTuple):
    """What a step works on. boards: of each micro-batch. counts, sums: of all of them, on this rank."""

    boards: list[Carry]
    reasoning: Reasoning
    draws: Draws
    counts: Sums
    sums: Sums


def begin(
    state: TrainState, batch: Batch, config: PretrainConfig, reasoning_at: Callable[[int], Reasoning]
) -> Began:
    """Begins the step, in `gradient_accumulation_steps` micro-batches, or without slots in an empty one."""
    reasoning, network = reasoning_at(state.step), state.model.network
    draws, last = _draw(state, config, reasoning, step=state.step), None
    if network.advances and state.step > 1:
        before = reasoning_at(state.step - 1)
        last = before, _draw(state, config, before, step=state.step - 1)
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    boards, counts, sums = [], {}, {}
    for first in range(0, num_slots, size) or [0]:
        slots = slice(first, first + size)
        own_batch, own_last = batch.select(slots), last and (last[0], last[1][slots])
        own, own_sums = state.model.begin(
            state.carry.select(slots), own_batch, reasoning, draws[slots], own_last
        )
        boards.append(own)
        counts, sums = _add(counts, network.counts(own)), _add(sums, own_sums)
    return Began(boards, reasoning, draws, counts, sums)


def forward_and_backward(state: TrainState, began: Began, counts: Counts) -> Sums:
    """Adds up the gradients of this rank's slots, micro-batch by micro-batch; returns the sums.

    Gradients that are sent travel during the last one.
    """
    strategy, network, reasoning = state.strategy, state.model.network, began.reasoning
    counts = {"slots": strategy.batch_size, **counts}
    parts, sums, end = [], began.sums, 0
    for before in began.boards:
        draws, end = began.draws[end : end + len(before.steps)], end + len(before.steps)
        with strategy.micro_batch(is_last=before is began.boards[-1]):
            output = strategy.model(before, reasoning, draws)
            loss, own_sums = network.losses(before, output, counts=counts, reasoning=reasoning, draws=draws)
            state.weights.scalars.add(loss=loss.detach())
            (loss / counts["slots"]).backward()
        parts.append(output.carry)
        sums = _add(sums, own_sums)
    state.carry = state.model.end(state.carry, Carry.join(parts), began.draws)
    return sums


def _add(sums: Sums, more: Sums) -> Sums:
    return sums | {name: sums.get(name, 0) + value for name, value in more.items()}


def _draw(state: TrainState, config: PretrainConfig, reasoning: Reasoning, *, step: int) -> Draws:
    """Draws what is random in a step for the global batch; returns this rank's share."""
    device, slots = state.carry.steps.device, state.slots
    arrays = state.model.network.draw(
        seed=config.seed, step=step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    own = {name: _to_device(each[slots.start : slots.stop], device) for name, each in arrays.items()}
    return Draws.of_training(config.seed, step=step, slots=slots, device=device, **own)


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copies without waiting for the device."""
    share = torch.from_numpy(values)
    return (share.pin_memory() if device.type == "cuda" else share).to(device, non_blocking=True)
