"""One training step: forward and backward pass, sum of gradients over ranks, update, moving averages.

`train_step` runs the step. A slot is one position of the global batch. Each rank works on its own slots.
Between steps, `state.carry` holds the puzzle and the latent state of each of these slots.

The table lists the modes of a step, and the file that contains each mode.

mode                      key                                    file
data parallel, flat       sync=flat (auto: GPUs, several nodes)  distributed/sync.py: FlatSync
data parallel, DDP        sync=ddp                               distributed/sync.py: DDPSync
data parallel, shared     sync=auto (CPUs of one Linux node)     distributed/sync.py: SharedMemorySync
sharded optimizer         data_parallel_shard_degree             distributed/flat.py
local steps               local_steps                            training/strategy.py: LocalSteps
pipeline                  pipeline_parallel_degree               distributed/pipeline.py
tensor parallel           tensor_parallel_degree                 distributed/tensor.py
sharded puzzle table      puzzle_emb_sharding=rows               optimizers/puzzle_table.py
only puzzle embeddings    train_only=puzzle_embeddings           training/model.py
targets of q_continue     arch.q_target                          models/objective.py
gradient accumulation     gradient_accumulation_steps            `forward_and_backward`
other number of ranks     torchrun --nnodes MIN:MAX              training/layout.py
curriculum                curriculum                             training/schedule.py

`PretrainConfig.mistakes` in config/schema.py refuses modes that cannot be combined.
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
    """Runs one training step on this rank's slots, and changes `state`. All ranks call it.

    Args:
        state: Weights, optimizer state and carry of this rank.
        batch: One puzzle for each slot of this rank. Slots that have not halted ignore it.
        config: Config of the run.
        rates: Learning rates of this step: "lr" of the dense weights, "puzzle_emb_lr" of the table.
        clock: Measures the time that the rank waits for other ranks.
        reasoning: Cycles and noise of this step. If None, those of the architecture.
        is_asked_to_stop: Returns whether a signal has asked this rank to stop. It is called once, before the
            last micro-batch.

    Returns:
        The loss, the gradient norm and the number of stop requests, equal on all ranks.
    """
    state.step += 1
    reasoning = reasoning or state.model.reasoning
    network, rng = state.model.network, sample_rng(state, config, reasoning)
    # Start halted slots on their puzzle of `batch`. If a slot holds several puzzles, the step picks one.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    with clock.measure("sync"):
        # If the puzzle table is sharded, fetch the embeddings of these slots from their owners.
        state.table.prepare(active.data.puzzle_identifiers)
        # Sum the divisors of the loss over ranks, except with local steps.
        divisors = state.strategy.sum_divisors(network.objective.divisors(active))
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    state.carry = state.carry.with_boards_(picked, after)
    grad_norm, result = update(state, config, rates, clock)
    # When a row is logged, every metric is summed over ranks. The gradient norm is equal on all ranks, so
    # divide it by their number first. With local steps, the result is the mean over ranks.
    state.metrics.add(_add(sums, {"grad_norm": grad_norm / state.ranks.size}))
    return result


def forward_and_backward(
    state: TrainState,
    active: Carry,
    config: PretrainConfig,
    divisors: Divisors,
    reasoning: Reasoning,
    rng: SlotRng,
    is_asked_to_stop: Callable[[], bool],
) -> tuple[Carry, Sums]:
    """Adds this rank's gradients of all micro-batches. Returns the new carry and the metric sums.

    `losses` of the objective returns a sum over slots. This function divides it by divisors["slots"], the
    number of slots of the global batch. With local steps, it is the number of slots of this rank.
    """
    state.strategy.start_step()  # zeroes the gradients
    strategy, network, scalars = state.strategy, state.model.network, state.weights.scalars
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    # A rank without slots runs an empty micro-batch, because the other ranks wait for its messages.
    micro_batches = [slice(first, first + size) for first in range(0, max(1, num_slots), size)]
    after, sums = [], {}
    for slots in micro_batches:
        before, local_rng, is_last = active.select(slots), rng[slots], slots is micro_batches[-1]
        # Add the scalars (stop request, loss) before the last backward pass. `FlatSync` sends them during
        # that pass, together with the gradients. All other modes send them later.
        if is_last:
            scalars.add(stop=int(is_asked_to_stop()))
        with strategy.micro_batch(is_last=is_last):
            # `strategy.model` is the model, or the DistributedDataParallel that wraps it.
            output = strategy.model(before, reasoning, local_rng)
            loss, new_sums = network.objective.losses(
                network, before, output, divisors=divisors, reasoning=reasoning, rng=local_rng
            )
            scalars.add(loss=loss.detach())
            strategy.backward(loss / divisors["slots"])
        after.append(output.carry)
        sums = _add(sums, new_sums | {"loss": loss.detach()})
    return Carry.join(after), sums


def update(
    state: TrainState, config: PretrainConfig, rates: dict[str, float], clock: StepClock
) -> tuple[Tensor, StepResult]:
    """Updates weights, puzzle embeddings and averages. Returns the gradient norm and the step's result.

    The gradient norm is that of the dense weights, before clipping.
    """
    with clock.measure("sync"):
        # Sum the gradients over ranks. With local steps, each rank keeps its own gradients.
        state.strategy.reduce_gradients(step=state.step)
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    with clock.measure("sync"):
        # Copy the updated float32 master weights into the weights of the forward pass. This casts them and,
        # if the optimizer is sharded, all-gathers the shards. With local steps, merge the weights of all
        # ranks first, if a merge is due.
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # Add the dense weights to their average. With local steps, this happens only after a merge, for all steps
    # since the merge before. The table averages the puzzle embeddings itself, in `update_`.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Samples the random numbers of one training step on this rank.

    They depend on the seed, step and slot, but not on the number of ranks. `Network.sample_randomness`
    samples arrays for the global batch on the host, such as the smallest number of thinking steps of each
    slot that explores. Each rank copies the entries of its slots to the device. All other random numbers are
    generated on the device.
    """
    device, slots = state.carry.steps.device, state.slots
    is_pinned = device.type == "cuda"  # then the host does not wait for the copy
    arrays = state.model.network.sample_randomness(
        seed=config.seed, step=state.step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    local_arrays = {}
    for name, array in arrays.items():
        local = torch.from_numpy(array[slots.start : slots.stop])
        local_arrays[name] = (local.pin_memory() if is_pinned else local).to(device, non_blocking=True)
    return SlotRng.of_training(config.seed, step=state.step, slots=slots, device=device, **local_arrays)


def _add(sums: Sums, more: Sums) -> Sums:
    return sums | {name: sums.get(name, 0) + value for name, value in more.items()}
