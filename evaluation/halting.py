"""How slots come to their final answer in an evaluation: after all steps, or when the network wants to halt.

A puzzle that halts early leaves its slot to another one, so that the network is called about as often as
the puzzles need it, not as often as the hardest does. Invariant: a puzzle's answer is that of evaluating the
puzzle alone.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dataset.loader import Batch
from models import HaltingModel
from models.carry import Carry, Reasoning, StepOutput, select_columns
from models.compilation import eager_blocks
from models.random import Draws

Draw = Callable[[Carry], Draws | None]  # the random numbers of the step that the slots are about to make
OnStep = Callable[[StepOutput, Tensor], None]  # (output, where the network wants to halt for the first time)


class Race:
    """Which runs of a puzzle can still answer it: the first to halt does, of equal ones the lowest sample.

    Whether a run is lost depends on its own step and sample and on what has halted, so that no answer depends
    on a neighbour. samples: the numbers of samples that are asked for, ascending; a run is lost once it has
    lost among the smallest of these numbers that include it. Runs are numbered as in `evaluation.test_time`.
    """

    def __init__(self, samples: Sequence[int]):
        self._samples = tuple(samples)
        self._first: dict[tuple[int, int], tuple[int, int]] = {}  # (row, samples): (step, sample)

    def record(self, carry: Carry, wants_to_halt: Tensor) -> None:
        """Records which runs halt after a step."""
        slots = (wants_to_halt & carry.data.is_real).nonzero().flatten()
        for run, step in zip(carry.data.rows[slots].tolist(), carry.steps[slots].tolist(), strict=True):
            row, sample = divmod(run, self._samples[-1])
            for number in (each for each in self._samples if sample < each):
                first = self._first.get((row, number), (step, sample))
                self._first[row, number] = min(first, (step, sample))

    def is_lost(self, rows: Tensor, steps: Tensor) -> Tensor:
        """Tells which runs cannot win any more after so many steps: bool [n]."""
        lost = []
        for run, step in zip(rows.tolist(), steps.tolist(), strict=True):
            row, sample = divmod(run, self._samples[-1])
            first = self._first.get((row, next(each for each in self._samples if sample < each)))
            lost.append(first is not None and (step + 1, sample) > first)
        return torch.tensor(lost, dtype=torch.bool, device=rows.device)


def answer_batches(
    model: HaltingModel,
    batches: Iterator[Batch],
    reasoning: Reasoning,
    *,
    draw: Draw,
    on_step: OnStep,
    race: Race | None = None,
) -> Iterator[StepOutput]:
    """Yields the final outputs of all rows of the batches, in pieces of any size, halting early in any order.

    Rows of padding may come or stay away. on_step: called after every step. race: drops runs that are lost.
    """
    if reasoning.halts_early:
        return _run_until_halted(model, batches, reasoning, draw, on_step, race)
    return _run_all_steps(model, batches, reasoning, draw, on_step)


def _run_all_steps(
    model: HaltingModel, batches: Iterator[Batch], reasoning: Reasoning, draw: Draw, on_step: OnStep
) -> Iterator[StepOutput]:
    for batch in batches:
        carry = _begin(model, batch, reasoning, draw)
        has_acted = torch.zeros_like(carry.halted)
        for _ in range(reasoning.max_steps):
            output = model(carry, reasoning, draw(carry))
            carry = output.carry
            wants_to = model.network.wants_to_halt(carry.state, output.prediction) | carry.halted
            on_step(output, wants_to & ~has_acted)
            has_acted |= wants_to
        yield output


def _run_until_halted(
    model: HaltingModel,
    batches: Iterator[Batch],
    reasoning: Reasoning,
    draw: Draw,
    on_step: OnStep,
    race: Race | None,
) -> Iterator[StepOutput]:
    """Refills slots from the batches to come; at the end the batch becomes smaller, and is not compiled."""
    running, waiting = None, None  # the carry of slots at work; real rows that wait for a slot
    num_slots = 0
    while True:
        num_running = 0 if running is None else len(running.steps)
        while waiting is None or num_running + len(waiting.rows) < num_slots:
            if (batch := next(batches, None)) is None:
                break
            num_slots = max(num_slots, len(batch.rows))
            new = _select(batch, batch.is_real.nonzero().flatten())
            waiting = new if waiting is None else Batch(*map(torch.cat, zip(waiting, new, strict=True)))
        num_new = 0 if waiting is None else min(num_slots - num_running, len(waiting.rows))
        if num_running + num_new == 0:
            return
        parts = [] if running is None else [running]
        if num_new:
            parts.append(_begin(model, _select(waiting, slice(num_new)), reasoning, draw))
            waiting = _select(waiting, slice(num_new, None))
        carry, is_whole = Carry.join(parts), num_running + num_new == num_slots
        with eager_blocks(unless=is_whole):
            output = model(carry, reasoning, draw(carry))
        if race is not None:
            output = _drop_lost(model, output, race)
            if waiting is not None:
                waiting = _end_waiting(model, waiting, output, race, reasoning, draw, on_step)
        on_step(output, output.carry.halted)
        done, going_on = (mask.nonzero().flatten() for mask in (output.carry.halted, ~output.carry.halted))
        if len(done):
            yield output.select(done)
        running = output.carry.select(going_on) if len(going_on) else None


def _drop_lost(model: HaltingModel, output: StepOutput, race: Race) -> StepOutput:
    """Ends the runs that are lost."""
    carry = output.carry
    race.record(carry, model.network.wants_to_halt(carry.state, output.prediction))
    halted = carry.halted | race.is_lost(carry.data.rows, carry.steps)
    return output._replace(carry=carry._replace(halted=halted))


def _end_waiting(
    model: HaltingModel,
    waiting: Batch,
    output: StepOutput,
    race: Race,
    reasoning: Reasoning,
    draw: Draw,
    on_step: OnStep,
) -> Batch:
    """Ends the runs that are lost before their first step, without an answer; returns the others."""
    lost = race.is_lost(waiting.rows, torch.zeros_like(waiting.rows))
    if lost.any():
        carry = _begin(model, _select(waiting, lost), reasoning, draw)
        carry = carry._replace(halted=torch.ones_like(carry.halted))
        unused = select_columns(output.prediction, torch.zeros_like(carry.steps).long())
        on_step(StepOutput(carry, unused), carry.halted)
    return _select(waiting, ~lost)


def _begin(model: HaltingModel, batch: Batch, reasoning: Reasoning, draw: Draw) -> Carry:
    blank = model.initial_carry(batch)
    return model.begin(blank, batch, reasoning, draw(blank))[0]


def _select(batch: Batch, rows: slice | Tensor) -> Batch:
    return Batch(*(column[rows] for column in batch))
