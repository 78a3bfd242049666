"""One training step: each slot does one thinking step on its puzzle, then the weights are updated.

Words of this file:

- Global batch: the puzzles on which all ranks train now. A slot is one position of the global batch. Each
  rank has some of the slots. `state.carry` contains the puzzles and latent states of this rank's slots.
- Thinking step: one forward pass of the network, from a puzzle and a latent state to an answer and a new
  latent state. A slot keeps its puzzle until the slot halts, usually for several training steps. The training
  step after that puts a new puzzle into the slot.
- Puzzle embedding: the vector that some models learn for each puzzle identifier. `state.table` contains the
  puzzle embeddings. All other weights are dense weights (`state.weights`).
- Stop request: 1 if a signal such as Ctrl-C has asked this rank to stop, otherwise 0.

A training step has ten parts. The comments in the code use their numbers. This list describes the usual case:
every rank has all weights, and no other rank has the same slots.

 1. Random numbers: Draw some on the CPU. In most models, this is a minimum number of thinking steps for each
    slot, drawn again in every training step (exploration). Others, such as noise, are drawn on the device
    when they are needed.
 2. New puzzles: Put a new puzzle and its initial latent state into each slot that has halted.
 3. Divisors: Determine the numbers by which the loss is divided. One is the size of the global batch, a
    constant. Of our models, only LDT has others, such as the number of cells that count in one of its losses.
    They are counted on each rank, and summed over ranks.
 4. Forward and backward passes: Zero the gradients. Divide this rank's slots into micro-batches (config key
    `gradient_accumulation_steps`). For each micro-batch, run the thinking step, decide which slots halt,
    compute the loss, and run the backward pass.
 5. Carry: Store the puzzles and the new latent states in `state.carry`. The network returns detached states,
    so no gradient flows into an earlier training step.
 6. Sums: Sum the gradients, the loss and the stop requests over ranks.
 7. Update: Compute the norm of the gradients of the dense weights. If `grad_clip_norm` is set, clip these
    gradients. The optimizer updates the dense weights. Sign SGD with weight decay updates the puzzle
    embeddings of the puzzles in the slots of all ranks. If `ema` is set, the average of an embedding is
    updated before the embedding changes (`RowAverage` in optimizers/average.py).
 8. Synchronization: Make the next forward pass read the updated weights. If the blocks of the network compute
    in bfloat16, copy their float32 weights to bfloat16. (With sync=ddp, there is no copy. Each layer casts
    its weights in the forward pass.)
 9. Moving averages: If `ema` is set, update the averages of the dense weights.
10. Metrics: Add the metrics of this rank to the sums for the next log row.

Several keys change which ranks have which weights or slots, or which ranks communicate:

- Shard groups (`data_parallel_shard_degree`): The ranks of a shard group divide the update of the dense
  weights (ZeRO-1, distributed/flat.py). N: groups of N ranks. -1: one group of all ranks with the same
  weights. auto: -1 if gradients are summed in shared memory (see part 6), and otherwise 1.
- Pipeline (`pipeline_parallel_degree`): The ranks of a pipeline divide the blocks of the network. A forward
  pass sends the activations of each rank's slots through all ranks of its pipeline.
- Tensor group (`tensor_parallel_degree`): The ranks of a tensor group divide the weights of each block. They
  all have the same slots.
- Divided embeddings (`puzzle_emb_sharding=rows`): Each puzzle embedding is stored on one rank, or on all
  ranks of one tensor group (optimizers/puzzle_table.py).
- Local steps (`local_steps=n`, n > 1): Each rank trains alone. After every n-th step, and after the last step
  of the run, the ranks merge their weights (`LocalSteps` in training/strategy.py). The four settings above
  must then have their defaults.

These and other settings change the parts as follows.

Part 2:
- `curriculum`: The training data may change during the run (dataset/plan.py).
- `arch.boards_per_slot` > 1 (only LDT): A slot has several puzzles, called boards. Each training step picks
  one board of each slot at random. The parts 2 to 5 use only this board. The other boards do not change.

Part 3:
- Divided embeddings: First fetch the embeddings of the puzzles in this rank's slots from other ranks.
- Local steps: The divisors are the number of this rank's slots, and this rank's counts. Nothing is sent.

Part 4:
- Halting: A slot halts after `arch.halt_max_steps` thinking steps. It halts earlier if the network wants to
  halt, and the slot has made its minimum number of thinking steps. In most models, the network wants to halt
  if its output q_halt is positive (models/halting.py has a table of all models).
- `arch.no_ACT_continue=false`, the default of HRM: The loss has a term for the output q_continue, which
  predicts whether the answer will be right after more thinking steps. The target of this term comes from one
  more thinking step, so part 4 also runs that step, without gradient. With `arch.q_target=deferred`, it does
  so only for slots that halt, and the next training step adds the term of the other slots
  (models/objective.py).
- `curriculum`: The settings of the thinking step may change during the run (training/schedule.py). In LDT and
  Flow, they may change without a curriculum too.
- `train_only=puzzle_embeddings`: The dense weights have no gradients. In part 7, they do not change.
- `activation_checkpointing=block`: The backward pass computes the activations of each block again.
- Pipeline: Ranks exchange activations and their gradients (distributed/pipeline.py).
- Tensor group: Ranks sum activations in the forward pass, and gradients of activations in the backward pass
  (distributed/tensor.py).
- `torchrun --nnodes MIN:MAX`: Ranks may have different numbers of slots, except with local steps or a
  pipeline. A rank without slots runs one empty micro-batch, so that it takes part in all sums.

Part 6:
- `sync`: The method for the gradients of dense weights, the loss and the stop requests (distributed/sync.py).
  - `auto`: A sum in shared memory, if all ranks are CPU processes of one Linux node, and if no other key
    prevents it (`build_flats` in optimizers/weights.py). Otherwise as with `flat`.
  - `flat`: Messages in the dtype `sync_dtype`. The last backward pass of part 4 already starts them, except
    with a pipeline or a tensor group. Part 6 starts the rest, and waits for all.
  - `ddp`: The last backward pass of part 4 sums the gradients (torch's DistributedDataParallel). Part 6 sums
    the loss and the stop requests. Not possible with a pipeline or a tensor group.
- Puzzle embeddings: Each rank collects the gradients of the embeddings of all slots, and sums those with the
  same puzzle identifier. With divided embeddings, it collects only those of the embeddings that it stores.
- Pipeline, tensor group: Sum the gradients of a block only over the ranks with the same weights of this block
  (`Mesh.replicas`). Sum all other values over ranks with different slots (`Mesh.data`), so that each slot
  counts once.
- Local steps: Sum nothing.

Part 7:
- Shard groups: A rank has the sums of part 6 for all of its weights, but updates only a part of them. If the
  blocks compute in bfloat16 (without sync=ddp), or with a pipeline or a tensor group, the ranks divide only
  the weights of the blocks, and every rank updates the weights outside of the blocks.
- Pipeline, tensor group: Sum the squared norms of the blocks over the ranks that together have all blocks
  (`Mesh.holders`), so that every rank clips by the norm of the whole model.
- Tensor group with `optimizer=muon`: The ranks exchange parts of the updates.
- Divided embeddings: Each rank updates only the embeddings that it stores.
- Local steps: Each rank uses its own gradients and their norm. It updates only the embeddings of the puzzles
  in its own slots.

Part 8:
- Shard groups: Exchange the updated weights.
- Tensor group: Sum the stop requests over the group, because a signal may reach only one of its ranks.
- Local steps: If a merge is due, merge:
  - With the default `outer_lr` and `outer_momentum`, all ranks get the mean of their dense weights. They send
    the changes since the last merge, in the dtype `sync_dtype`. Each rank keeps its own optimizer state.
  - Each puzzle embedding that has changed since the last merge becomes the mean over the ranks that changed
    it.
  - The ranks sum their losses, gradient norms and stop requests since the last merge.

Part 9:
- Local steps: Update the averages of the dense weights only after a merge.

`PretrainConfig.mistakes` in config/schema.py refuses keys that cannot be combined. `check_layout` in
training/layout.py refuses numbers of processes and slots that do not fit. The step does not check whether the
loss is finite. `Monitor` (training/monitor.py) does this.
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
    new_puzzles: Batch,
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
        new_puzzles: One new puzzle for each slot of this rank. Only halted slots take their new puzzle. The
            others are not used. (In LDT, only slots whose picked board has halted take it.)
        config: Config of the run.
        rates: Learning rates of this step: "lr" of the dense weights, "puzzle_emb_lr" of the puzzle
            embeddings.
        clock: Measures the time of the parts 3, 6 and 8. Waits for other ranks in the parts 4 and 7 count as
            computing.
        reasoning: Settings of the thinking step, such as its noise. If None, those of the model.
        is_asked_to_stop: Returns whether a signal has asked this rank to stop. Called once.

    Returns:
        The mean loss of a slot, the gradient norm before clipping, the sum of the stop requests, and the
        training steps that these values cover (`StepResult`). The result is equal on all ranks. With
        local_steps > 1, in a step without a merge, the steps are empty, and the values are None.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. New puzzles. If slots have several boards, `picked` is the index of the picked board of each slot.
    # Otherwise, it is None, and `boards` returns the carry itself. `active` contains the puzzle and the
    # latent state of each slot.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), new_puzzles, reasoning, rng)
    # 3. Fetch puzzle embeddings (only if ranks divide them). Then determine the divisors of the loss.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        local_divisors = network.objective.divisors(active)
        divisors = state.strategy.sum_divisors(local_divisors)  # adds the key "slots"
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. Store puzzles and latent states. If slots have several boards, overwrite only the picked ones.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. They will be summed over ranks. Each rank adds norm / number of ranks, so the sum is the
    # mean norm. (The norms of the ranks differ only with local_steps > 1.)
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
    # With torchrun --nnodes MIN:MAX, gradient_accumulation_steps need not divide the number of slots. For
    # example, if gradient_accumulation_steps is 3, 7 slots become micro-batches of 2, 2, 2 and 1. A rank
    # without slots has one empty micro-batch.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # `scalars` is for the result of `train_step`, and `sums` is for the next log row. Both contain the loss.
    # `scalars` gets the loss before the backward pass, because the last backward pass may already send it.
    scalars = state.weights.scalars
    carries: list[Carry] = []
    sums: Sums = {}
    for part in micro_batches:
        before, local_rng = active.select(part), rng[part]
        is_last = part is micro_batches[-1]
        if is_last:
            scalars.add(stop=int(is_asked_to_stop()))
        with strategy.micro_batch(is_last=is_last):  # only the last backward pass may send gradients
            # `strategy.model` is `state.model`, or the DistributedDataParallel that wraps it.
            output = strategy.model(before, reasoning, local_rng)
            # `loss` is a sum over slots, and `backward` gets loss / slots. If a term of the loss has another
            # divisor d, `losses` returns term * slots / d, so that `backward` gets term / d.
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
    """Updates the weights and the moving averages.

    With local_steps=1, first completes the sums of the gradients over ranks. With local_steps > 1, merges the
    weights of the ranks if a merge is due, and updates the averages of the dense weights only then.

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
    # 8. Make the next forward pass read the updated weights. With local_steps > 1, merge if a merge is due.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. The range `result.steps` contains only this step. With local_steps > 1, it contains
    # all steps since the previous merge, or none if this step has no merge. Then this call does nothing.
    state.average.update(result.steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns the random numbers of one training step for this rank's slots.

    A slot gets the same numbers with any number of ranks.
    """
    # The CPU of each rank draws the numbers for the global batch. The rank copies those of its slots to the
    # device.
    slots, device = state.slots, state.carry.steps.device
    arrays = state.model.network.sample_randomness(
        seed=config.seed, step=state.step, batch_size=config.global_batch_size, reasoning=reasoning
    )
    local_arrays = {}
    for name, array in arrays.items():
        local = torch.from_numpy(array[slots.start : slots.stop])
        if device.type == "cuda":
            local = local.pin_memory()  # non_blocking needs pinned memory
        local_arrays[name] = local.to(device, non_blocking=True)
    return SlotRng.of_training(config.seed, step=state.step, slots=slots, device=device, **local_arrays)
