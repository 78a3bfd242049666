"""One training step: each slot does one thinking step on its puzzle, then the weights are updated.

The ranks train on one batch of puzzles, the global batch. A slot is one position of this batch, and each rank
has some of the slots. A thinking step is one forward pass of the network, from a puzzle and a latent state to
an answer and a new latent state (in LDT, the state is a list of candidates for each cell). A slot usually
keeps its puzzle for several training steps, until it halts (models/halting.py). Then it takes a new puzzle.
`state.carry` contains the puzzles and latent states of this rank's slots.

In some models, each puzzle identifier has a learned vector, its puzzle embedding. All other weights are
called dense weights.

A training step has ten parts. The comments in the code have the same numbers.

 1. Draw the random numbers that must be drawn on the host. Example: the minimum number of thinking steps of
    each slot, for exploration. All others are drawn where they are needed.
 2. Put a new puzzle and its initial latent state into each slot that has halted.
 3. Determine the numbers by which the loss is divided: the number of slots of all ranks
    (`global_batch_size`), and the counts that `divisors` of the objective returns, summed over ranks.
 4. Zero the gradients. Divide this rank's slots into micro-batches. Their number is usually
    `gradient_accumulation_steps`. For each micro-batch, run the thinking step, decide which slots halt,
    compute the loss, and run the backward pass. A slot halts after `arch.halt_max_steps` thinking steps, or
    earlier if the network wants it and exploration allows it. In most models, the network wants it if its
    output q_halt is positive (models/halting.py has a table).
 5. Store the puzzles and the new latent states in `state.carry`. The latent states are detached, so no
    gradient flows into an earlier training step.
 6. Sum over ranks: the gradients, the loss, and the stop requests. The stop request of a rank is 1 if a
    signal such as Ctrl-C has asked this rank to stop. Otherwise, it is 0. No sum contains the same slots
    twice: if ranks have the same slots (tensor parallelism, see below), they take part in different sums.
 7. If `grad_clip_norm` is set, clip the gradients of the dense weights. The optimizer updates the dense
    weights. Sign SGD with weight decay updates the puzzle embeddings of the puzzles in the slots.
 8. If the forward pass reads copies of the updated weights, update the copies. For example, blocks that
    compute in bfloat16 read copies in bfloat16, except with sync=ddp.
 9. If `ema` is set, update the moving averages of the dense weights. (The average of a puzzle embedding is
    updated before the embedding changes, in part 7 or in a merge: `RowAverage` in optimizers/average.py.)
10. Add the metrics of this rank to the sums for the next log row.

The following config keys change some of these parts, which are named in parentheses.

- `sync` (4, 6): The method of summing the gradients of dense weights (distributed/sync.py):
  - `auto`: Shared memory in part 6, if all ranks are CPU processes of one Linux node, and if no other key
    prevents it (`build_flats` in optimizers/weights.py). Otherwise `flat`.
  - `flat`, `ddp`: The last backward pass in part 4 already sends the gradients. With a pipeline or tensor
    parallelism, part 6 sends them.
- `data_parallel_shard_degree` (7, 8): The number of ranks in a shard group. The ranks of a shard group divide
  the update of the dense weights, and exchange the updated weights in part 8 (ZeRO-1, distributed/flat.py).
  - 1: Every rank updates all of its weights. -1: The group is as large as possible. `auto`: -1 with sums in
    shared memory, otherwise 1.
  - With a pipeline or tensor parallelism, or if the blocks compute in bfloat16 and sync is not ddp: A shard
    group divides only the weights of the blocks. Every rank updates all other weights.
- `sync_dtype` (4, 6, 8): The dtype in which ranks send the gradients of the dense weights, the loss and the
  stop requests. With `local_steps`, the dtype in which a merge sends losses, norms, stop requests, and the
  changes of the dense weights.
- `local_steps=n` (3, 4, 6 to 9), if n > 1: Each rank trains alone. Parts 3 and 4 use only this rank's counts,
  such as its number of slots. Parts 4 and 6 send no gradients. Part 7 clips by the norm of this rank's
  gradients. After every n-th step, and after the last step of the run, part 8 merges:
  - By default, all ranks get the mean of their dense weights (`outer_lr` and `outer_momentum` change this,
    see `LocalSteps` in training/strategy.py). Each rank keeps its own optimizer state.
  - A puzzle embedding becomes the mean over the ranks that changed it.
  - The ranks exchange losses, norms and stop requests.

  Part 9 updates the averages of dense weights only after a merge.
- `puzzle_emb_sharding=rows` (3, 6, 7): Each puzzle embedding is stored on one rank (with tensor parallelism,
  on all ranks of one tensor group). Part 3 fetches the embeddings of the puzzles in the slots. Part 6 sends
  gradients to the ranks that store the embeddings (optimizers/puzzle_table.py).
- `train_only=puzzle_embeddings` (4, 6, 7): The dense weights have no gradients, and do not change.
- `pipeline_parallel_degree` (4, 6, 7): The ranks of a pipeline divide the blocks of the network. Each rank
  has its own slots, and in part 4 their activations pass through all ranks of the pipeline
  (distributed/pipeline.py).
- `tensor_parallel_degree` (4, 6 to 8): The number of ranks in a tensor group. These ranks have the same
  slots, and divide the weights of the blocks. In part 4, they sum activations in the forward pass and
  gradients of activations in the backward pass (distributed/tensor.py). Part 6 does not sum over a tensor
  group. But a signal may reach only one of its ranks, so part 8 sums the stop requests over the group.
- With a pipeline or tensor parallelism, part 6 sums the gradients of a block only over ranks with the same
  weights of this block (`Mesh.replicas`). Part 7 sums squared norms over the ranks that together have all
  blocks (`Mesh.holders`), so that every rank clips by the norm of the whole model.
- `arch.no_ACT_continue=false` (4), the default of HRM: The network learns another output, q_continue, that
  predicts whether the answer will be right after more thinking steps. The network wants a slot to halt if
  q_halt is greater than q_continue. The loss has a term for q_continue, whose target is computed from the
  outputs of the next thinking step. With `arch.q_target=exact`, part 4 runs this next step additionally,
  without gradient. With `deferred`, part 4 does so only for slots that halt. For any other slot, the next
  training step computes the target and adds the term to its own loss (models/objective.py).
- `arch.boards_per_slot` (2, 5), only LDT: If it is greater than 1, a slot has several puzzles, called boards.
  Each training step picks one board of each slot at random. Only this board changes, and only it can halt.
- `curriculum` (2, 4): The data (dataset/plan.py) and the settings of the thinking step (training/schedule.py)
  change during the run. Without a curriculum, the thinking step of LDT and Flow may still depend on the
  progress of the run.
- `activation_checkpointing=block` (4): The backward pass computes the activations of each block again.
- `optimizer=muon` (7): The ranks of a tensor group exchange parts of the updates.

With `torchrun --nnodes MIN:MAX`, ranks may have different numbers of slots, except with local steps or a
pipeline. A rank without slots runs one empty micro-batch, because the other ranks wait for its messages.

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
        batch: One new puzzle for each slot of this rank. If a slot (or its picked board) has not halted, its
            new puzzle is not used.
        config: Config of the run.
        rates: Learning rates of this step: "lr" of the dense weights, "puzzle_emb_lr" of the puzzle
            embeddings.
        clock: Measures the time of the parts 3, 6 and 8. Most of it is waiting for other ranks.
        reasoning: Settings of the thinking step, such as its noise. If None, those of the model.
        is_asked_to_stop: Returns whether a signal has asked this rank to stop. Called once.

    Returns:
        The mean loss of a slot, the gradient norm before clipping, the sum of the stop requests, and
        `averaged_steps`, the steps that the result covers (part 9 updates averages for them). The sum of the
        stop requests is positive if a signal asked any rank to stop before its last micro-batch. All values
        are equal on all ranks.
        With local_steps > 1, a step without a merge returns no loss, norm and sum (None), and an empty
        `averaged_steps`. After a merge, loss and norm are means over ranks and over the steps since the
        previous merge.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. New puzzles. `picked` is None, unless slots have several boards: then it is the index of the picked
    # board of each slot. `active` contains the puzzle and the latent state of each slot.
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
    # 10. Metrics. Each rank adds norm / number of ranks, because a log row sums over ranks and should contain
    # the mean norm. The norms of the ranks differ only with local_steps > 1.
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
    # A micro-batch has num_slots // gradient_accumulation_steps slots, but at least 1. With torchrun --nnodes
    # MIN:MAX, slots may be left over, and make further micro-batches. Example: if gradient_accumulation_steps
    # is 3, 7 slots become micro-batches of 2, 2, 2 and 1. A rank without slots has one empty micro-batch.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # Numbers to sum over ranks together with the gradients: the stop request, and the losses. Each is added
    # before the last backward pass, which may send them.
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
            # `loss` is a sum over slots. `backward` gets it divided by the number of slots. If a term has
            # another divisor d, `losses` multiplies the term by slots / d. So the result is term / d.
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

    First sums the gradients over ranks. With local_steps > 1, the gradients are not summed. Instead, the
    ranks merge their weights after every `local_steps` steps and after the last step of the run, and the
    averages change only after a merge.

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
    # 8. Update the copies of the weights that the next forward pass reads. With local_steps > 1, merge.
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. With local_steps=1, `averaged_steps` contains only this step. With local_steps > 1,
    # it contains all steps since the previous merge if this step has a merge. Otherwise it is empty.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns the random numbers of one training step for this rank's slots.

    A slot gets the same numbers with any number of ranks.
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
