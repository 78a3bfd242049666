"""One training step: forward and backward pass, sum of gradients over ranks, update, moving averages.

`train_step` runs the step. A slot is one position of the global batch. Each rank works on its own slots. A
training step is one thinking step of every slot, followed by one update of the weights. A puzzle stays in its
slot for several training steps, until the slot halts. Between steps, `state.carry` holds the puzzle and the
latent state of each slot. States are detached: no gradient flows from one training step into another.

The table lists the modes of a step, and the file that contains each mode.

mode                      key                                    file
flat gradients            sync=flat; auto on GPUs or many nodes  distributed/sync.py: FlatSync
DDP                       sync=ddp                               distributed/sync.py: DDPSync
shared memory             sync=auto on CPUs of one Linux node    distributed/sync.py: SharedMemorySync
sharded optimizer         data_parallel_shard_degree             distributed/flat.py
local steps               local_steps                            training/strategy.py: LocalSteps
pipeline                  pipeline_parallel_degree               distributed/pipeline.py
tensor parallel           tensor_parallel_degree                 distributed/tensor.py
sharded puzzle table      puzzle_emb_sharding=rows               optimizers/puzzle_table.py
only puzzle embeddings    train_only=puzzle_embeddings           training/model.py
second network call       arch.q_target (HRM's Q learning)       models/objective.py
gradient accumulation     gradient_accumulation_steps            `forward_and_backward`
elastic number of ranks   torchrun --nnodes MIN:MAX              distributed/shards.py: slots_of
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
        The loss, the gradient norm and the number of stop requests. They are equal on all ranks. With local
        steps, they are None until the next merge.
    """
    state.step += 1
    reasoning = reasoning or state.model.reasoning
    network, rng = state.model.network, sample_rng(state, config, reasoning)
    # In LDT, a slot may hold several puzzles (boards). Pick the one on which this step works.
    picked = network.pick_boards(rng)
    # Start halted slots on their puzzle of `batch`. The other slots keep their puzzle and state.
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    with clock.measure("sync"):
        # If the puzzle table is sharded, fetch the embeddings of these slots from their owners.
        state.table.prepare(active.data.puzzle_identifiers)
        # The loss is a sum over slots, divided by the number of slots of the global batch, divisors["slots"].
        # LDT has terms with other divisors, which depend on the data. Sum these over ranks, except with local
        # steps.
        divisors = state.strategy.sum_divisors(network.objective.divisors(active))
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    state.carry = state.carry.with_boards_(picked, after)
    grad_norm, result = update(state, config, rates, clock)
    # When a row is logged, every metric is summed over ranks. The gradient norm is equal on all ranks, so
    # divide it by the number of ranks first. With local steps, norms differ, and the row has their mean.
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

    `losses` of the objective returns a sum over slots. This function divides the sum by divisors["slots"].
    This divisor is the number of slots of the global batch, or with local steps the one of this rank.
    """
    state.strategy.start_step()  # zeroes the gradients
    strategy, network = state.strategy, state.model.network
    scalars = state.weights.scalars  # numbers at the end of the flat gradients, sent with them
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    # The last micro-batch may be smaller. A rank without slots runs one empty micro-batch, because the other
    # ranks wait for its messages.
    micro_batches = [slice(first, first + size) for first in range(0, max(1, num_slots), size)]
    after, sums = [], {}
    for slots in micro_batches:
        before, local_rng, is_last = active.select(slots), rng[slots], slots is micro_batches[-1]
        # Add the scalars (stop request, loss) before the last backward pass. With sync=flat, without a mesh
        # and without local steps, gradients and scalars are sent during this pass. In all other modes,
        # `reduce_gradients` or a merge sends the scalars.
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
        # Copy the updated float32 master weights into the weights of the forward pass. The copy is cast to
        # their dtype. If the optimizer is sharded, the shards are all-gathered. With local steps, if a merge
        # is due, the master weights of all ranks are merged before the copy.
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # Add the dense weights to their average (EMA). With local steps, this is done only after a merge, and
    # counts every step since the previous merge. The table averages puzzle embeddings itself.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Samples the random numbers of one training step on this rank.

    They depend on the seed, step and slot, but not on the number of ranks. `Network.sample_randomness`
    samples arrays for the global batch on the host. Example: for each slot that explores, its minimum number
    of thinking steps (models/halting.py). Each rank copies the entries of its slots to the device. All other
    random numbers are generated on the device.
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
