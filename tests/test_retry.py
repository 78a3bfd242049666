"""`retry_samples`: answers and counts of both passes, against a plain loop over a script of all chains."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from config.architecture import LDTConfig
from dataset.files import open_dataset
from evaluation.evaluators import Evaluators
from evaluation.passes import SetResult, evaluate_split
from evaluation.selection import Settings
from models import HaltingModel
from models.carry import Prediction
from models.ldt_objective import BoardObjective
from models.network import Network
from tests.ranks import run_ranks
from tests.tiny import tiny_arch

_STEPS, _FIRST, _ALL = 6, 2, 5  # steps of a chain, chains of the first pass, and of both
_ROWS = np.arange(1, 100, 2)  # of the test set of 100 puzzles
_draw = np.random.default_rng(0)
# Of each puzzle and chain: the step in which it halts (0: never), and whether its answer is right.
_HALTS = np.where(_draw.random((100, _ALL)) < 0.3, _draw.integers(1, _STEPS + 1, (100, _ALL)), 0)
_IS_RIGHT = _draw.random((100, _ALL)) < 0.6


class _Scripted(Network):
    """Finds the answers of the script. A wrong answer of chain c differs from the label in cell c."""

    objective_class, is_search, is_random = BoardObjective, True, True

    def __init__(self, arch: LDTConfig, vocab_size: int):
        super().__init__(arch)
        self.vocab_size, self.unused = vocab_size, nn.Parameter(torch.zeros(1))

    def start(self, data, reasoning, rng, fresh):
        return {"label": data.labels.clone()}

    def wants_to_halt(self, state, prediction, rng=None):
        return prediction.q_halt > 0

    def forward(self, state, inputs, puzzle_identifiers, *, reasoning, rng):
        rows, chains, steps = rng.counters[:, 0], rng.counters[:, 1] >> 16, rng.counters[:, 1] & 0xFFFF
        halts = torch.from_numpy(_HALTS)[rows, chains]
        has_halted = (halts > 0) & (steps >= halts)
        answer, slots = state["label"].long(), torch.arange(len(rows))
        is_right, right = torch.from_numpy(_IS_RIGHT)[rows, chains], answer[slots, chains]
        answer[slots, chains] = torch.where(is_right, right, _other_digit(right))
        answer = torch.where(has_halted[:, None], answer, inputs.long())
        logits = nn.functional.one_hot(answer, self.vocab_size).float()
        return state, Prediction(logits, torch.where(has_halted, 5.0, -5.0), None)


def _other_digit(token):
    return (token - 2 + 1) % 4 + 2


def _evaluate(folder: Path, batch_size: int) -> SetResult | None:
    data = open_dataset(folder, read_everything=False)
    arch = tiny_arch("ldt", eval_halt_max_steps=_STEPS)
    options = {"evaluators": Evaluators(["sudoku"], data), "outputs": ("preds", "q_halt_logits", "inputs")}
    options["settings"] = Settings((_STEPS,), (_FIRST,), ("first_to_halt",), retry_samples=_ALL)
    model = HaltingModel(_Scripted(arch, data.metadata.vocab_size))
    options |= {"global_batch_size": batch_size, "puzzles": {"all": _ROWS}}
    return evaluate_split(model, data, **options).get("all")


def _expected(folder: Path) -> tuple[Counter, np.ndarray, np.ndarray]:
    """Returns (sums over puzzles, answers [puzzles, cells], whether each puzzle has an answer)."""
    puzzles = open_dataset(folder, read_everything=False).splits["test"].sets["all"]
    sums, answers, is_decided = Counter(), [], []
    for row in _ROWS.tolist():
        winner, steps = None, _STEPS
        for chains in (range(_FIRST), range(_FIRST, _ALL)):
            halted = [(int(_HALTS[row, chain]), chain) for chain in chains if _HALTS[row, chain]]
            steps, winner = min(halted, default=(_STEPS, None))
            sums["calls"] += len(chains) * steps
            if winner is not None:
                break
        answer = np.array(puzzles.inputs[row] if winner is None else puzzles.labels[row])
        outcome = "undecided" if winner is None else "exact" if _IS_RIGHT[row, winner] else "wrong"
        if outcome == "wrong":
            answer[winner] = _other_digit(answer[winner])
        sums.update([outcome, f"{outcome}, second pass" if chains.start else f"{outcome}, first pass"])
        sums["steps"] += steps
        answers.append(answer)
        is_decided.append(winner is not None)
    return sums, np.array(answers), np.array(is_decided)


def _check(result: SetResult, folder: Path) -> None:
    sums, answers, is_decided = _expected(folder)
    outcomes = {f"{outcome}, {which} pass" for outcome in ("exact", "wrong") for which in ("first", "second")}
    assert min(sums[outcome] for outcome in (*outcomes, "undecided")) >= 3, "or this proves little"
    figures = {figure: number for (*_, figure), number in result.scores.items()}
    assert figures == {name: sums[name] for name in ("exact", "calls", "undecided")} | {
        "valid": sums["exact"]
    }
    assert result.metrics["count"] == result.metrics["sudoku/count"] == len(_ROWS)
    named = {"exact_accuracy": "exact", "sudoku/exact_accuracy": "exact", "sudoku/valid_accuracy": "exact"}
    for metric, name in (named | {name: name for name in ("wrong", "undecided", "steps")}).items():
        assert result.metrics[metric] == pytest.approx(sums[name] / len(_ROWS)), metric
    np.testing.assert_array_equal(result.outputs["preds"], answers)
    np.testing.assert_array_equal(result.outputs["q_halt_logits"] > 0, is_decided)
    puzzles = open_dataset(folder, read_everything=False).splits["test"].sets["all"]
    np.testing.assert_array_equal(result.outputs["inputs"], puzzles.inputs[_ROWS])


@pytest.mark.parametrize("batch_size", [7, 400])
def test_both_passes_of_a_retry_count(sudoku_folder, batch_size):
    _check(_evaluate(sudoku_folder, batch_size), sudoku_folder)


@pytest.mark.slow
def test_both_passes_of_a_retry_count_on_several_ranks(sudoku_folder):
    _check(run_ranks(_evaluate, 2, sudoku_folder, 16)[0], sudoku_folder)
