"""One training step: forward and backward pass, sum over ranks, update of the weights, averages.

A slot is one of the global_batch_size parts of the batch. A board is what a slot works on: a puzzle and the
state of the network. A network that searches (LDT) keeps several boards in each slot; any other network keeps
one. Between steps, `state.carry` has the boards of this rank's slots.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from config.schema import PretrainConfig
from dataset.loader import Batch
from models.carry import Carry, Reasoning
from models.objective import Divisors, Sums
from models.random import SlotRng
from training.clock import StepClock
from training.state import TrainState
from training.strategy import StepResult


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: PretrainConfig,
    rates: dict[str, float],
    clock: StepClock,
    reasoning: Reasoning | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Trains one step on this rank's share of the global batch; changes `state`. All ranks call it.

    batch: a puzzle for each slot of this rank, used only in slots that have halted. rates: the learning rates
    "lr" and "puzzle_emb_lr". reasoning: cycles and noise of this step; None: the architecture's.
    is_asked_to_stop: returns whether a signal has asked this rank to stop; called before the last
    micro-batch.
    """
    state.step += 1
    reasoning = reasoning or state.model.reasoning
    network, rng = state.model.network, draw(state, config, reasoning)
    # What this step works on, in new tensors: all slots, of LDT's slots one board each. Halted ones start on
    # their row of `batch`.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # Puzzle table by owner: fetch the rows of these slots.
    # Divisors of losses: LDT's depend on the data and are summed over ranks; the number of slots is known.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        divisors = state.strategy.sum_divisors(network.objective.divisors(active))
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    state.carry = state.carry.with_boards_(picked, after)
    grad_norm, result = update(state, config, rates, clock)
    # Metrics are sums over ranks, made when a row is logged. So a norm, which is equal on all ranks (with
    # local_steps: the mean over ranks is wanted), is divided by their number first.
    state.metrics.add(_add(sums, {"grad_norm": grad_norm / state.ranks.size}))
    return result


def update(
    state: TrainState, config: PretrainConfig, rates: dict[str, float], clock: StepClock
) -> tuple[Tensor, StepResult]:
    """Updates weights, puzzle embeddings and averages; returns the gradient norm and the result.

    Without local steps, gradients are summed over ranks in every step. With local steps, each rank updates
    its weights from its own gradients, and `synchronize` merges the weights every `local_steps` steps.
    grad_norm: of the dense weights alone, before clipping; puzzle embeddings move by signs of gradients.
    """
    with clock.measure("sync"):  # sums gradients over ranks; with local_steps, takes this rank's own
        state.strategy.reduce_gradients(step=state.step)
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    # Write the updated float32 weights into those of the forward pass: cast, and with shards all-gathered.
    # With local_steps, where due, the weights of all ranks are merged before.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # Add the new dense weights to their average; with local_steps only at a merge, for all steps since the
    # merge before. `state.table` itself averages the puzzle embeddings, each row before the row changes.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def forward_and_backward(
    state: TrainState,
    active: Carry,
    config: PretrainConfig,
    divisors: Divisors,
    reasoning: Reasoning,
    rng: SlotRng,
    is_asked_to_stop: Callable[[], bool],
) -> tuple[Carry, Sums]:
    """Accumulates this rank's gradients over micro-batches. Returns the new carry and the metric sums.

    divisors: of the global batch, or with local_steps of this rank's slots. `Objective.losses` returns a sum
    over slots, in which a mean over another number than slots is scaled by divisors["slots"] / number; here
    the sum is divided by divisors["slots"]. The last backward pass may already send gradients (`FlatSync` and
    DDP do, not so a mesh, shared memory or local steps), and with them the scalars (loss, request to stop):
    these are added before.
    """
    state.strategy.start_step()  # zeroes the gradients
    strategy, network, scalars = state.strategy, state.model.network, state.weights.scalars
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    # At least one: a rank without slots runs an empty micro-batch, to take part in the messages.
    micro_batches = [slice(first, first + size) for first in range(0, max(1, num_slots), size)]
    after, sums = [], {}
    for slots in micro_batches:
        before, own_draws, is_last = active.select(slots), rng[slots], slots is micro_batches[-1]
        if is_last:  # the last moment: the backward pass may send the scalars
            scalars.add(stop=int(is_asked_to_stop()))
        with strategy.micro_batch(is_last=is_last):
            # The model, or the wrapper of DistributedDataParallel around it; decides which slots halt.
            output = strategy.model(before, reasoning, own_draws)
            loss, new_sums = network.objective.losses(
                network, before, output, divisors=divisors, reasoning=reasoning, rng=own_draws
            )
            scalars.add(loss=loss.detach())
            strategy.backward(loss / divisors["slots"])  # a sum over slots: the mean of the global batch
        after.append(output.carry)
        sums = _add(sums, new_sums)
    return Carry.join(after), sums


def draw(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns this rank's random numbers of a step; a slot's do not depend on the number of ranks.

    `Network.sample_randomness` returns arrays for the global batch on the host, such as the smallest number
    of thinking steps of slots that explore. This rank's rows go to the device, which computes all else from
    seed, step and slot.
    """
    device, slots = state.carry.steps.device, state.slots
    is_pinned = device.type == "cuda"  # then the host does not wait for the copy
    arrays = state.model.network.sample_randomness(
        seed=config.seed, step=state.step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    own = {}
    for name, array in arrays.items():
        share = torch.from_numpy(array[slots.start : slots.stop])
        own[name] = (share.pin_memory() if is_pinned else share).to(device, non_blocking=True)
    return SlotRng.of_training(config.seed, step=state.step, slots=slots, device=device, **own)


def _add(sums: Sums, more: Sums) -> Sums:
    return sums | {name: sums.get(name, 0) + value for name, value in more.items()}
