"""One training step: forward, backward, gradient all-reduce, learning rates, optimizers."""

import torch
from torch import Tensor

from config.schema import PretrainConfig
from dataset.format import Batch
from models.halting import draw_min_steps
from models.losses import loss_and_metrics
from optimizers.schedule import scheduled_lr
from training.state import TrainState


def train_step(
    state: TrainState, batch: Batch, *, config: PretrainConfig, total_steps: int
) -> dict[str, Tensor]:
    """Advances the state by one step on this rank's share of the batch; returns the metric sums of its slots.

    All ranks call it. Gradients are those of the mean loss over the *global* batch.
    """
    state.step += 1
    min_steps = _exploration(state, config)

    output = state.model(state.carry, batch, min_steps=min_steps)
    state.carry = output.carry
    loss, sums = loss_and_metrics(output, loss_type=config.arch.loss.loss_type)

    state.gradients.zero()
    (loss / config.global_batch_size).backward()
    state.gradients.all_reduce()

    rates = learning_rates(config, state.step, total_steps=total_steps)
    for optimizer, rate in (
        (state.dense_optimizer, rates["lr"]),
        (state.sparse_optimizer, rates["puzzle_emb_lr"]),
    ):
        if optimizer is not None:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    return sums


def learning_rates(config: PretrainConfig, step: int, *, total_steps: int) -> dict[str, float]:
    """The dense and the puzzle rate of update `step`."""
    shape = {
        "warmup_steps": config.lr_warmup_steps,
        "total_steps": total_steps,
        "min_ratio": config.lr_min_ratio,
    }
    return {name: scheduled_lr(step, base=getattr(config, name), **shape) for name in ("lr", "puzzle_emb_lr")}


def _exploration(state: TrainState, config: PretrainConfig) -> Tensor | None:
    """This rank's share of the exploration, which is drawn for the global batch."""
    if not config.arch.halt_exploration_prob or config.arch.halt_max_steps < 2:
        return None
    min_steps = draw_min_steps(
        seed=config.seed,
        step=state.step,
        batch_size=config.global_batch_size,
        halt_max_steps=config.arch.halt_max_steps,
        probability=config.arch.halt_exploration_prob,
    )
    share = torch.from_numpy(min_steps[state.slots])
    return share.to(state.carry.steps.device, non_blocking=True)
