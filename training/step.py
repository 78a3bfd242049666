"""One training step: one thinking step of every slot, then one update of the weights.

A slot is one position of the global batch, and works on one puzzle at a time. Each rank works on its own
slots. A thinking step is one forward pass of the network: it computes a new state and an answer for each
slot. A slot works on its puzzle for several training steps, until it halts. Each of these steps continues
from the state of the previous one. Between training steps, `state.carry` holds puzzles and states. The
states are detached, so no gradient flows from a training step into an earlier one.

`train_step` does the following, in this order. The comments in the code have the same numbers. "Dense
weights" are all weights except the puzzle embeddings.

1. Sample the random numbers that the host draws for this step, such as which slots explore. An exploring
   slot samples a minimum number of thinking steps. If it has made fewer on its puzzle, it does not halt in
   this training step. The next training step samples again. Noise and dropout are drawn later, on the
   device.
2. Give new puzzles to the slots that have halted. At the start of a run, these are all slots. Slot i takes
   puzzle i of the batch, and an initial state. If slot i has not halted, it keeps its puzzle and state, and
   puzzle i of the batch is discarded.
3. Compute the divisors of the loss. The loss is divided by the number of slots of the global batch. LDT
   divides some terms by other counts. With a sharded puzzle table, fetch the embeddings of the puzzles in
   the slots.
4. Run all micro-batches. For each one: run the thinking step, decide which slots halt, compute the loss, and
   run the backward pass. A slot halts after `halt_max_steps` thinking steps, or earlier by the rules in
   models/halting.py. The gradients of the micro-batches add up. Before the last backward pass, this rank
   writes two scalars to the buffer that step 6 sums: its loss, and its stop request: 1 if a signal has asked
   it to stop, else 0.
5. Store the new carry.
6. Sum over ranks: the gradients of the dense weights, the gradients of the puzzle embeddings, and the
   scalars.
7. If `grad_clip_norm` is set, clip the gradients of the dense weights by their norm. Update the dense
   weights with the optimizer. If `ema` is set, add the old value of each embedding that is about to change
   to its moving average, once for each step since its last change. Then update the embeddings of the puzzles
   in the slots with sign SGD. So embeddings that do not change cost no work.
8. With a bfloat16 forward pass, the weights of the blocks exist twice: in float32 for the optimizer, in
   bfloat16 for the forward pass. Copy the first to the second. With a float32 forward pass, this step does
   nothing.
9. If `ema` is set, update the moving averages of the dense weights.
10. Add the metrics of this rank to the sums for the next log row.

With one process, nothing is sent. A step with a loss or gradient norm that is not finite changes the weights
like any other step. `Monitor` in training/monitor.py then ends the run, before the next log row, checkpoint
or evaluation.

Config keys select modes of a step. Each entry says what a mode changes in steps 1 to 10.

How gradients are summed
- sync=auto: On the CPUs of one Linux node, step 6 adds the gradients of all ranks in shared memory
  (SharedMemorySync in distributed/sync.py). The optimizer is then sharded over all ranks, unless
  `data_parallel_shard_degree` is 1. sync=auto is sync=flat on GPUs, on several nodes, and with any of these:
  a pipeline, tensor parallelism, local steps, sync_dtype=bfloat16, train_only=puzzle_embeddings, an
  optimizer that is sharded over some of the ranks.
- sync=flat: During the last backward pass of step 4, the gradients of the dense weights and the scalars are
  sent in buckets. Step 6 waits for the sums (FlatSync), and sends the gradients of the puzzle embeddings.
  With a pipeline or tensor parallelism, step 6 sends all gradients. With train_only=puzzle_embeddings, only
  gradients of puzzle embeddings and scalars exist, and step 6 sends them.
- sync=ddp: torch's DistributedDataParallel sums the gradients of the dense weights in the last backward pass
  of step 4. Step 6 sums the scalars, and the gradients of the puzzle embeddings, in other messages
  (DDPSync). All weights are float32, also with a bfloat16 forward pass, so step 8 copies nothing.
- sync_dtype=bfloat16: The gradients of the dense weights and the scalars are sent in bfloat16. The gradients
  of puzzle embeddings are always sent in float32.
- local_steps > 1: Each rank trains by itself. The loss is divided by the number of slots of the rank. Steps
  3 and 6 send nothing. Every `local_steps` training steps, and after the last step of the run, step 8 merges
  the weights: it replaces them on all ranks by their mean over the ranks. With `outer_lr` and
  `outer_momentum`, the new weights are those of the previous merge, moved towards the mean by SGD with this
  learning rate and momentum. A puzzle embedding becomes its mean over the ranks that changed it. A merge
  also sums the scalars of all steps since the previous merge. Step 9 runs only after a merge. It adds the
  merged weights to the average once for each training step since the previous merge (LocalSteps in
  training/strategy.py).

How weights are distributed
- data_parallel_shard_degree: The optimizer is sharded (ZeRO-1): this number of ranks divide the weights
  among them. In step 7, each rank updates only its shard. Step 8 copies the shard, then all-gathers the
  copies. With a bfloat16 forward pass, only the weights of the blocks are divided, and every rank updates
  all other dense weights. With a float32 forward pass, all dense weights are divided (distributed/flat.py).
- pipeline_parallel_degree: Each rank has some of the blocks. In step 4, the activations of the slots pass
  through the blocks of all ranks of a pipeline, forward and backward. Step 4 sends no gradients of weights,
  step 6 sends all of them (distributed/pipeline.py). For the gradient norm, step 7 adds the squares of all
  ranks.
- tensor_parallel_degree: Several ranks work on the same slots. Each of them has a part of every matrix in
  the blocks. In step 4, they sum activations in the forward pass, and the gradients of these in the backward
  pass. Step 4 sends no gradients of weights, step 6 sends all of them (distributed/tensor.py). For the
  gradient norm, step 7 adds the squares of all ranks. Muon needs full matrices: in step 7, one rank gathers
  each matrix, computes its update, and sends the parts back.
- puzzle_emb_sharding=rows: Each puzzle embedding is on one rank, its owner. Step 3 fetches embeddings from
  the owners, and step 6 sends the gradients to the owners (optimizers/puzzle_table.py).

What is computed
- train_only=puzzle_embeddings: The dense weights have no gradient, and do not change.
- arch.no_ACT_continue=false (the default of HRM): The Q head also outputs q_continue, the value of one more
  thinking step, and the loss has a term for it. The target of this term needs the result of that thinking
  step. With arch.q_target=exact, step 4 runs it for all slots, without gradient. With
  arch.q_target=deferred, step 4 runs it only for slots that halt. A slot that continues makes that thinking
  step in the next training step. The next training step then computes the term. For its gradient, it applies
  the Q head again to the old state (models/objective.py).
- arch=ldt: A slot may hold several puzzles, called boards (`boards_per_slot`). A training step works on one
  of them, picked before step 2, and the others wait. Each board halts by itself. The divisors of LDT depend
  on the data. Step 3 sums them over ranks (models/ldt_objective.py).
- init_noise changes initial states in step 2. In step 4, step_noise changes the state before the thinking
  step, state_noise and damping change each new state, and dropout changes activations (models/noise.py).
- gradient_accumulation_steps: Step 4 splits the slots of a rank into this number of micro-batches. All of
  them have the same divisors. Only the last backward pass may send gradients. If ranks of an elastic run
  have unequal numbers of slots, a rank may have more or fewer micro-batches.
- activation_checkpointing=block: The backward pass computes the activations of each block again.
- compile: torch compiles the blocks, and the update of AdamATan2.
- curriculum: A run has stages. Each stage has its own training data, and its own number of cycles: how often
  a thinking step runs the blocks (training/schedule.py).
- torchrun --nnodes MIN:MAX (elastic): The number of ranks may change between launches. A rank may have no
  slot. It then runs one empty micro-batch.

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
        The loss, the gradient norm, the number of stop requests, and the training steps to add to the moving
        average now. They are equal on all ranks. With local steps and without a merge, the first three are
        None, and there is no training step to add.
    """
    state.step += 1
    network = state.model.network
    if reasoning is None:
        reasoning = state.model.reasoning
    # 1. Random numbers.
    rng = sample_rng(state, config, reasoning)
    # 2. New puzzles. If slots hold several boards (LDT), `picked` is the index of the board that each slot
    # works on in this step. Otherwise, it is None, and `boards(None)` is the whole carry.
    picked = network.pick_boards(rng)
    active = state.model.refill(state.carry.boards(picked), batch, reasoning, rng)
    # 3. Divisors and puzzle embeddings. Only arch=ldt and a sharded puzzle table send something here.
    with clock.measure("sync"):
        state.table.prepare(active.data.puzzle_identifiers)
        local_divisors = network.objective.divisors(active)
        divisors = state.strategy.sum_divisors(local_divisors)  # also has "slots": the number of slots
    # 4. Forward and backward passes.
    after, sums = forward_and_backward(state, active, config, divisors, reasoning, rng, is_asked_to_stop)
    # 5. The carry. With `picked`, the picked boards are replaced in place. Otherwise, the result is `after`.
    state.carry = state.carry.with_boards_(picked, after)
    # 6 to 9. Update the weights.
    grad_norm, result = update(state, config, rates, clock)
    # 10. Metrics. A log row has their sums over ranks. For the gradient norm, it shall have the mean over
    # ranks. Each rank therefore adds its norm divided by the number of ranks.
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
    """Runs all micro-batches of this rank. Returns the new carry and the metric sums.

    The gradients of the micro-batches add up in the gradient buffers. `losses` of the objective returns the
    sum of the losses of the slots. This function divides it by divisors["slots"], the number of slots in the
    global batch (with local steps, of this rank). `losses` itself uses only the other divisors.
    """
    strategy, network = state.strategy, state.model.network
    strategy.start_step()  # zeroes the gradients
    # Each micro-batch has `size` slots. The last one may have fewer. A rank without slots has one empty
    # slice, because the other ranks wait for its messages.
    num_slots = len(state.slots)
    size = max(1, num_slots // config.gradient_accumulation_steps)
    micro_batches = [slice(start, start + size) for start in range(0, max(1, num_slots), size)]
    # Add the scalars (loss and stop request) before the last backward pass, because with sync=flat this pass
    # sends them together with the gradients. The loss among the scalars is the sum over slots.
    # Step 6 sums it over ranks, and step 8 divides it by the number of slots.
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
    # 8. Copy the new weights to those that the forward pass reads. With local steps, first merge the weights
    # of all ranks, if a merge is due. The result has the mean loss over the global batch (with local steps,
    # also over the steps since the previous merge; None if no merge was due).
    with clock.measure("sync"):
        result = state.strategy.synchronize(grad_norm, step=state.step)
    # 9. Moving average. Without local steps, `averaged_steps` is this step. With local steps, it is empty if
    # no merge was due. Otherwise, it has all steps since the previous merge.
    state.average.update(result.averaged_steps)
    return grad_norm, result


def sample_rng(state: TrainState, config: PretrainConfig, reasoning: Reasoning) -> SlotRng:
    """Returns the source of the random numbers of one training step for this rank's slots.

    The numbers depend on the seed, the step and the slot, but not on the number of ranks.
    `Network.sample_randomness` samples arrays for the global batch on the host, such as {"min_steps": int32
    [global_batch_size]}. Each rank copies the entries of its slots to the device. All other random numbers,
    such as noise, are drawn later on the device.
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
