"""Solves one puzzle like evaluate.py, and records every thinking step of the sample that answers.

A search model (LDT) is different. In evaluate.py, the sample with the fewest thinking steps answers. Here,
only 8 samples start (_FIRST_SAMPLES). Every 16 thinking steps (_WIDEN_STEPS), as many samples start as have
started before. The first sample that halts answers. So easy puzzles take a fraction of the time. With the
same seed and row (`answer_puzzle`), a sample makes the same thinking steps in both programs. So both find an
answer to the same puzzles, but another sample may answer. If the kind of puzzle has many right answers, all
samples start at once and run to their end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import torch

from config.programs import Select, SolveConfig
from dataset.drawing import symbols_of
from dataset.kinds.kind import Puzzle, Style
from dataset.loader import Batch
from dataset.metadata import IGNORE_LABEL_ID
from distributed.progress import Progress
from evaluation.selection import Scores, Settings, predicted_tokens
from evaluation.test_time import (
    build_draw,
    check_effects,
    has_hidden_state,
    reasoning_of_samples,
    run_settings,
    split_into_attempts,
)
from evaluation.trace import Trace, trace_step
from models import HaltingModel
from models.carry import Carry, Reasoning, StepOutput

_FIRST_SAMPLES, _WIDEN_STEPS = 8, 16  # of a search
_NOISE = 0.3  # the default for several samples, as in PTRM


@dataclasses.dataclass(frozen=True)
class Step:
    """The model's answer to a puzzle after one thinking step.

    Arrays have the shape [rows, columns] of the puzzle's grid.

    number         Index of the step, from 1.
    tokens         [seq_len]: Tokens of all cells, with padding. uint8 if there are at most 256 different
                   tokens, otherwise int32.
    grid           Symbols of the cells, as texts.
    confidence     float32: Probability that the model gives to the symbol of each cell.
    changed        bool: Whether the cell differs from the step before (in the first step: from the puzzle).
    q_halt         The predicted probability that the answer is right. SE-RRM predicts the softmax probability
                   of its least certain cell.
    wants_to_halt  Whether the model would stop after this step.
    """

    number: int
    tokens: np.ndarray
    grid: np.ndarray
    confidence: np.ndarray
    changed: np.ndarray
    q_halt: float
    wants_to_halt: bool

    @property
    def text(self) -> str:
        """The grid as text, with one line for each row.

        If a symbol has several characters, spaces separate the cells.
        """
        gap = "" if all(len(symbol) == 1 for symbol in self.grid.flat) else " "
        return "\n".join(gap.join(row) for row in self.grid.tolist())


@dataclasses.dataclass(frozen=True)
class Answer(Step):
    """The model's final answer to a puzzle, and its answer after each thinking step.

    The fields of the base class `Step` describe the final answer.

    puzzle         The puzzle.
    style          How the puzzle is drawn: symbols and colors.
    steps          The answers of the selected sample after each step.
    num_samples    Number of samples. A sample is one of several answers, with its own random noise. A search
                   (LDT) may start fewer samples.
    sample         Index of the sample that was selected.
    select         Rule that selected the sample, such as "vote".
    valid          Whether the answer obeys the rules of the puzzle. None if the puzzle has no rules.
    correct        Whether the answer equals the solution. None if no solution is known.
    is_search      Whether the model is a search (LDT). Then q_halt and confidence are not probabilities.
    is_decided     False if a search model found no answer. `steps` are then those of the first sample.
    distinct       uint8 [n, seq_len]: Different right answers among all samples, in the order of the samples.
                   None if the kind of puzzle has one right answer.
    """

    puzzle: Puzzle
    style: Style
    steps: list[Step]
    sample: int
    num_samples: int
    select: Select
    valid: bool | None
    correct: bool | None
    is_search: bool = False
    is_decided: bool = True
    distinct: np.ndarray | None = None

    @property
    def halting_step(self) -> int | None:
        """The first step (from 1) after which the model wants to halt. None if there is no such step."""
        return next((step.number for step in self.steps if step.wants_to_halt), None)

    def __str__(self) -> str:
        return self.text


@torch.inference_mode()
def answer_puzzle(
    model: HaltingModel,
    puzzle: Puzzle,
    config: SolveConfig,
    *,
    style: Style,
    identifier: int,
    device: torch.device,
    row: int = 0,
) -> Answer:
    """Solves one puzzle, and records the answer after each thinking step.

    Raises ValueError if the config has an option without effect on this kind of model, if all samples would
    be identical, or if `select` is "rules" and the puzzle has no rules.

    model: Model in evaluation mode, for puzzles of this size.
    config: Config of solve.py, such as the number of thinking steps and the number of samples.
    style: How the puzzle is drawn. It is stored in the answer.
    identifier: Row of the puzzle in the model's puzzle embedding table.
    row: Number that selects the random noise. With the index of the puzzle in its test set, the noise is the
    same as in evaluate.py.
    """
    if config.select == "rules" and puzzle.rules is None:
        raise ValueError(
            "select=rules needs a puzzle with rules, such as a Sudoku or a maze. Choose another select."
        )
    config = config.model_copy(update={"noise": _noise(model, config)})
    max_steps = config.steps or model.eval_reasoning(config.halting).max_steps
    reasoning = reasoning_of_samples(model, config, max_steps=max_steps, num_samples=config.samples)
    check_effects(model, config, seq_len=len(puzzle.tokens))
    is_search = model.network.is_search

    traces: list[tuple[np.ndarray, Trace]] = []  # after each step: its attempts, and their trace
    batch = _batch_of(puzzle, identifier, row).to(device)
    bar = Progress(total=max_steps, desc="thinking", unit="steps", delay=1, leave=False)

    def record(output: StepOutput, _: torch.Tensor | None = None) -> None:
        traces.append((output.carry.data.rows.cpu().numpy(), trace_step(model, output)))
        bar.update(min(1, max_steps - bar.n))  # samples that start later make more steps in total

    with bar:
        if is_search and not puzzle.has_many_answers:
            options = {"seed": config.seed, "num_samples": config.samples, "on_step": record}
            chosen, select = _first_to_halt(model, batch, reasoning, **options), "first_to_halt"
        else:
            select = "first_to_halt" if is_search else config.select
            settings = Settings((max_steps,), (config.samples,), (select,))
            ((final, attempts, (chosen,)),) = run_settings(
                model,
                iter([batch]),
                reasoning,
                seed=config.seed,
                num_slots=config.samples,
                vocab_size=puzzle.vocab_size,
                scores=Scores(settings, rules=puzzle.rules, is_search=is_search),
                runs_all=True,
                on_step=record,
            )
    distinct = None
    if puzzle.has_many_answers:
        preds = predicted_tokens(attempts.prediction.logits)
        if is_search:
            preds = preds[model.network.wants_to_halt(attempts.carry.state, attempts.prediction)]
        distinct = puzzle.distinct_answers(preds.cpu().numpy())
    sample = max(int(chosen), 0)  # without an answer, the first sample is shown
    attempt = row * config.samples + sample
    of_attempt = [(rows == attempt, step) for rows, step in traces if attempt in rows]
    trace = [Trace(*(column[is_attempt][0] for column in step)) for is_attempt, step in of_attempt]
    steps = _steps_of(puzzle, style, trace)
    step = steps[-1] if is_search else steps[int(final.carry.steps) - 1]
    return Answer(
        **vars(step),
        puzzle=puzzle,
        style=style,
        steps=steps,
        sample=sample,
        num_samples=config.samples,
        select=select,
        valid=bool(puzzle.rules(puzzle.tokens[None], step.tokens[None])[0]) if puzzle.rules else None,
        correct=None if puzzle.solution is None else puzzle.is_solution(step.tokens),
        is_search=is_search,
        is_decided=int(chosen) >= 0,
        distinct=distinct,
    )


def _first_to_halt(
    model: HaltingModel,
    batch: Batch,
    reasoning: Reasoning,
    *,
    seed: int,
    num_samples: int,
    on_step: Callable[[StepOutput], None],
) -> int:
    """Runs samples of a search model (LDT) on one puzzle, until the first sample halts.

    Returns the index of this sample, or -1 if no sample halts. First, 8 samples start. Every 16 thinking
    steps, as many samples start as have started before. If all running samples end without an answer, the
    next samples start at once.

    batch: Batch that contains only the puzzle.
    num_samples: Maximum number of samples to start.
    on_step: Function that is called with the output of each thinking step.
    """
    (attempts,) = split_into_attempts(iter([batch]), num_samples=num_samples, num_slots=num_samples)
    draw = build_draw(model.network, reasoning, seed=seed, num_samples=num_samples)
    running: list[Carry] = []
    num_started = 0
    for step in itertools.count():
        if not running or step % _WIDEN_STEPS == 0:
            new = attempts.select(slice(num_started, max(_FIRST_SAMPLES, 2 * num_started)))
            if len(new.rows):
                blank = model.initial_carry(new)
                running.append(model.refill(blank, new, reasoning, draw(blank)))
                num_started += len(new.rows)
            elif not running:
                return -1
        carry = Carry.join(running)
        output = model(carry, reasoning, draw(carry))
        on_step(output)
        carry = output.carry
        has_answer = model.network.wants_to_halt(carry.state, output.prediction)
        if has_answer.any():
            return int(carry.data.rows[has_answer][0]) % num_samples
        running_slots = (~carry.halted).nonzero().flatten()
        running = [carry.select(running_slots)] if len(running_slots) else []


def _noise(model: HaltingModel, config: SolveConfig) -> float:
    reasoning = model.eval_reasoning(config.halting)
    init_noise = reasoning.init_noise if config.init_noise is None else config.init_noise
    if config.noise is not None or config.samples == 1 or reasoning.state_noise or init_noise:
        return config.noise or 0.0
    # Without noise, all samples would be equal.
    return _NOISE if has_hidden_state(model.network) and not model.network.is_random else 0.0


def _batch_of(puzzle: Puzzle, identifier: int, row: int) -> Batch:
    tokens = torch.from_numpy(puzzle.tokens.astype(np.int32))[None]
    return Batch(
        inputs=tokens,
        labels=torch.full_like(tokens, IGNORE_LABEL_ID),
        puzzle_identifiers=torch.tensor([identifier], dtype=torch.int32),
        rows=torch.tensor([row]),
    )


def _steps_of(puzzle: Puzzle, style: Style, trace: list[Trace]) -> list[Step]:
    steps, before = [], puzzle.tokens
    for number, now in enumerate(trace, 1):
        cells = puzzle.cells_of(now.preds)
        step = Step(
            number=number,
            tokens=now.preds,
            grid=symbols_of(style, now.preds)[cells],
            confidence=now.confidence[cells],
            changed=(now.preds != before)[cells],
            q_halt=float(1 / (1 + np.exp(-np.float64(now.q_halt)))),
            wants_to_halt=bool(now.wants_to_halt),
        )
        steps.append(step)
        before = now.preds
    return steps
