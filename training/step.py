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
from models.halting import Carry, draw_exploration
from models.losses import loss_and_metrics
from models.random import Draws, draw_keys
from optimizers.outer import steps_joined
from optimizers.schedule import learning_rates
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
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Advances the state by one step on this rank's share of the batch.

    All ranks call it. Gradients are those of the mean loss over the *global* batch. Besides them travels one
    message, with the rows of the puzzles. is_asked_to_stop: told to all ranks.

    With `local_steps` they are those of the mean over this rank's share, which moves this rank's weights, and
    only the exchange after the last of these steps makes the weights equal again.
    """
    state.step += 1
    is_local, table = state.outer is not None, state.sparse_optimizer
    joined = steps_joined(state.step, local_steps=config.local_steps, total_steps=total_steps)
    if state.owners is not None:
        with clock.measure("sync"):
            state.owners.fetch(state.carry.refill(batch).puzzle_identifiers)
    sums = _forward_and_backward(state, batch, config, is_asked_to_stop)
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


def _forward_and_backward(
    state: TrainState, batch: Batch, config: PretrainConfig, is_asked_to_stop: Callable[[], bool]
) -> dict[str, Tensor]:
    """Adds up the gradients of this rank's slots, in `gradient_accumulation_steps` parts; returns the sums.

    A part is a slice of the slots, of the carry as of the batch; gradients that are sent travel during the
    last one.
    """
    gradients, drawn = state.gradients, _draw(state, config)
    parts, sums, is_local = [], {}, state.outer is not None
    gradients.zero()
    size = len(batch.rows) // config.gradient_accumulation_steps
    for first in range(0, len(batch.rows), size):
        slots = slice(first, first + size)
        is_last = slots.stop == len(batch.rows)
        with contextlib.nullcontext() if is_last and not is_local else gradients.no_sync():
            output = gradients.model(
                state.carry.select(slots),
                Batch(*(column[slots] for column in batch)),
                **{name: each[slots] for name, each in drawn.items()},
            )
            loss, part_sums = loss_and_metrics(output, config.arch.loss)
            state.flat.tell(loss=loss.detach())
            if is_last and not is_local:
                state.flat.tell(stop=int(is_asked_to_stop()))
                if state.sparse_optimizer is not None and state.owners is None:
                    state.flat.tell(num_distinct=state.sparse_optimizer.num_distinct())
            (loss / (len(batch.rows) if is_local else config.global_batch_size)).backward()
        parts.append(output.carry)
        sums = {name: sums.get(name, 0) + value for name, value in part_sums.items()}
    state.carry = Carry.join(parts)
    return sums


def _draw(state: TrainState, config: PretrainConfig) -> dict[str, Tensor | Draws]:
    """Draws what is random in this step for the global batch; returns this rank's share, for the model."""
    network, place = state.model.network, {"seed": config.seed, "step": state.step}
    drawn = draw_exploration(
        **place,
        batch_size=config.global_batch_size,
        halt_max_steps=config.arch.halt_max_steps,
        probability=config.arch.halt_exploration_prob,
        halts_at_random=network.halts_at_random,
    )
    if network.is_random:
        drawn["keys"] = draw_keys(**place, batch_size=config.global_batch_size)
    device = state.carry.steps.device
    share = {name: _to_device(each[state.slots], device) for name, each in drawn.items()}
    if network.is_noisy:
        share["draws"] = Draws.of_training(**place, slots=state.slots, device=device)
    return share


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copies without waiting for the device."""
    share = torch.from_numpy(values)
    return (share.pin_memory() if device.type == "cuda" else share).to(device, non_blocking=True)
