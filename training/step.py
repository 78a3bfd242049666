"""One training step: forward, backward, gradient all-reduce, learning rates, optimizers, EMA."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dataset.loader import Batch
from models.carry import Carry, Counts, Reasoning, Sums
from models.random import Draws
from optimizers.outer import steps_joined
from optimizers.schedule import learning_rates
from parallel.collectives import all_reduce_sum_
from parallel.process_group import world_size
from training.clock import StepClock
from training.state import TrainState

if TYPE_CHECKING:
    from config.schema import PretrainConfig


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step, still on the device.

    sums: this rank's metric sums. loss: the mean over the global batch; grad_norm: of the dense gradients
    before clipping; stop_requests: how many ranks were asked to stop; these float32 scalars, the same on all
    ranks. With `local_steps` loss and norm are means over ranks and the steps since the last exchange, and
    all three None after a step without one.
    """

    sums: dict[str, Tensor]
    loss: Tensor | None
    grad_norm: Tensor | None
    stop_requests: Tensor | None


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: PretrainConfig,
    total_steps: int,
    clock: StepClock,
    reasoning_at: Callable[[int], Reasoning] | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Advances the state by one step on this rank's share of the batch.

    All ranks call it. Gradients are those of the mean loss over the *global* batch. Besides them travels one
    message, with the rows of the puzzles. reasoning_at: of each step, as a curriculum has it; None: as the
    architecture has it. is_asked_to_stop: told to all ranks.

    With `local_steps` they are those of the mean over this rank's share, which moves this rank's weights, and
    only the exchange after the last of these steps makes the weights equal again.
    """
    state.step += 1
    is_local, table = state.outer is not None, state.sparse_optimizer
    joined = steps_joined(state.step, local_steps=config.local_steps, total_steps=total_steps)
    reasoning_at = reasoning_at or (lambda _: state.model.reasoning)
    began, draws, moved = _begin(state, batch, config, reasoning_at)
    with clock.measure("sync"):
        if state.owners is not None:
            state.owners.fetch(torch.cat([boards.data.puzzle_identifiers for boards in began]))
        counts = _all_reduce_counts(state, began, config)
    reasoning = reasoning_at(state.step)
    sums = moved | _forward_and_backward(state, began, draws, counts, reasoning, is_asked_to_stop)
    with clock.measure("sync"):
        told = {} if is_local else state.gradients.finish()
        if state.owners is not None:
            table.send_gradients()
        elif table is not None and is_local:
            table.take_own_gradients()
        elif table is not None:
            table.all_gather_gradients(told.get("num_distinct"))

    grad_norm = torch.linalg.vector_norm(state.flat.gradients)
    sums["grad_norm"] = grad_norm / world_size()  # a rank's share of what all ranks share
    if config.grad_clip_norm is not None:
        state.flat.gradients.mul_((config.grad_clip_norm / grad_norm).clamp(max=1.0))

    if state.ema is not None and table is not None:
        # With local steps the averages see the table after an exchange only.
        state.ema.before_rows_change(table.changing_rows, step=joined.start if is_local else state.step)
    rates = learning_rates(config, state.step, total_steps=total_steps)
    moving = [(optimizer, rates["lr"]) for optimizer in state.dense_optimizers]
    if table is not None:
        moving.append((table, rates["puzzle_emb_lr"]))
    for optimizer, rate in moving:
        optimizer.param_groups[0].update(lr=rate, step=state.step - 1)  # progress is one integer, the state's
        optimizer.step()
    if state.division.is_sharded:
        with clock.measure("sync"):
            state.division.all_gather_weights_()

    if is_local:
        state.flat.tell(grad_norm=grad_norm)
        if joined:
            with clock.measure("sync"):
                told = _exchange(state, config, joined, is_asked_to_stop)
            grad_norm = told["grad_norm"].sum() / (world_size() * len(joined))
    if state.ema is not None and joined:
        state.ema.update(step=state.step, num_steps=len(joined))
    state.metrics.add(sums)
    if not joined:
        return StepResult(sums, None, None, None)
    loss = told["loss"].sum() / (config.global_batch_size * len(joined))
    return StepResult(sums, loss, grad_norm, told["stop"].sum())


def _exchange(
    state: TrainState, config: PretrainConfig, joined: range, is_asked_to_stop: Callable[[], bool]
) -> dict[str, Tensor]:
    """Makes the ranks one again after local steps; returns by name what each has told in these, [ranks]."""
    state.flat.tell(stop=int(is_asked_to_stop()))
    told = state.outer.step()
    if state.sparse_optimizer is not None:
        state.sparse_optimizer.all_gather_own_rows()
        if state.ema is not None:
            state.ema.before_rows_change(state.sparse_optimizer.changing_rows, step=joined.start)
        state.sparse_optimizer.join_rows()
    return told


def _begin(
    state: TrainState, batch: Batch, config: PretrainConfig, reasoning_at: Callable[[int], Reasoning]
) -> tuple[list[Carry], Draws, Sums]:
    """Begins the step; returns what each micro-batch is called with, the draws of all slots, and sums."""
    draws, last = _draws(state, config, reasoning_at(state.step), step=state.step), None
    if state.model.network.advances and state.step > 1:
        before = reasoning_at(state.step - 1)
        last = before, _draws(state, config, before, step=state.step - 1)
    began, sums = [], {}
    for slots in _micro_batches(len(batch.rows), config):
        boards, part_sums = state.model.begin(
            state.carry.select(slots),
            Batch(*(column[slots] for column in batch)),
            reasoning_at(state.step),
            draws[slots],
            last and (last[0], last[1][slots]),
        )
        began.append(boards)
        sums = _add(sums, part_sums)
    return began, draws, sums


def _all_reduce_counts(state: TrainState, began: list[Carry], config: PretrainConfig) -> Counts:
    """Sums what the network counts over the slots that the loss is the mean of; all ranks call it."""
    is_local, counts = state.outer is not None, {}
    for boards in began:
        counts = _add(counts, state.model.network.counts(boards))
    if counts and not is_local:
        summed = all_reduce_sum_(torch.stack([each.float() for each in counts.values()]))
        counts = dict(zip(counts, summed.unbind(), strict=True))
    num_slots = sum(len(boards.steps) for boards in began) if is_local else config.global_batch_size
    return {"slots": num_slots, **counts}


def _forward_and_backward(
    state: TrainState,
    began: list[Carry],
    draws: Draws,
    counts: Counts,
    reasoning: Reasoning,
    is_asked_to_stop: Callable[[], bool],
) -> Sums:
    """Adds up the gradients of this rank's slots, micro-batch by micro-batch; returns the sums.

    Gradients that are sent travel during the last one.
    """
    gradients, network, is_local = state.gradients, state.model.network, state.outer is not None
    parts, sums, end = [], {}, 0
    gradients.zero()
    for before in began:
        drawn, end = draws[end : end + len(before.steps)], end + len(before.steps)
        is_last = before is began[-1]
        with contextlib.nullcontext() if is_last and not is_local else gradients.no_sync():
            output = gradients.model(before, reasoning, drawn)
            loss, part_sums = network.losses(before, output, counts=counts, reasoning=reasoning, draws=drawn)
            state.flat.tell(loss=loss.detach())
            if is_last and not is_local:
                state.flat.tell(stop=int(is_asked_to_stop()))
                if state.sparse_optimizer is not None and state.owners is None:
                    state.flat.tell(num_distinct=state.sparse_optimizer.num_distinct())
            (loss / counts["slots"]).backward()
        parts.append(output.carry)
        sums = _add(sums, part_sums)
    state.carry = state.model.end(state.carry, Carry.join(parts), draws)
    return sums


def _micro_batches(num_slots: int, config: PretrainConfig) -> list[slice]:
    """Cuts this rank's slots into `gradient_accumulation_steps` parts; of no slots it makes an empty one."""
    size = max(num_slots // config.gradient_accumulation_steps, 1)
    return [slice(first, first + size) for first in range(0, max(num_slots, 1), size)]


def _add(sums: Sums, more: Sums) -> Sums:
    return sums | {name: sums.get(name, 0) + value for name, value in more.items()}


def _draws(state: TrainState, config: PretrainConfig, reasoning: Reasoning, *, step: int) -> Draws:
    """Draws what is random in a step for the global batch; returns this rank's share."""
    device = state.carry.steps.device
    arrays = state.model.network.draw(
        seed=config.seed, step=step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    own = {name: _to_device(array[state.slots], device) for name, array in arrays.items()}
    return Draws.of_training(config.seed, step=step, slots=state.slots, device=device, **own)


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copies without waiting for the device."""
    share = torch.from_numpy(values)
    return (share.pin_memory() if device.type == "cuda" else share).to(device, non_blocking=True)
