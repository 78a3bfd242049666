"""One training step: forward, backward, gradient all-reduce, learning rates, optimizers, EMA."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dataset.format import Batch
from models.halting import Carry, draw_exploration
from models.losses import loss_and_metrics
from models.noise import Draws
from models.randomness import draw_keys
from optimizers.learning_rate import learning_rates
from parallel.process_group import world_size
from training.clock import StepClock
from training.state import TrainState

if TYPE_CHECKING:
    from config.schema import PretrainConfig


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step, still on the device.

    sums: this rank's metric sums. loss: the mean over the global batch; grad_norm: of the dense gradients
    before clipping; both float32 scalars, the same on all ranks.
    """

    sums: dict[str, Tensor]
    loss: Tensor
    grad_norm: Tensor


def train_step(
    state: TrainState, batch: Batch, *, config: PretrainConfig, total_steps: int, clock: StepClock
) -> StepResult:
    """Advances the state by one step on this rank's share of the batch.

    All ranks call it. Gradients are those of the mean loss over the *global* batch.
    """
    state.step += 1
    if state.owners is not None:
        with clock.measure("sync"):
            state.owners.fetch(state.carry.refill(batch).puzzle_identifiers)
    sums = _forward_and_backward(state, batch, config)
    with clock.measure("sync"):
        state.gradients.finish()
        if state.owners is not None:
            state.sparse_optimizer.send_gradients()
        elif state.sparse_optimizer is not None:
            state.sparse_optimizer.all_gather_gradients()

    loss = state.flat.extra / config.global_batch_size
    grad_norm = torch.linalg.vector_norm(state.flat.gradients)
    sums["grad_norm"] = grad_norm / world_size()  # a rank's share of what all ranks share
    if config.grad_clip_norm is not None:
        state.flat.gradients.mul_((config.grad_clip_norm / grad_norm).clamp(max=1.0))

    if state.ema is not None and state.sparse_optimizer is not None:
        state.ema.before_rows_change(state.sparse_optimizer.changing_rows, step=state.step)
    rates = learning_rates(config, state.step, total_steps=total_steps)
    moving = [(optimizer, rates["lr"]) for optimizer in state.dense_optimizers]
    if state.sparse_optimizer is not None:
        moving.append((state.sparse_optimizer, rates["puzzle_emb_lr"]))
    for optimizer, rate in moving:
        optimizer.param_groups[0].update(lr=rate, step=state.step - 1)  # progress is one integer, the state's
        optimizer.step()
    if state.division.is_sharded:
        with clock.measure("sync"):
            state.division.all_gather_weights_()
    if state.ema is not None:
        state.ema.update(step=state.step)
    state.metrics.add(sums)
    return StepResult(sums, loss, grad_norm)


def _forward_and_backward(state: TrainState, batch: Batch, config: PretrainConfig) -> dict[str, Tensor]:
    """Adds up the gradients of this rank's slots, in `gradient_accumulation_steps` parts; returns the sums.

    A part is a slice of the slots, of the carry as of the batch; gradients travel during the last one.
    """
    gradients, drawn = state.gradients, _draw(state, config)
    parts, sums = [], {}
    gradients.zero()
    size = len(batch.rows) // config.gradient_accumulation_steps
    for first in range(0, len(batch.rows), size):
        slots = slice(first, first + size)
        is_last = slots.stop == len(batch.rows)
        with contextlib.nullcontext() if is_last else gradients.no_sync():
            output = gradients.model(
                state.carry.select(slots),
                Batch(*(column[slots] for column in batch)),
                **{name: each[slots] for name, each in drawn.items()},
            )
            loss, part_sums = loss_and_metrics(output, config.arch.loss)
            state.flat.extra += loss.detach()
            (loss / config.global_batch_size).backward()
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
