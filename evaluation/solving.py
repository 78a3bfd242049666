"""Solves one puzzle as evaluate.py does, and keeps every step of the sample that answers."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from config.programs import Select, SolveConfig
from dataset.drawing import symbols_of
from dataset.format import IGNORE_LABEL_ID
from dataset.kinds.kind import Puzzle, Style
from dataset.loader import Batch
from evaluation.selection import Scores, Settings
from evaluation.test_time import keeps_state, reasoning_of_samples, run_settings
from evaluation.trace import Trace, trace_step
from models import HaltingModel
from models.carry import StepOutput
from models.search import Search

_NOISE = 0.3  # the default for several samples, as in PTRM


@dataclasses.dataclass(frozen=True)
class Step:
    """The answer of a model after one step. Arrays are [rows, columns] of the answer's grid.

    number         Number of the step, from 1.
    tokens         uint8 or int32 [seq_len]: Tokens of all cells, with padding.
    grid           Symbols of the cells, as texts.
    confidence     float32: Probability that the model gives to the symbol of each cell.
    changed        bool: Whether the cell differs from the step before (at the first step: from the puzzle).
    q_halt         Halting value: the model's probability that the answer is right.
    wants_to_halt  Whether the model would halt after this step.
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
        """Returns the grid as lines. If a symbol has several characters, spaces separate the cells."""
        gap = "" if all(len(symbol) == 1 for symbol in self.grid.flat) else " "
        return "\n".join(gap.join(row) for row in self.grid.tolist())


@dataclasses.dataclass(frozen=True)
class Answer(Step):
    """The answer to a puzzle: the step that answers (usually the last), with all steps of its sample.

    puzzle, style  The puzzle, and how its kind is drawn.
    steps          All steps of the sample, from the first one.
    sample         Number of the sample, from 0 to num_samples - 1.
    select         Selection rule that chose the sample.
    valid          Whether the answer obeys the rules of the puzzle. None if the puzzle has no rules.
    correct        Whether the answer is the solution. None if no solution is known.
    is_search      Whether the model searches. Then q_halt and confidence are not probabilities.
    is_decided     If False, a search found no answer, and the steps are those of its first sample.
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

    @property
    def halting_step(self) -> int | None:
        """Returns the first step after which the model would halt, or None if it never would."""
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
    """Solves a puzzle with the noise and the result that evaluate.py has for example `row` of a set.

    Runs in one process. The model must have the puzzle's sizes and be in evaluation mode. identifier:
    Identifier of the puzzle embedding. Raises ValueError if the config does not fit the model or the puzzle.
    """
    if config.select == "rules" and puzzle.rules is None:
        raise ValueError(
            "select=rules needs a puzzle with rules, such as a Sudoku or a maze. Choose another select."
        )
    config = config.model_copy(update={"noise": _noise(model, config)})
    max_steps = config.steps or model.eval_reasoning(config.halting).max_steps
    reasoning = reasoning_of_samples(model, config, max_steps=max_steps, num_samples=config.samples)
    is_search = isinstance(model.network, Search)

    seen: list[tuple[np.ndarray, Trace]] = []  # after each step: its attempts, and their trace

    def record(output: StepOutput, _: torch.Tensor) -> None:
        seen.append((output.carry.data.rows.cpu().numpy(), trace_step(model, output)))

    settings = Settings((max_steps,), (config.samples,), ("first_to_halt" if is_search else config.select,))
    scores = Scores(settings, rules=puzzle.rules, is_search=is_search)
    ((final, _, chosen),) = run_settings(
        model,
        iter([_batch_of(puzzle, identifier, row).to(device)]),
        reasoning,
        seed=config.seed,
        num_slots=config.samples,
        vocab_size=puzzle.vocab_size,
        scores=scores,
        on_step=record,
    )
    sample = max(int(chosen[0]), 0)  # without an answer, the first sample is shown
    attempt = row * config.samples + sample
    own = [(rows == attempt, step) for rows, step in seen if attempt in rows]
    trace = [Trace(*(column[is_own][0] for column in step)) for is_own, step in own]
    steps = _steps_of(puzzle, style, trace)
    step = steps[int(final.carry.steps) - 1]
    return Answer(
        **vars(step),
        puzzle=puzzle,
        style=style,
        steps=steps,
        sample=sample,
        num_samples=config.samples,
        select=settings.selects[0],
        valid=bool(puzzle.rules(puzzle.tokens[None], step.tokens[None])[0]) if puzzle.rules else None,
        correct=None if puzzle.solution is None else puzzle.is_solution(step.tokens),
        is_search=is_search,
        is_decided=int(chosen[0]) >= 0,
    )


def _noise(model: HaltingModel, config: SolveConfig) -> float:
    """Returns the config's noise, or a default if several samples would otherwise be equal."""
    reasoning = model.eval_reasoning(config.halting)
    init_noise = reasoning.init_noise if config.init_noise is None else config.init_noise
    if config.noise is not None or config.samples == 1 or reasoning.state_noise or init_noise:
        return config.noise or 0.0
    return _NOISE if keeps_state(model.network) and not isinstance(model.network, Search) else 0.0


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
