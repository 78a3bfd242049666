"""Runs thinking steps on all puzzles of an evaluation, until each puzzle has its final answer.

With halting=max, all puzzles make the same number of thinking steps. With halting=act, a puzzle may halt
earlier. The next puzzle then takes its slot, so the time depends on the mean number of thinking steps, not on
the maximum. The answer to a puzzle does not depend on the other puzzles of the batch.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dataset.loader import Batch
from distributed.collectives import ALONE, Ranks
from models import HaltingModel
from models.carry import Carry, Reasoning, StepOutput, select_columns
from models.compilation import eager_blocks
from models.random import SlotRng

Draw = Callable[[Carry], SlotRng | None]  # returns the random numbers of the slots' next step
OnStep = Callable[[StepOutput, Tensor], None]  # (output, bool [slots]: True at the first wish to halt)

# What a rank of a pipeline needs next. All ranks do what the largest of these numbers says, because they must
# make the same calls of the network.
_NOTHING, _STEP, _BATCH = 0, 1, 2


class Race:
    """Finds, for each puzzle, the sample that halts first.

    The samples of a puzzle are answers of the same model with different random numbers. A sample that can no
    longer be the first to halt can be stopped. If two samples halt after the same number of thinking steps,
    the one with the lower index is first.

    samples: Numbers of samples, ascending. For each number n, the first n samples of a puzzle race against
    each other. A sample is stopped if it has lost the smallest race that it takes part in. Example: With
    (1, 4), sample 0 is alone in the first race, so it is never stopped. Samples 1 to 3 may be stopped.
    """

    def __init__(self, samples: Sequence[int]):
        self._samples = tuple(samples)
        self._first: dict[tuple[int, int], tuple[int, int]] = {}  # (row, samples): (step, sample)

    def record(self, carry: Carry, wants_to_halt: Tensor) -> None:
        """Stores which samples want to halt after a thinking step.

        carry: State of the batch after the step. Here, `carry.data.rows`, int64 [batch], contains puzzle
        index * S + sample index, where S is the number of samples of each puzzle.
        wants_to_halt: Whether the model wants to halt, bool [batch].
        """
        slots = (wants_to_halt & carry.data.is_real).nonzero().flatten()
        for attempt, step in zip(carry.data.rows[slots].tolist(), carry.steps[slots].tolist(), strict=True):
            row, sample = divmod(attempt, self._samples[-1])
            for num_samples in (count for count in self._samples if sample < count):
                first = self._first.get((row, num_samples), (step, sample))
                self._first[row, num_samples] = min(first, (step, sample))

    def is_lost(self, attempts: Tensor, steps: Tensor) -> Tensor:
        """Returns which samples can no longer be the first to halt: bool [n].

        attempts: Puzzle index * S + sample index, int [n]. S is the number of samples of each puzzle.
        steps: Number of thinking steps that each sample has made, int [n].
        """
        lost = []
        for attempt, step in zip(attempts.tolist(), steps.tolist(), strict=True):
            row, sample = divmod(attempt, self._samples[-1])
            first = self._first.get((row, next(count for count in self._samples if sample < count)))
            lost.append(first is not None and (step + 1, sample) > first)
        return torch.tensor(lost, dtype=torch.bool, device=attempts.device)


def answer_batches(
    model: HaltingModel,
    batches: Iterator[Batch],
    reasoning: Reasoning,
    *,
    draw: Draw,
    on_step: OnStep,
    race: Race | None = None,
    stages: Ranks = ALONE,
) -> Iterator[StepOutput]:
    """Runs the model on all examples, and yields its last output for each example.

    With `reasoning.halting="max"`, all examples make the same number of thinking steps, and there is one
    output for each batch. With "act", an output contains the examples that ended in the same step. A sample
    that ends because of `race` before its first step has no output.

    draw: `draw(carry)` returns the random numbers of the next step, or None if nothing is random.
    on_step: `on_step(output, halts)` is called after every step. `halts`, bool [batch], is True once for each
    example: after the first step at which the model wants to halt, otherwise after its last step.
    race: Decides which samples of a puzzle end because another sample has halted first. If None, no sample
    ends for this reason. With halting="max", it has no effect.
    stages: Ranks that hold the pipeline stages of the model. All of them call this function.
    """

    def begin(batch: Batch) -> Carry:
        blank = model.initial_carry(batch)
        return model.refill(blank, batch, reasoning, draw(blank))

    def step(carry: Carry) -> StepOutput:
        return model(carry, reasoning, draw(carry))

    if reasoning.halting == "max":
        for batch in batches:
            carry = begin(batch)
            has_acted = torch.zeros_like(carry.halted)
            for _ in range(reasoning.max_steps):
                output = step(carry)
                carry = output.carry
                # A slot that never wants to halt counts as halting after its last step.
                wants_to = model.network.wants_to_halt(carry.state, output.prediction) | carry.halted
                on_step(output, wants_to & ~has_acted)
                has_acted |= wants_to
            yield output
        return

    # If a puzzle halts, the next puzzle takes its slot. At the end of the data, the batch becomes smaller,
    # and runs without compiled blocks.
    running, waiting = None, None  # the carry of the slots at work; examples that wait for a slot
    num_slots, has_more, device = 0, True, next(model.parameters()).device
    while True:
        # Decide whether to read a batch, to run a thinking step, or to end. All ranks of a pipeline do the
        # same, because they must make the same calls of the network. A rank without work runs padding.
        num_running = 0 if running is None else len(running.steps)
        num_rows = num_running + (0 if waiting is None else len(waiting.rows))
        needs_batch = has_more and (waiting is None or num_rows < num_slots)
        need = _BATCH if needs_batch else _STEP if num_rows else _NOTHING
        needs = stages.all_gather_counts(need, device=device)
        if max(needs) == _NOTHING:
            return
        # Read a batch. Its examples wait. `idle` has the same shape, but contains only padding.
        if max(needs) == _BATCH:
            if has_more := (batch := next(batches, None)) is not None:
                num_slots = max(num_slots, len(batch.rows))
                idle = batch._replace(rows=torch.full_like(batch.rows, -1))
                new = batch.select(batch.is_real)
                waiting = new if waiting is None else Batch.join([waiting, new])
            continue
        # Move waiting examples into free slots. In a pipeline, fill the other free slots with padding.
        num_busy = min(num_slots, num_rows)
        num_new = num_busy - num_running
        new, waiting = waiting.select(slice(num_new)), waiting.select(slice(num_new, None))
        if stages.size > 1:
            new = Batch.join([new, idle.select(slice(num_slots - num_busy))])
        parts = [] if running is None else [running]
        if len(new.rows):
            parts.append(begin(new))
        # Run a thinking step on all slots. Leave out the padding of the result.
        with eager_blocks(is_rare=num_running + len(new.rows) != num_slots):
            output = step(Carry.join(parts)).select(slice(num_busy))
        # End the samples that have lost their race, both in slots and among the waiting ones.
        if race is not None:
            carry = output.carry
            race.record(carry, model.network.wants_to_halt(carry.state, output.prediction))
            halted = carry.halted | race.is_lost(carry.data.rows, carry.steps)
            output = output._replace(carry=carry._replace(halted=halted))
            lost = race.is_lost(waiting.rows, torch.zeros_like(waiting.rows))
            if lost.any():  # results need an entry of every sample, also of one that never ran
                on_step(*_unanswered(begin(waiting.select(lost)), output))
            waiting = waiting.select(~lost)
        # Yield the examples that have halted. The others go on.
        on_step(output, output.carry.halted)
        done, going_on = (mask.nonzero().flatten() for mask in (output.carry.halted, ~output.carry.halted))
        if len(done):
            yield output.select(done)
        running = output.carry.select(going_on) if len(going_on) else None


def _unanswered(carry: Carry, like: StepOutput) -> tuple[StepOutput, Tensor]:
    carry = carry._replace(halted=torch.ones_like(carry.halted))
    # Any values: a sample that never ran is never selected.
    prediction = select_columns(like.prediction, torch.zeros_like(carry.steps).long())
    return StepOutput(carry, prediction), carry.halted
