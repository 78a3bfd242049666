"""One training step: forward and backward, the sum over ranks, the update, the average."""

from collections.abc import Callable

import torch
from torch import Tensor

from config.schema import PretrainConfig
from dataset.loader import Batch
from models.carry import Carry, Counts, Reasoning, Sums
from models.random import Draws
from parallel.strategy import StepResult
from training.clock import StepClock
from training.state import TrainState


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

    rates: lr and puzzle_emb_lr. reasoning_at: maps a step, this one or the last, to its reasoning; None:
    always the architecture's. is_asked_to_stop: whether this rank is; called before the last micro-batch.
    """
    state.step += 1
    reasoning_at = reasoning_at or (lambda _: state.model.reasoning)
    reasoning = reasoning_at(state.step)
    draws = draw(state, config, reasoning, step=state.step)
    sums = advance_boards(state, config, reasoning_at)
    # New tensors: `state.carry` stays. A halted board starts on its row of `batch`. Where a slot has several
    # boards, `draws` picks one.
    boards = state.model.refill(state.carry, batch, reasoning, draws)
    # Fetches rows that other ranks keep, or counts those of a replicated table; sums `counts` over ranks.
    with clock.measure("sync"):
        state.table.prefetch(boards.data.puzzle_identifiers)
        counts = state.strategy.all_reduce_counts(state.model.network.counts(boards))
    new_sums = forward_and_backward(state, boards, config, counts, reasoning, draws, is_asked_to_stop)
    grad_norm, result = update(state, config, rates, clock)
    # Metrics are summed over ranks later. Each rank adds its norm / ranks, so that the sum is the norm, or
    # with local_steps the mean of the ranks' norms.
    state.metrics.add(_add(_add(sums, new_sums), {"grad_norm": grad_norm / state.ranks.size}))
    return result


def update(
    state: TrainState, config: PretrainConfig, rates: dict[str, float], clock: StepClock
) -> tuple[Tensor, StepResult]:
    """Updates weights, puzzle rows and averages from the gradients; returns the gradient norm too.

    With `local_steps`, each rank updates its own weights, and `synchronize` merges them after some steps.
    """
    with clock.measure("sync"):  # sums gradients, also of puzzle rows, over ranks; not with local_steps
        state.strategy.reduce_gradients(step=state.step)
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    with clock.measure("sync"):  # the all-gather of sharded weights, or the merge after local steps
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # Of the weights; rows of the table take their averages along in `table.update_`. Every step since the
    # last merge counts; without a merge there is none, and nothing happens.
    state.average.update(result.merged_steps)
    return grad_norm, result


def advance_boards(
    state: TrainState, config: PretrainConfig, reasoning_at: Callable[[int], Reasoning]
) -> Sums:
    """Moves the boards of the step before to their next state, for a network that searches; returns sums.

    Reasoning and draws are of that step, but the weights have been updated since. A network that only answers
    has nothing to move.
    """
    if not state.model.network.advances or state.step == 1:
        return {}
    reasoning = reasoning_at(state.step - 1)
    draws = draw(state, config, reasoning, step=state.step - 1)
    state.carry, sums = state.model.advance(state.carry, reasoning, draws)
    return sums


def forward_and_backward(
    state: TrainState,
    boards: Carry,
    config: PretrainConfig,
    counts: Counts,
    reasoning: Reasoning,
    draws: Draws,
    is_asked_to_stop: Callable[[], bool],
) -> Sums:
    """Adds up the gradients of this rank's boards, micro-batch by micro-batch; returns the metric sums.

    The sum of losses is divided by counts["slots"]; counts are of the global batch, with local_steps of this
    rank. Messages may leave in the last backward pass, so that all scalars are added before it. Their sums
    over ranks are in `StepResult`.
    """
    state.strategy.start_step()  # zeroes the gradients, opens the scalars
    strategy, network, scalars = state.strategy, state.model.network, state.weights.scalars
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    # At least one: a rank without slots takes part in the messages with an empty micro-batch.
    micro_batches = [slice(first, first + size) for first in range(0, max(1, num_slots), size)]
    after, sums = [], {}
    for slots in micro_batches:
        before, own_draws, is_last = boards.select(slots), draws[slots], slots is micro_batches[-1]
        if is_last:  # the message with the scalars may leave in its backward pass
            scalars.add(stop=int(is_asked_to_stop()))
        with strategy.micro_batch(is_last=is_last):
            output = strategy.model(before, reasoning, own_draws)
            loss, new_sums = network.losses(
                before, output, counts=counts, reasoning=reasoning, draws=own_draws
            )
            scalars.add(loss=loss.detach())
            strategy.backward(loss / counts["slots"])
        after.append(output.carry)
        sums = _add(sums, new_sums)
    # The same draws pick the same boards as in `refill`: each goes back to its place.
    state.carry = state.model.put_back(state.carry, Carry.join(after), draws)
    return sums


def draw(state: TrainState, config: PretrainConfig, reasoning: Reasoning, *, step: int) -> Draws:
    """Returns the draws of this rank's slots in a step.

    The network's own arrays are drawn for the global batch; all other numbers are made later, on the device,
    from counters.
    """
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


def _add(sums: Sums, more: Sums) -> Sums:
    return sums | {name: sums.get(name, 0) + value for name, value in more.items()}
