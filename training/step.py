"""One training step: every slot does one thinking step on its puzzle, then the weights are updated.

A thinking step is one forward pass of the network, from a puzzle and a latent state to an answer and a new
latent state (in LDT, the state is a board). A slot is one position of the global batch. The ranks divide the
slots among themselves. A slot keeps its puzzle for several training steps, until the slot halts.
models/halting.py has the rules of halting. Then the slot takes a new puzzle. `state.carry` contains the
puzzles and latent states of this rank's slots. The latent states are detached, so no gradient flows into an
earlier training step.

In some models, each puzzle identifier has a learned vector, its puzzle embedding. All other weights are
called dense weights.

`train_step` has ten parts. The comments in the code have the same numbers. An entry with a config key says
what is different with this key.

 1. Draw random numbers for each slot on the host, such as those of exploration (models/halting.py).
 2. The batch has one new puzzle for every slot. Each halted slot takes its new puzzle, with an initial latent
    state. The new puzzles of all other slots are not used.
    - arch=ldt with boards_per_slot > 1: A slot has several puzzles, called boards. First pick a board of
      every slot at random. The rest of the training step reads and changes only the picked boards.
 3. Determine the divisors of the loss. Most models divide the loss only by the number of slots of all ranks.
    - arch=ldt: One term of the loss has another divisor, a number of cells. With arch.balanced_conflict,
      another term depends on a number of boards (models/ldt_objective.py). Sum these numbers over ranks.
    - local_steps > 1: Each rank trains alone. It divides by its own numbers of slots, cells and boards.
    - puzzle_emb_sharding=rows: Each puzzle embedding is on one rank, or on the ranks of one tensor-parallel
      group. Before the divisors, fetch the embeddings of this rank's slots.
 4. Zero the gradients. Divide this rank's slots into `gradient_accumulation_steps` micro-batches. For each of
    them, run the thinking step, decide which slots halt, compute the loss, and run the backward pass.
    - arch.no_ACT_continue=false: The network is also trained to predict q_continue. The target comes from the
      next thinking step of the slot. arch.q_target=exact: Run that thinking step now, without gradient, for
      all slots. arch.q_target=deferred: Run it now only for slots that halt. Any other slot runs it in the
      next training step, which then adds the loss of this q_continue to its own loss (models/objective.py).
    - sync=flat: The last backward pass sends the gradients of the dense weights in groups (buckets), while it
      computes the next ones. With local_steps > 1, a pipeline or tensor parallelism, it sends none of them.
    - sync=ddp: torch's DistributedDataParallel does the same, and waits for the sums.
    - pipeline_parallel_degree: Each rank has some of the blocks. The activations of a slot pass through the
      ranks of a pipeline (distributed/pipeline.py).
    - tensor_parallel_degree: The ranks of a group have the same slots, and each rank has a part of each
      matrix of the blocks. Sum activations over the group (distributed/tensor.py).
    - torchrun --nnodes MIN:MAX: Ranks may have unequal numbers of slots and micro-batches. A rank without
      slots runs one empty micro-batch, because the other ranks wait for its messages.
 5. Store the puzzles and latent states in `state.carry`.
 6. Sum over ranks: the gradients, the loss, and the stop requests. The stop request of a rank is 1 if a
    signal has asked this rank to stop, and else 0.
    - sync=auto: If all ranks are CPU processes of one Linux node and can share memory, sum the gradients of
      the dense weights in shared memory. Otherwise, sync=auto means sync=flat, also with keys that shared
      memory does not support (`build_flats` in optimizers/weights.py).
    - sync=flat: Wait for the sums of the gradients that part 4 has sent. With a pipeline or tensor
      parallelism, part 4 has sent none, so send them here.
    - sync=ddp: Sum the rest: the loss, the stop requests and the gradients of puzzle embeddings.
    - sync_dtype=bfloat16: The gradients of the dense weights, the loss and the stop requests are rounded to
      bfloat16 before they are sent.
    - pipeline_parallel_degree: Sum the gradients of a block only over the ranks that have this block.
    - tensor_parallel_degree: Sum over the ranks that have the same part of the matrices, one of each group.
      The gradients need no sum within a group.
    - puzzle_emb_sharding=rows: Send the gradient of each puzzle embedding to the ranks that have it.
    - local_steps > 1: Sum nothing.
 7. Clip the gradients of the dense weights if `grad_clip_norm` is set. Update the dense weights with the
    optimizer. Update the puzzle embeddings that any slot of the batch uses, with sign SGD.
    - data_parallel_shard_degree: The weights are divided among ranks. Each rank has the optimizer state of
      its part, and updates only this part. If the blocks compute in bfloat16 (except with sync=ddp), and with
      a pipeline or tensor parallelism, only the weights of the blocks are divided. Each rank then updates
      all other weights. In shared memory, the weights are divided by default.
    - puzzle_emb_sharding=rows: Only the ranks that have a puzzle embedding update it.
    - pipeline_parallel_degree, tensor_parallel_degree: To get the norm of all gradients, sum squared norms
      over the ranks that have different weights.
    - local_steps > 1: Each rank clips and uses its own gradients.
    - train_only=puzzle_embeddings: The dense weights have no gradients, and do not change.
 8. Make the next forward pass use the updated weights. If the blocks compute in bfloat16, this rounds the
    weights of the blocks to bfloat16, except with sync=ddp.
    - data_parallel_shard_degree: Each rank then sends its part of the divided weights to the other ranks.
    - tensor_parallel_degree: Sum the stop requests over the ranks of a group, because part 6 does not.
    - local_steps=n > 1: In every n-th training step, and in the last one of the run, first merge: all ranks
      get common weights, by default the mean of their weights (`LocalSteps` in training/strategy.py). A
      puzzle embedding becomes the mean over the ranks that have changed it. A merge also computes three
      results over all ranks and all training steps since the previous merge: the mean loss, the mean gradient
      norm, and the sum of the stop requests. With sync_dtype=bfloat16, a merge rounds the numbers that it
      sends for these results and for the dense weights to bfloat16.
 9. If `ema` is set, update the moving averages of the dense weights. The average of a puzzle embedding is not
    updated here, but just before the embedding changes again (optimizers/puzzle_table_average.py).
    - local_steps > 1: Only a merge updates these averages, for all training steps since the previous merge.
10. Add the metrics of this rank to the sums for the next log row.

With a curriculum, the data (dataset/plan.py) and the settings of the thinking step (training/schedule.py)
change during the run. `PretrainConfig.mistakes` in config/schema.py and `check_layout` in training/layout.py
refuse keys that cannot be combined. The step does not check whether the loss is finite. `Monitor`
(training/monitor.py) does this later.
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
        The loss, the gradient norm before clipping, and the sum of the stop requests. This sum is positive if
        a signal has asked any rank to stop. All three are equal on all ranks. With local_steps > 1, all three
        are None in a step without a merge. The field `averaged_steps` is described at part 9 in `update`.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. New puzzles. `picked` contains the index of the picked board of each slot. It is None if slots have
    # only one. `active` contains the puzzle and the latent state of each slot for this thinking step.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # 3. Puzzle embeddings of other ranks, then divisors of the loss.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        local_divisors = network.objective.divisors(active)
        divisors = state.strategy.sum_divisors(local_divisors)  # adds the key "slots"
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. Store puzzles and latent states. If a slot has several boards, overwrite only the picked one.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. A log row sums these values over ranks. Each rank adds norm / ranks. The sum is the mean.
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
    divisors: Numbers by which terms of the loss are divided, such as {"slots": 768, "digit_cells": 5000.0}.
    rng: Random numbers of this rank's slots.
    is_asked_to_stop: Returns whether a signal has asked this rank to stop.
    """
    strategy, network = state.strategy, state.model.network
    strategy.start_step()  # zeroes the gradients
    # A rank without slots has one empty micro-batch. If the slots of an elastic rank do not divide evenly,
    # the number of micro-batches differs from the config. Example: 7 slots in 3 parts become 2, 2, 2 and 1.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # Numbers to sum over ranks with the gradients. They are added before the last backward pass, because it
    # may already send them.
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
            # `loss` is a sum over slots. A term with another divisor than the number of slots is already
            # multiplied by slots / divisor. So dividing by the number of slots is right for all terms.
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
    # 8. Make the next forward pass use the updated weights. With local_steps > 1, this may be a merge.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. `averaged_steps` are the steps to add to it: this step. With local_steps > 1, a merge
    # adds all steps since the previous merge, and other steps add nothing.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns the random numbers of one training step for this rank's slots.

    They do not depend on the number of ranks.
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
