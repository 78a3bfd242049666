"""One training step: forward and backward, the sum over ranks, the update, the average."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from config.schema import PretrainConfig
from dataset.loader import Batch
from models.carry import Carry, Counts, Reasoning, Sums
from models.random import Draws
from parallel.strategy import Synced
from training.clock import StepClock
from training.state import TrainState


class StepResult(NamedTuple):
    """The result of a step, on the device.

    sums: this rank's metric sums of the step. synced: values of the global batch, equal on all ranks.
    """

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

    rates: lr and puzzle_emb_lr. reasoning_at: the reasoning of a step; None: the architecture's.
    is_asked_to_stop: is called in the last micro-batch, or with local_steps before a synchronisation.
    """
    state.step += 1
    prepared = prepare(state, batch, config, reasoning_at or (lambda _: state.model.reasoning))
    with clock.measure("sync"):
        state.table.prefetch(torch.cat([boards.data.puzzle_identifiers for boards in prepared.boards]))
        counts = state.strategy.reduce_counts(prepared.counts)
    state.strategy.start_step(is_asked_to_stop=is_asked_to_stop)
    sums = forward_and_backward(state, prepared, counts)
    grad_norm, synced = update(state, config, rates, clock)
    # Equal on all ranks: divided so that the later sum over ranks restores it.
    sums["grad_norm"] = grad_norm / state.ranks.size
    state.metrics.add(sums)
    return StepResult(sums, synced)


class Prepared(NamedTuple):
    """The input of a step on this rank.

    slots, boards: of each micro-batch. draws: of all slots. counts, sums: over all micro-batches.
    """

    slots: list[slice]
    boards: list[Carry]
    reasoning: Reasoning
    draws: Draws
    counts: Sums
    sums: Sums


def prepare(
    state: TrainState, batch: Batch, config: PretrainConfig, reasoning_at: Callable[[int], Reasoning]
) -> Prepared:
    """Refills halted slots from the batch, and splits the slots into `gradient_accumulation_steps` parts.

    A network that advances its boards first does so for the step before, with that step's draws.
    """
    reasoning, network = reasoning_at(state.step), state.model.network
    draws = _draw(state, config, reasoning, step=state.step)
    last = None
    if network.advances and state.step > 1:
        last_reasoning = reasoning_at(state.step - 1)
        last = (last_reasoning, _draw(state, config, last_reasoning, step=state.step - 1))
    size = max(1, len(state.slots) // config.gradient_accumulation_steps)
    # At least one: a rank without slots takes part in the messages with an empty one.
    micro_batches = [slice(first, first + size) for first in range(0, max(1, len(state.slots)), size)]
    all_boards, counts, sums = [], {}, {}
    for slots in micro_batches:
        last_of_slots = None if last is None else (last[0], last[1][slots])
        boards, new_sums = state.model.begin(
            state.carry.select(slots), batch.select(slots), reasoning, draws[slots], last_of_slots
        )
        all_boards.append(boards)
        counts = _add(counts, network.counts(boards))
        sums = _add(sums, new_sums)
    return Prepared(micro_batches, all_boards, reasoning, draws, counts, sums)


def forward_and_backward(state: TrainState, prepared: Prepared, counts: Counts) -> Sums:
    """Adds up the gradients of this rank's slots, micro-batch by micro-batch; returns the metric sums.

    The gradient all-reduce overlaps the last micro-batch's backward pass. counts: over the slots that the
    loss is divided by, of all ranks, or with local_steps of this one.
    """
    strategy, network, reasoning = state.strategy, state.model.network, prepared.reasoning
    counts = {"slots": strategy.batch_size, **counts}
    after, sums = [], prepared.sums
    for slots, boards in zip(prepared.slots, prepared.boards, strict=True):
        draws = prepared.draws[slots]
        with strategy.micro_batch(is_last=boards is prepared.boards[-1]):
            output = strategy.model(boards, reasoning, draws)
            loss, new_sums = network.losses(boards, output, counts=counts, reasoning=reasoning, draws=draws)
            state.weights.scalars.add(loss=loss.detach())  # reported by way of `Synced.loss`
            (loss / counts["slots"]).backward()
        after.append(output.carry)
        sums = _add(sums, new_sums)
    state.carry = state.model.end(state.carry, Carry.join(after), prepared.draws)
    return sums


def update(
    state: TrainState, config: PretrainConfig, rates: dict[str, float], clock: StepClock
) -> tuple[Tensor, Synced]:
    """Updates weights, puzzle rows and averages from the gradients; returns the gradient norm too."""
    with clock.measure("sync"):
        state.strategy.reduce_gradients(step=state.step)
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    with clock.measure("sync"):  # of sharded weights it is the all-gather too
        synced = state.strategy.synchronize(grad_norm, step=state.step)
    state.average.update(synced.steps)
    return grad_norm, synced


def _add(sums: Sums, more: Sums) -> Sums:
    return sums | {name: sums.get(name, 0) + value for name, value in more.items()}


def _draw(state: TrainState, config: PretrainConfig, reasoning: Reasoning, *, step: int) -> Draws:
    """Draws what is random in a step for the global batch; returns this rank's share."""
    device, slots = state.carry.steps.device, state.slots
    is_pinned = device.type == "cuda"  # then the host does not wait for the copy
    arrays = state.model.network.draw(
        seed=config.seed, step=step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    own = {}
    for name, array in arrays.items():
        share = torch.from_numpy(array[slots.start : slots.stop])
        own[name] = (share.pin_memory() if is_pinned else share).to(device, non_blocking=True)
    return Draws.of_training(config.seed, step=step, slots=slots, device=device, **own)
