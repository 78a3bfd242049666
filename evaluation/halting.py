"""How slots come to their final answer in an evaluation: after all steps, or when the Q head says so.

With `act` a slot that halts leaves the batch and another puzzle takes its place, so that the network is
called about as often as the puzzles need it, not as often as the hardest does. Invariant: an answer is that
of evaluating its puzzle alone.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from dataset.loader import Batch
from models import HaltingModel
from models.compilation import eager_blocks
from models.halting import Carry, StepOutput
from models.random import Draws

Halting = Literal["max", "act"]
Draw = Callable[[Carry], Draws | None]  # the random numbers of the step that the slots are about to make
Watch = Callable[[StepOutput, Tensor], None]  # (output, where the Q head halts first)


def answer_batches(
    model: HaltingModel, batches: Iterator[Batch], *, halting: Halting, draw: Draw, watch: Watch
) -> Iterator[StepOutput]:
    """Yields the final outputs of all rows of the batches, in pieces of any size, with `act` in any order.

    Rows of padding may come or stay away. watch: called after every step.
    """
    run = _run_all_steps if halting == "max" else _run_until_halted
    return run(model, batches, draw, watch)


def _run_all_steps(
    model: HaltingModel, batches: Iterator[Batch], draw: Draw, watch: Watch
) -> Iterator[StepOutput]:
    for batch in batches:
        carry = model.initial_carry(batch)
        has_acted = torch.zeros_like(carry.halted)
        for _ in range(model.eval_halt_max_steps):
            output = model(carry, batch, draws=draw(carry))
            carry = output.carry
            wants_to = model.wants_to_halt(output.prediction) | carry.halted
            watch(output, wants_to & ~has_acted)
            has_acted |= wants_to
        yield output


def _run_until_halted(
    model: HaltingModel, batches: Iterator[Batch], draw: Draw, watch: Watch
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
            real = batch.is_real.nonzero().flatten()
            new = Batch(*(column[real] for column in batch))
            waiting = new if waiting is None else Batch(*map(torch.cat, zip(waiting, new, strict=True)))
        num_new = 0 if waiting is None else min(num_slots - num_running, len(waiting.rows))
        if num_running + num_new == 0:
            return
        parts = [] if running is None else [running]
        if num_new:
            parts.append(model.initial_carry(Batch(*(column[:num_new] for column in waiting))))
            waiting = Batch(*(column[num_new:] for column in waiting))
        carry, is_whole = Carry.join(parts), num_running + num_new == num_slots
        with eager_blocks(unless=is_whole):
            output = model(carry, carry.data, halts_early=True, draws=draw(carry))
        watch(output, output.carry.halted)
        done, going_on = (mask.nonzero().flatten() for mask in (output.carry.halted, ~output.carry.halted))
        if len(done):
            yield StepOutput(output.carry.select(done), output.prediction.select(done))
        running = output.carry.select(going_on) if len(going_on) else None
