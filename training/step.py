"""One training step: each slot makes one thinking step on its puzzle, then the weights change once.

A thinking step is one forward pass of the network. It reads a puzzle and a state, and returns a new state and
an answer. The models think about a puzzle in several thinking steps, but a training step contains only one.

A slot is one position of the global batch. The ranks divide the slots among themselves. A slot keeps its
puzzle and its state from one training step to the next, until the puzzle halts: the thinking about it is
over. Then the slot gets a new puzzle. Between training steps, `state.carry` contains the puzzles and states
of this rank's slots. The states are detached, so no gradient flows into an earlier training step.

`train_step` does the following. The comments in the code have the same numbers. "Dense weights" are all
weights except the puzzle embeddings. A puzzle embedding is a learned vector of a puzzle identifier. Several
puzzles may share an identifier.

1. Draw random numbers on the host. Example: exploration. A few slots get a random number m. In this training
   step, such a slot does not halt if its puzzle has had fewer than m thinking steps.
2. The data offer one new puzzle to each slot. A slot that has halted takes its new puzzle, with an initial
   state. The other slots go on with their old puzzles, and their new puzzles are not used.
3. Determine the divisors of the loss: numbers by which its terms are divided. For most models, there is only
   one: the number of slots of the global batch, which is constant.
4. Zero the gradients. Run the micro-batches: thinking step, decision which slots halt (models/halting.py),
   loss, and backward pass. The gradients of the micro-batches add up.
5. Store the new puzzles and states.
6. Sum the gradients over ranks. Two more numbers are summed with them: the loss, and the number of ranks that
   a signal has asked to stop.
7. Clip the gradients of the dense weights (`grad_clip_norm`). Update the dense weights with the optimizer.
   With sign SGD and weight decay, update the puzzle embeddings that any rank used in this step. Before an
   embedding changes, its moving average catches up with all steps since the last change (`ema`).
8. If the blocks of the network compute in bfloat16, copy the new float32 weights to their bfloat16 weights.
9. Update the moving averages of the dense weights (`ema`).
10. Add the metrics of this rank to the sums for the next log row.

With one process, nothing is sent. A loss that is not finite does not stop the step. `Monitor` in
training/monitor.py finds it after the step, on a GPU some steps later, and ends the run.

The following config keys change a step.

How gradients are summed
- sync=flat: The last backward pass of step 4 sends the gradients of the dense weights, with the two numbers
  of step 6. Step 6 waits for the sums. Then it sends the gradients of the puzzle embeddings.
- sync=ddp: torch's DistributedDataParallel sums the gradients of the dense weights in the last backward pass.
  Step 6 sends the gradients of the puzzle embeddings, and the two numbers. There are no bfloat16 copies.
- sync=auto: On the CPUs of one Linux node, step 6 adds the gradients of the dense weights and the two numbers
  in shared memory (`SharedMemorySync` in distributed/sync.py). The optimizer state is then sharded, unless
  data_parallel_shard_degree=1. In all other cases, sync=auto is sync=flat. On such CPUs, these are:
  sync_dtype=bfloat16, local_steps > 1, train_only, a pipeline, tensor parallelism, and a shard degree that is
  neither 1 nor the number of ranks.
- sync_dtype=bfloat16: The gradients of the dense weights and the two numbers are sent in bfloat16.
- local_steps > 1: Each rank trains alone. Step 3 divides the loss by the number of this rank's slots. Step 6
  sums nothing. Step 7 updates only the puzzle embeddings that this rank used. After every `local_steps`
  training steps, and after the last one, step 8 merges the weights of the ranks. Each dense weight becomes
  its mean over ranks (`outer_lr` and `outer_momentum` change this). Each puzzle embedding becomes its mean
  over the ranks that changed it. The optimizer states are not merged. The loss, the gradient norm and the
  stop requests of all steps since the last merge are summed only then (`LocalSteps` in training/strategy.py).

How weights are distributed
- data_parallel_shard_degree: The optimizer state is sharded (ZeRO-1). In step 7, each rank updates its shard
  of the weights. In bfloat16, or with a pipeline or tensor parallelism, only the weights of the blocks are
  sharded. Every rank then updates all other weights. Step 8 all-gathers the new weights
  (distributed/flat.py).
- pipeline_parallel_degree: The blocks are divided among the ranks of a pipeline. Each rank has all other
  weights too, and computes the embedding, the answer and the loss of its own slots. In step 4, the
  activations of its slots pass through the blocks of all ranks of the pipeline (distributed/pipeline.py). The
  backward pass sends no gradients of weights. Step 6 sends all of them, and the two numbers. Step 7 computes
  the gradient norm of the complete model. For this, it sums the squared norms of the blocks over the ranks.
- tensor_parallel_degree: The ranks of a group have the same slots. Each of them has a part of every matrix in
  the blocks, and step 4 sums activations and their gradients over the group. Step 6 sends all gradients of
  weights, and the two numbers. Step 7 computes the gradient norm of the complete model, and with Muon gathers
  matrices. Step 8 sums the stop requests over the group (distributed/tensor.py).
- puzzle_emb_sharding=rows: Each puzzle embedding is on one rank only, its owner. Step 3 fetches embeddings
  from their owners, and step 6 sends the gradients to the owners (optimizers/puzzle_table.py).

What is computed
- train_only=puzzle_embeddings: The dense weights have no gradient, and do not change. Step 6 sends the two
  numbers.
- arch.no_ACT_continue=false (HRM): The network also predicts q_continue, how good one more thinking step
  would be. The target is computed from the output of the slot's next thinking step. With arch.q_target=exact,
  step 4 runs one more thinking step for all slots, without gradient, to get this output. With "deferred", it
  does so only for slots that halt. A slot that goes on makes its next thinking step in the next training step
  anyway. The loss of that training step then contains the q_continue loss of this one (models/objective.py).
- arch=ldt: A slot may hold several puzzles, called boards (`boards_per_slot`). In each training step, it
  works on one of them, chosen at random. Step 3 also counts two further divisors, and sums them over ranks.
- gradient_accumulation_steps: Number of micro-batches in step 4. Only the last backward pass may send
  gradients.
- curriculum: The run has stages, which may have their own data and numbers of cycles in a thinking step
  (training/schedule.py).
- torchrun --nnodes MIN:MAX (elastic): The number of ranks may change when the run restarts. If this number
  does not divide the number of slots, some ranks have fewer slots and micro-batches. A rank without slots
  runs one empty micro-batch.

`PretrainConfig.mistakes` in config/schema.py and `check_layout` in training/layout.py refuse keys that cannot
be combined.
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
        batch: One new puzzle for each slot of this rank. Only slots that have halted use theirs.
        config: Config of the run.
        rates: Learning rates of this step: "lr" of the dense weights, "puzzle_emb_lr" of the puzzle
            embeddings.
        clock: Measures the time that the rank waits for other ranks.
        reasoning: Settings of the thinking step, such as its noise. If None, those of the model.
        is_asked_to_stop: Returns whether a signal has asked this rank to stop. Called once.

    Returns:
        The loss, the gradient norm before clipping, and the number of ranks that a signal has asked to stop.
        They are equal on all ranks. With local_steps > 1, they are None, except in a step that merges the
        weights. The loss and the norm are then means over ranks and over the steps since the last merge. The
        last number is positive if a rank got a signal in these steps.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. New puzzles. If slots hold several boards (arch=ldt), `picked` selects one of each slot. Otherwise,
    # it is None. `active` contains the puzzle and the state of every slot for this thinking step.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # 3. Divisors of the loss. Before that, the table of puzzle embeddings fetches those that are on other
    # ranks, if there are any.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        local_divisors = network.objective.divisors(active)
        divisors = state.strategy.sum_divisors(local_divisors)  # also has "slots": the number of slots
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. Store the new puzzles and states.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. They are summed over ranks for a log row. The division makes grad_norm a mean.
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
    """Runs all micro-batches of this rank: forward passes, losses and backward passes.

    Returns (puzzles and states after the thinking step, {name: sum of a metric over this rank's slots}).

    active: Puzzle and state of each slot of this rank.
    divisors: Numbers by which terms of the loss are divided, such as {"slots": 768, "cells": 5000.0}.
    rng: Random numbers of this rank's slots.
    is_asked_to_stop: Returns whether a signal has asked this rank to stop.
    """
    strategy, network = state.strategy, state.model.network
    strategy.start_step()  # zeroes the gradients
    # A rank without slots has one empty micro-batch, because the other ranks wait for its messages.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # Numbers to sum over ranks with the gradients. With sync=flat, the last backward pass sends them, so
    # they are added before it.
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
            # `loss` is a sum over slots. It is divided by the number of slots for the backward pass.
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
    """Sums the gradients over ranks, and updates all weights and the moving averages.

    With local_steps > 1, the gradients are not summed.

    Returns (norm of the dense weights' gradients before clipping, result of the training step).

    rates: Learning rates "lr" of the dense weights and "puzzle_emb_lr" of the puzzle embeddings.
    """
    # 6. Sum the gradients over ranks, except with local steps.
    with clock.measure("sync"):
        state.strategy.reduce_gradients(step=state.step)
    # 7. Clip the gradients, and update.
    grad_norm = state.weights.clip_(config.grad_clip_norm)
    state.weights.update_(rates["lr"], step=state.step)
    state.table.update_(rates["puzzle_emb_lr"])
    # 8. Make the forward pass read the new weights. With local_steps > 1, this first merges the weights of
    # the ranks, if a merge is due after this step.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. `averaged_steps` contains this step. With local_steps > 1, it is empty, except after
    # a merge. Then it contains all steps since the previous merge, and the weights are added once for each.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns the random numbers of one training step for this rank's slots.

    They depend on the seed, the step and the slot, but not on the number of ranks.
    """
    # The host draws some numbers for the global batch, and this rank copies those of its slots to the device.
    # All others, such as noise, are drawn on the device when they are needed.
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
