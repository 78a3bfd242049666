"""One training step: one thinking step of every slot, then one update of the weights.

A slot is one position of the global batch, and works on one puzzle at a time. Each rank works on its own
slots. A thinking step is one forward pass of the network. It returns a new state and an answer for each slot,
and the slot may halt. A slot keeps its puzzle and its state for several training steps, until it halts.
Between training steps, they are in `state.carry`. A new state is detached, so no gradient flows from one
training step into an earlier one.

`train_step` does the following, in this order. The comments in the code have the same numbers. "Dense
weights" are all weights except the puzzle embeddings.

1. Sample the random numbers of the step. Example: which slots explore. An exploring slot does not halt before
   a random number of thinking steps.
2. Start each slot that has halted on its puzzle of the batch, with an initial state. The other slots keep
   their puzzle and their state. They skip their puzzle of the batch.
3. Prepare the puzzle embeddings and the divisors of the loss.
4. For each micro-batch: run the thinking step, compute the loss, and run the backward pass. The gradients of
   the micro-batches add up. The loss and the stop request of this rank become scalars that are sent together
   with the gradients. A rank requests a stop if it has received a signal.
5. Store the new carry.
6. Sum the gradients of the dense weights and of the puzzle embeddings over ranks, and the scalars.
7. Clip the norm of the gradients of the dense weights, if `grad_clip_norm` is set. Update the dense weights
   with the optimizer. Update the puzzle embeddings of the puzzles in this step with sign SGD.
8. Copy the updated float32 weights to the weights of the forward pass, in the dtype of the forward pass.
9. Add the dense weights to their moving average (EMA), if `ema` is set. 7 does the same for the puzzle
   embeddings that it changes.
10. Add the metric sums of the step.

The config keys below select modes of a step. Each entry says what the mode changes in 1 to 10.

- sync=flat, or sync=auto on GPUs or several nodes: The last backward pass of 4 sends the gradients in
  buckets, each when it is complete. 6 waits for the sums (FlatSync in distributed/sync.py).
- sync=ddp: torch's DistributedDataParallel sums the gradients in the last backward pass of 4 (DDPSync).
- sync=auto on the CPUs of one Linux node: 6 adds the gradients in shared memory (SharedMemorySync). The
  optimizer is then sharded over all ranks by default.
- data_parallel_shard_degree: The optimizer is sharded (ZeRO-1). In 7, each rank updates only its shard of the
  dense weights. 8 all-gathers the shards (distributed/flat.py).
- local_steps > 1: Each rank trains by itself on its slots. 3 and 6 send nothing, and 7 uses the gradients of
  this rank. Every `local_steps` steps, and after the last step, 8 merges the weights, the puzzle embeddings
  and the scalars of all ranks. 9 runs only after a merge. It then counts every step since the previous merge
  (LocalSteps in training/strategy.py).
- pipeline_parallel_degree: Each rank has a part of the blocks. In 4, the activations of the slots pass
  through the blocks of all ranks of a pipeline, forward and backward. 6 sends all gradients
  (distributed/pipeline.py).
- tensor_parallel_degree: Several ranks work on the same slots. Each of them has a part of every matrix in the
  blocks. In 4, they sum activations and their gradients. 6 sends all gradients of weights. With
  optimizer=muon, 7 gathers matrices (distributed/tensor.py).
- puzzle_emb_sharding=rows: Each puzzle embedding is on one rank, its owner. 3 fetches embeddings from the
  owners, and 6 sends the gradients to the owners (optimizers/puzzle_table.py).
- train_only=puzzle_embeddings: The dense weights have no gradient, and do not change.
- arch.no_ACT_continue=false (HRM): The loss in 4 calls the network again, without gradient, for a target. It
  does so for all slots, or with arch.q_target=deferred only for slots that halt (models/objective.py).
- arch=ldt: A slot may hold several puzzles. The step works on one of them. Terms of the loss have divisors
  that depend on the data. 3 sums them over ranks (models/ldt.py).
- gradient_accumulation_steps: 4 splits the slots of a rank into this number of micro-batches, or into more
  if the number is not a divisor. Only the last micro-batch may send gradients.
- activation_checkpointing=block: The backward pass computes the activations of each block again.
- compile: torch compiles the blocks, and the update of AdamATan2.
- curriculum: The batch and the number of cycles in 4 depend on the stage (training/schedule.py).
- torchrun --nnodes MIN:MAX: The number of ranks may change between launches. A rank may have no slot.

With one process, nothing is sent. No update is skipped: if the loss or the gradient norm is not finite, the
weights are updated all the same. `Monitor` ends the run before the next log row, checkpoint or evaluation.

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
        batch: One puzzle for each slot of this rank. If a slot has not halted, its puzzle of `batch` is
            skipped. It is not kept for later steps. A later epoch may draw it again.
        config: Config of the run.
        rates: Learning rates of this step: "lr" of the dense weights, "puzzle_emb_lr" of the puzzle
            embeddings.
        clock: Measures the time that the rank waits for other ranks.
        reasoning: Cycles and noise of this step. If None, those of the architecture.
        is_asked_to_stop: Returns whether a signal has asked this rank to stop. It is called once, before the
            last micro-batch.

    Returns:
        The loss, the gradient norm and the number of stop requests. They are equal on all ranks. With local
        steps, they are None unless the step ends with a merge.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. Start halted slots. The other slots keep their puzzle and their state. `picked` says which of its
    # puzzles each slot works on. It is None if a slot holds one puzzle. Then `boards` returns all slots.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # 3. Puzzle embeddings and divisors. This sends nothing, unless the puzzle table is sharded or arch=ldt.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        local_divisors = network.objective.divisors(active)
        divisors = state.strategy.sum_divisors(local_divisors)  # also has the number of slots, "slots"
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. Store the carry, for the next step.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. A log row contains their sums over ranks. All ranks have the same gradient norm, so divide
    # it by the number of ranks first. With local steps, norms differ, and the row contains their mean.
    state.metrics.add(sums | {"grad_norm": grad_norm / state.ranks.size})
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

    The objective returns the sum of the losses of the slots. This function divides the sum by
    divisors["slots"], for every micro-batch by the same number. It is the number of slots of the global
    batch, or with local steps the number of slots of this rank.
    """
    strategy, network = state.strategy, state.model.network
    strategy.start_step()  # zeroes the gradients
    # Each micro-batch has `size` slots. The last one may have fewer. A rank without slots runs one empty
    # micro-batch, because the other ranks wait for its messages.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # The scalars (loss and stop request) are sent in the same messages as the gradients. Add them before the
    # last backward pass, because with sync=flat this pass may already send them.
    scalars = state.weights.scalars
    carries: list[Carry] = []
    sums: Sums = {}
    for slots in micro_batches:
        before, local_rng = active.select(slots), rng[slots]
        is_last = slots is micro_batches[-1]
        if is_last:
            scalars.add(stop=int(is_asked_to_stop()))
        with strategy.micro_batch(is_last=is_last):  # only the last backward pass may send gradients
            # `strategy.model` is `state.model`, or the DistributedDataParallel that wraps it.
            output = strategy.model(before, reasoning, local_rng)
            loss, new_sums = network.objective.losses(
                network, before, output, divisors=divisors, reasoning=reasoning, rng=local_rng
            )
            scalars.add(loss=loss.detach())
            strategy.backward(loss / divisors["slots"])
        carries.append(output.carry)
        for name, value in (new_sums | {"loss": loss.detach()}).items():
            sums[name] = sums.get(name, 0) + value
    return Carry.join(carries), sums


