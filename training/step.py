"""One training step: one thinking step of every slot, then one update of the weights.

A slot is one position of the global batch, and works on one puzzle at a time. Each rank works on its own
slots. A thinking step is one forward pass of the network. It returns a new state and an answer for each slot,
and the slot may halt. A slot keeps its puzzle and its state for several training steps, until it halts.
Between training steps, they are in `state.carry`. A new state is detached, so no gradient flows from one
training step into an earlier one.

`train_step` does the following, in this order. The comments in the code have the same numbers. "Dense
weights" are all weights except the puzzle embeddings.

1. Sample the random numbers of the step. Example: which slots explore. An exploring slot samples a minimum
   number of thinking steps, and does not halt in this training step if it has made fewer on its puzzle. The
   next training step samples again.
2. If a slot has halted, give it its puzzle of the batch and an initial state. The other slots keep their
   puzzle and their state. They skip their puzzle of the batch.
3. Prepare the embeddings of the puzzles in the slots, and the divisors of the loss. A divisor is a number
   that divides a term of the loss, such as the number of slots.
4. For each micro-batch: run the thinking step, decide which slots halt, compute the loss, and run the
   backward pass. The gradients of the micro-batches add up. Scalars are prepared for step 6: the loss of this
   rank, and its stop request. A rank requests a stop if it has received a signal.
5. Store the new carry.
6. Sum over ranks: the gradients of the dense weights, the gradients of the puzzle embeddings, and the
   scalars. With sync_dtype=bfloat16, all of them are rounded before.
7. Clip the norm of the gradients of the dense weights, if `grad_clip_norm` is set. Update the dense weights
   with the optimizer. Update each puzzle embedding that the step used with sign SGD. If `ema` is set, bring
   its moving average (EMA) up to date before. Most steps do not use an embedding, so they do not touch its
   average either.
8. In bfloat16, copy the updated float32 weights of the blocks to the bfloat16 weights of the forward pass.
9. Add the dense weights to their moving average, if `ema` is set.
10. Add the metric sums of the step.

Config keys select modes of a step. Each entry says what a mode changes in steps 1 to 10.

Sums over ranks
- sync=flat, and sync=auto without shared memory (see below): During the last backward pass of step 4, the
  gradients and the scalars are sent in buckets. Step 6 waits for the sums (FlatSync in distributed/sync.py).
- sync=auto on the CPUs of one Linux node: Step 6 adds the gradients in shared memory (SharedMemorySync). The
  optimizer is then sharded over all ranks by default. Not with a pipeline, tensor parallelism, local steps,
  sync_dtype=bfloat16 or train_only=puzzle_embeddings, nor if some but not all ranks shard the optimizer.
- sync=ddp: torch's DistributedDataParallel sums the gradients in the last backward pass of step 4. Step 6
  sums the scalars in a separate message (DDPSync).
- local_steps > 1: Each rank trains by itself on its slots. Steps 3 and 6 send nothing, and step 7 uses only
  the gradients of this rank. Every `local_steps` training steps, and after the last one, step 8 merges the
  ranks. A merge replaces the weights of all ranks by one set of weights: their mean, or with `outer_lr` and
  `outer_momentum` the result of a step in the direction of the mean. A puzzle embedding becomes its mean over
  the ranks that changed it. Step 9 does nothing without a merge. After a merge, it adds the merged weights
  once for each training step since the previous merge. The scalars are summed over ranks in a merge, too
  (LocalSteps in training/strategy.py).

Weights on several ranks
- data_parallel_shard_degree: The optimizer is sharded (ZeRO-1). In step 7, each rank updates only its shard
  of the blocks' weights, and all other dense weights. In float32, all dense weights are sharded. Step 8
  all-gathers the shards (distributed/flat.py).
- pipeline_parallel_degree: Each rank has some of the blocks. In step 4, the activations of the slots pass
  through the blocks of all ranks of a pipeline, forward and backward. Step 4 sends no gradients of weights.
  Step 6 sends all of them (distributed/pipeline.py). In step 7, the ranks sum their parts of the gradient
  norm.
- tensor_parallel_degree: Several ranks work on the same slots. Each of them has a part of every matrix in the
  blocks. In step 4, they sum activations and gradients of activations. Gradients of weights and the norm are
  summed as in a pipeline. With optimizer=muon, step 7 gathers matrices (distributed/tensor.py).
- puzzle_emb_sharding=rows: Each puzzle embedding is on one rank, its owner. Step 3 fetches embeddings from
  the owners, and step 6 sends the gradients to the owners (optimizers/puzzle_table.py).

What is computed
- train_only=puzzle_embeddings: The dense weights have no gradient, and do not change.
- arch.no_ACT_continue=false (HRM): The loss has a term for q_continue, the value of one more thinking step.
  With arch.q_target=exact, step 4 calls the network once more on all slots, without gradient, for the target
  of this term. With arch.q_target=deferred, it does so only on slots that halt. For all other slots, the next
  training step computes the term (models/objective.py).
- arch=ldt: A slot may hold several puzzles (`boards_per_slot`). A training step works on one of them, and the
  others wait. LDT has divisors that depend on the data. Step 3 sums them over ranks, except with local steps
  (models/ldt.py).
- state_noise, step_noise, init_noise, dropout: Random changes of states and activations in steps 2 and 4
  (models/noise.py).
- gradient_accumulation_steps: Step 4 splits the slots of a rank into this number of micro-batches. The number
  must divide the number of slots, except in an elastic run with uneven ranks. Only the last micro-batch may
  send gradients.
- activation_checkpointing=block: The backward pass computes the activations of each block again.
- compile: torch compiles the blocks, and the update of AdamATan2.
- curriculum: The batch and the number of cycles in step 4 depend on the stage (training/schedule.py).
- torchrun --nnodes MIN:MAX (elastic): The number of ranks may change between launches. A rank may have no
  slot.

With one process, nothing is sent. No update is skipped: if the loss or the gradient norm is not finite, the
weights are updated all the same. The training loop then ends the run, before the next log row, checkpoint or
evaluation (`Monitor` in training/monitor.py).

`PretrainConfig.mistakes` in config/schema.py and `check_layout` in training/layout.py refuse modes that
cannot be combined.
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
    # 2. Start halted slots. The other slots keep their puzzle and their state. If slots hold several puzzles
    # (LDT), `picked` is the number of the puzzle that each slot works on. Otherwise, it is None.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # 3. Puzzle embeddings and divisors. Only a sharded puzzle table, and arch=ldt, send something here.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        local_divisors = network.objective.divisors(active)
        divisors = state.strategy.sum_divisors(local_divisors)  # it adds the number of slots as "slots"
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. Store the carry, for the next step.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. For a log row, metrics are summed over ranks. The gradient norm is divided by the number of
    # ranks before, so that this sum is the mean over ranks. (Without local steps, all ranks have the same.)
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

    The objective returns the sum of the losses of the slots. Before the backward pass, this function divides
    the sum by divisors["slots"]: the number of slots of the global batch, or with local steps of this rank.
    All micro-batches have the same divisor.
    """
    strategy, network = state.strategy, state.model.network
    strategy.start_step()  # zeroes the gradients
    # Each micro-batch has `size` slots. The last one may have fewer. A rank without slots runs one empty
    # micro-batch, because the other ranks wait for its messages.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # Add the scalars (loss and stop request) before the last backward pass, because with sync=flat this pass
    # sends them together with the gradients. The loss is a sum over slots. `Strategy.synchronize` divides it.
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
    # merge is due. The result contains the loss of the step over all ranks.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. `averaged_steps` contains this step. With local steps, it is empty without a merge.
    # After a merge, it contains all steps since the previous merge.
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
