"""One training step: every slot does one thinking step on its puzzle, then the weights are updated.

A thinking step is one forward pass of the network, from a puzzle and a latent state to an answer and a new
latent state. A slot is one position of the global batch. The ranks divide the slots among themselves. A slot
keeps its puzzle for several training steps, until the slot halts (models/halting.py). Then it takes a new
puzzle. `state.carry` contains the puzzles and latent states of this rank's slots. The latent states are
detached, so no gradient flows into an earlier training step.

A puzzle embedding is a learned vector of a puzzle identifier. Some models have none. All other weights are
called dense weights.

`train_step` has ten parts. The comments in the code have the same numbers.

 1. Draw random numbers for each slot on the host, if the model needs some.
 2. Each halted slot takes its new puzzle of the batch, with an initial latent state. The batch has one new
    puzzle for every slot. Slots that have not halted ignore theirs.
 3. Fetch the slots' puzzle embeddings if they are on other ranks. Determine the divisors of the loss. Most
    models divide it only by the number of slots of the global batch.
 4. Zero the gradients. For each micro-batch, run the thinking step, decide which slots halt, compute the
    loss, and run the backward pass.
 5. Store the puzzles and latent states in `state.carry`.
 6. Sum over ranks: the gradients, the loss, and the stop requests. The stop request of a rank is 1 if a
    signal has asked this rank to stop, and else 0.
 7. Clip the gradients of the dense weights if `grad_clip_norm` is set. Update the dense weights with the
    optimizer. Update the puzzle embeddings that any slot of the batch uses, with sign SGD.
 8. Pass the updated weights to the forward pass. If the blocks compute in bfloat16, this copies them to
    bfloat16 weights.
 9. If `ema` is set, update the moving averages of the dense weights. The average of a puzzle embedding is
    updated only before the embedding changes again, in part 7 or 8 of a later training step
    (optimizers/puzzle_table_average.py).
10. Add the metrics of this rank to the sums for the next log row.

The step does not check whether the loss is finite. `Monitor` (training/monitor.py) does this later.

The following config keys change these parts. `PretrainConfig.mistakes` in config/schema.py and `check_layout`
in training/layout.py refuse keys that cannot be combined.

How gradients are summed (distributed/sync.py, training/strategy.py)
- sync=flat: The last backward pass in part 4 already sends the gradients of the dense weights. With pipelines
  or tensor parallelism, part 6 sends them.
- sync=ddp: torch's DistributedDataParallel sums the gradients of the dense weights in the last backward pass.
  The dense weights have no bfloat16 copies.
- sync=auto: If the ranks are CPU processes of one Linux node, part 6 sums the gradients of the dense weights
  in shared memory. The optimizer state is then sharded by default. Otherwise, this is sync=flat. It is also
  sync=flat with other keys for which shared memory has no code (`build_flats` in optimizers/weights.py).
- sync_dtype=bfloat16: The gradients of the dense weights, the loss and the stop requests are sent in
  bfloat16.
- local_steps=n > 1: Each rank trains alone, as if its slots were the global batch. Parts 3, 4 and 6 sum
  nothing over ranks, and each rank clips its own gradients. Every n-th training step, and the last one of the
  run, is a merge: part 8 gives all ranks common weights, by default the mean of their weights (`LocalSteps`).
  A puzzle embedding becomes the mean over the ranks that have changed it. Part 8 of a merge also computes the
  mean loss and the mean gradient norm, and sums the stop requests, over ranks and over the n training steps.
  Part 9 updates the averages only in a merge.

How weights are distributed
- data_parallel_shard_degree: Each rank has the optimizer state of some weights, and updates these weights in
  part 7. Part 8 gathers the updated weights (distributed/flat.py).
- pipeline_parallel_degree: Each rank has some of the blocks. In part 4, the activations of a slot pass
  through the ranks of a pipeline (distributed/pipeline.py). Part 6 sums the gradients of a block over the
  ranks that have it.
- tensor_parallel_degree: The ranks of a group have the same slots, and each rank has a part of each matrix of
  the blocks. Part 4 sums activations over the group (distributed/tensor.py). Part 6 sums over ranks of
  different groups, so part 8 sums the stop requests over the ranks of the group.
- puzzle_emb_sharding=rows: Each puzzle embedding is on one rank, or on all ranks of one tensor-parallel
  group. Part 6 sends its gradient there, and part 7 updates it there (optimizers/puzzle_table.py).

What is computed
- train_only=puzzle_embeddings: The dense weights have no gradients, and do not change.
- arch.no_ACT_continue=false: The model also has the output q_continue. A slot halts if q_halt is greater than
  q_continue. The training target of q_continue comes from the next thinking step of the slot. With
  arch.q_target=exact, part 4 runs this thinking step for all slots without gradient, and discards its latent
  state. With arch.q_target=deferred, part 4 does so only for slots that halt. For a slot that does not halt,
  the next training step runs this thinking step anyway. The loss of that training step then contains the
  q_continue loss of this one (models/objective.py).
- arch=ldt: A slot has `boards_per_slot` puzzles, called boards. If there are several, part 2 first picks one
  of them at random. This training step changes only the picked boards. Part 3 counts two more divisors of
  the loss, and sums them over ranks (models/ldt.py).
- gradient_accumulation_steps: Part 4 divides this rank's slots into micro-batches. It sends no gradients
  before the last one.
- curriculum: Data and settings of the thinking step change during the run (training/schedule.py).
- torchrun --nnodes MIN:MAX (elastic): Ranks may have unequal numbers of slots. A rank without slots runs one
  empty micro-batch, because the other ranks wait for its messages.
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
        The loss, the gradient norm before clipping, and the sum of the stop requests. It is positive if a
        signal has asked any rank to stop. They are equal on all ranks. With local_steps > 1, they are None in
        all steps that are no merge.
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
        divisors = state.strategy.sum_divisors(local_divisors)  # also has "slots": those of all ranks
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. Store puzzles and latent states. If a slot has several boards, overwrite only the picked one.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. A log row sums these values over ranks. So the row contains the mean of the norms. They are
    # equal on all ranks, except with local steps.
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
    # A rank without slots has one empty micro-batch. If the micro-batches cannot have equal sizes, as on an
    # elastic rank, there may be more of them than `gradient_accumulation_steps`.
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
            # `loss` is a sum over slots. `backward` below gets it divided by the slots of all ranks. If a
            # term has another divisor, `losses` has multiplied it by slots / divisor.
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
    # 8. Pass the weights to the forward pass. With local_steps > 1, first make them common, if this is due.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. `averaged_steps` contains this step. With local_steps > 1, it contains all steps
    # since the last merge if this step is a merge, and else no step.
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