def update(
    state: TrainState, config: PretrainConfig, rates: dict[str, float], clock: StepClock
) -> tuple[Tensor, StepResult]:
    """Updates weights, puzzle embeddings and averages. Returns the gradient norm and the step's result.

    The gradient norm is that of the dense weights, before clipping.
    """
    # 6. Sum the gradients over ranks, except with local steps.
    with clock.measure("sync"):
        state.strategy.reduce_gradients(step=state.step)
    # 7. Clip the gradients, and update.
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    # 8. Copy the weights into the forward pass. With local steps, merge the weights of all ranks first, if a
    # merge is due.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. `averaged_steps` is a range that contains this step. With local steps, it contains
    # all steps since the previous merge, or is empty if no merge was due.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Samples the random numbers of one training step on this rank.

    They depend on the seed, the step and the slot, but not on the number of ranks. `sample_randomness` of the
    network samples arrays for the global batch on the host. Each rank copies the entries of its slots to the
    device. All other random numbers are generated on the device.
    """
    slots, device = state.slots, state.carry.steps.device
    arrays = state.model.network.sample_randomness(
        seed=config.seed, step=state.step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    local_arrays = {}
    for name, array in arrays.items():
        local = torch.from_numpy(array[slots.start : slots.stop])
        if device.type == "cuda":
            local = local.pin_memory()  # then the host does not wait for the copy
        local_arrays[name] = local.to(device, non_blocking=True)
    return SlotRng.of_training(config.seed, step=state.step, slots=slots, device=device, **local_arrays)
