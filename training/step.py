"""One training step: every puzzle in the batch gets one forward pass, then the weights change once.

The models think about a puzzle in several thinking steps. A thinking step is one forward pass of the
network. It reads the puzzle and a state, and returns a new state and an answer. One training step contains
one thinking step of each puzzle.

A slot is one position of the global batch. Each rank has its own slots. A slot keeps its puzzle for several
training steps, until it halts. Then it gets a new puzzle. `state.carry` holds the puzzles and states between
training steps. The states are detached, so no gradient flows into an earlier training step.

`train_step` does the following. The comments in the code have the same numbers. "Dense weights" are all
weights except the puzzle embeddings.

1. Draw random numbers on the host, such as the minimum number of thinking steps of a slot.
2. Give new puzzles and initial states to the slots that have halted. Slot i takes puzzle i of the batch. If
   slot i has not halted, puzzle i of the batch is skipped.
3. Compute the numbers by which the loss is divided, such as the number of slots in the global batch.
4. Run the micro-batches: thinking step, decision which slots halt (models/halting.py), loss, and backward
   pass. The gradients of the micro-batches add up.
5. Store the new puzzles and states.
6. Sum the gradients over ranks. Two numbers are summed with them: the loss, and the number of ranks that a
   signal has asked to stop.
7. Clip the gradients of the dense weights (`grad_clip_norm`). Update the dense weights with the optimizer,
   and the embeddings of the puzzles in the slots with sign SGD.
8. Copy the new weights to the bfloat16 copies that the forward pass reads, if there are any.
9. Update the moving averages of the dense weights (`ema`).
10. Add the metrics of this rank to the sums for the next log row.

With one process, nothing is sent. The step does not check that the loss is finite. `Monitor` in
training/monitor.py checks it later, and ends the run.

The following config keys change a step.

How gradients are summed
- sync=flat: The last backward pass of step 4 sends the gradients of the dense weights. Step 6 waits for the
  sums, and sends the gradients of the puzzle embeddings. With a pipeline or tensor parallelism, step 6 sends
  all gradients.
- sync=ddp: torch's DistributedDataParallel sums the gradients of the dense weights in the last backward pass.
  Step 6 sums the rest. All weights are float32, so step 8 copies nothing.
- sync=auto: On the CPUs of one Linux node, step 6 adds the gradients in shared memory. Otherwise, and with
  some other keys, it is the same as sync=flat (`SharedMemorySync` in distributed/sync.py).
- sync_dtype=bfloat16: The gradients of the dense weights are sent in bfloat16.
- local_steps > 1: Each rank trains by itself. Steps 3 and 6 send nothing. Every `local_steps` training steps,
  step 8 replaces the weights by their mean over the ranks (`LocalSteps` in training/strategy.py).

How weights are distributed
- data_parallel_shard_degree: The optimizer state is sharded (ZeRO-1). In step 7, each rank updates its shard.
  Step 8 all-gathers the new weights (distributed/flat.py).
- pipeline_parallel_degree: Each rank has some of the blocks. Step 4 sends activations from rank to rank
  (distributed/pipeline.py).
- tensor_parallel_degree: Each rank has a part of every matrix in the blocks. Step 4 sums activations over
  ranks (distributed/tensor.py).
- puzzle_emb_sharding=rows: Each puzzle embedding is on one rank. Step 3 fetches embeddings from these ranks,
  and step 6 sends the gradients to them (optimizers/puzzle_table.py).

What is computed
- train_only=puzzle_embeddings: The dense weights do not change.
- arch.q_target: How HRM computes the target of the Q head that predicts the value of one more thinking step.
  With "exact", step 4 runs that thinking step without gradient. With "deferred", the next training step
  computes the target of each slot that has not halted (models/objective.py).
- arch=ldt: A slot may hold several puzzles, called boards. A training step works on one of them.
- gradient_accumulation_steps: Number of micro-batches in step 4. Only the last backward pass sends
  gradients.
- curriculum: The run has stages, each with its own data and settings (training/schedule.py).
- torchrun --nnodes MIN:MAX (elastic): The number of ranks may change when the run restarts. A rank without
  slots runs one empty micro-batch.

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
        batch: One puzzle for each slot of this rank. Slots that have not halted ignore it.
        config: Config of the run.
        rates: Learning rates of this step: "lr" of the dense weights, "puzzle_emb_lr" of the puzzle
            embeddings.
        clock: Measures the time that the rank waits for other ranks.
        reasoning: Settings of the thinking step, such as its noise. If None, those of the model.
        is_asked_to_stop: Returns whether a signal has asked this rank to stop. Called once.

    Returns:
        The loss, the gradient norm, and a number that is positive if a signal has asked any rank to stop.
        They are equal on all ranks. With local_steps > 1, they are None except in steps that average the
        weights over ranks.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. New puzzles. With arch=ldt, a slot may hold several puzzles (boards). `picked` then has the index of
    # one board for each slot. Otherwise, `picked` is None, and `boards(None)` is the carry itself.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # 3. Divisors of the loss, and puzzle embeddings. Most models send nothing here.
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
    # 10. Metrics. The log has their sums over ranks. The division makes this sum the mean gradient norm.
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
    # Numbers to sum over ranks with the gradients. The last backward pass may send them, so they are added
    # before it.
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
    # 8. Copy the new weights to those that the forward pass reads. With local_steps > 1, every `local_steps`
    # training steps this first averages the weights over ranks.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. Usually, `averaged_steps` is this step. With local_steps > 1, it is empty until the
    # weights are averaged over ranks. Then it has all steps since the previous time.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns the random numbers of one training step for this rank's slots.

    They depend on the seed, the step and the slot, but not on the number of ranks.
    """
    # The host draws some numbers for the global batch. Each rank copies those of its slots to the device.
    # The device draws all others later, such as noise.
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
