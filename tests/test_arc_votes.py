"""Votes of earlier evaluations: counted once, and refused where they are damaged or of other tasks."""

from pathlib import Path

import numpy as np
import pytest

from dataset.kinds.arc.evaluator import ArcEvaluator
from tests.answers import metrics_of
from tests.arc_set import (
    ONE_TASK,
    VIEWS,
    A,
    B,
    Prediction,
    arc_answers,
    arc_evaluator,
    arc_evaluators,
    evaluated,
    random_case,
    write_arc,
)
from tests.ranks import run_ranks


def evaluated_into(
    output: Path, folder: Path, predictions: list[Prediction], **options
) -> tuple[ArcEvaluator, dict]:
    evaluator = arc_evaluator(folder, **options)
    evaluator.add("all", arc_answers(folder, random_case(folder)[0], predictions))
    metrics = metrics_of(evaluator)
    output.mkdir()
    evaluator.write(output)
    return evaluator, metrics


def test_votes_of_several_evaluations(tmp_path):
    folder = tmp_path / "data"
    _, predictions = random_case(folder)
    parts = predictions[:50], predictions[50:90], predictions[90:]
    evaluated_into(tmp_path / "0", folder, parts[0])
    files = [tmp_path / "0" / "votes.npz", tmp_path / "1" / "votes.npz"]
    evaluated_into(tmp_path / "1", folder, parts[1], extra_votes=files[:1])  # writes its own votes only
    evaluator, together = evaluated_into(tmp_path / "2", folder, parts[2], extra_votes=files)
    _, at_once = evaluated_into(tmp_path / "all", folder, predictions)
    assert together == at_once
    assert metrics_of(evaluator) == at_once, "counted twice"
    for name, is_equal in (("submission.json", True), ("votes.npz", False)):
        both = [(tmp_path / run / name).read_bytes() for run in ("2", "all")]
        assert (both[0] == both[1]) == is_equal


def _gather_with_further(folder: Path, votes: Path) -> dict:
    return arc_evaluators(folder, extra_votes=[votes]).gather_metrics()


@pytest.mark.slow
def test_extra_votes_count_once_on_several_ranks(tmp_path):
    _, predictions = random_case(tmp_path / "data")
    _, metrics = evaluated_into(tmp_path / "0", tmp_path / "data", predictions)
    votes = tmp_path / "0" / "votes.npz"
    assert run_ranks(_gather_with_further, 2, tmp_path / "data", votes) == [metrics, {}]


@pytest.fixture
def votes(tmp_path) -> Path:
    """A good file of votes on ONE_TASK, whose dataset is in `data` beside it."""
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    evaluated(folder, ONE_TASK, [Prediction("a", 0, B), Prediction("a", 0, None), Prediction("a", 0, A)])
    return (folder / "votes.npz").rename(tmp_path / "votes.npz")


def _with_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def _with(**changes):
    def damage(path: Path) -> None:
        with np.load(path) as file:
            arrays = {**file, **changes}
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})

    return damage


def _with_entry(number: int, **changes):
    def damage(path: Path) -> None:
        with np.load(path) as file:
            arrays = dict(file)
        for field, value in changes.items():
            arrays["entries"][field][number] = value
        np.savez(path, **arrays)

    return damage


DAMAGES = [
    (Path.unlink, "no file of votes"),
    (lambda path: path.write_bytes(b""), "no file of votes"),
    (lambda path: path.write_bytes(path.read_bytes()[:300]), "no file of votes"),
    (_with_array, "no file of votes"),
    (_with(digest=np.array([{}], object)), "no file of votes"),
    (_with(cells=None), "no file of votes"),
    (_with(entries=np.zeros(3)), "of another type"),
    (_with(set_names=np.array([1])), "of another type"),
    (_with(cells=np.zeros(4)), "of another type"),
    (_with(digest=np.array("0" * 64)), "votes on other tasks"),
    (_with(digest=np.zeros(3)), "votes on other tasks"),
    (_with(set_names=np.array(["other"])), "votes on a set 'other': the sets are all"),
    (_with(cells=np.zeros(3, np.uint8)), "no grids of colours"),
    (_with(cells=np.full(4, 10, np.uint8)), "no grids of colours"),
    (_with_entry(0, set=1), "entry 0 is out of range"),
    (_with_entry(1, task=1), "entry 1 is out of range"),
    (_with_entry(2, task=-1), "entry 2 is out of range"),
    (_with_entry(1, test_input=1), "entry 1 is out of range"),
    (_with_entry(1, test_input=-1), "entry 1 is out of range"),
    (_with_entry(1, rows=31), "entry 1 is out of range"),
    (_with_entry(1, rows=0), "entry 1 is out of range"),
    (_with_entry(1, votes=0), "entry 1 is out of range"),
    (_with_entry(1, votes=1 << 40), "entry 1 is out of range"),
    (_with_entry(1, halting=-1), "entry 1 is out of range"),
    (_with_entry(1, halting=(1 << 32) + 1), "entry 1 is out of range"),
]


def test_bad_votes(votes):
    evaluated(votes.parent / "data", ONE_TASK, [], extra_votes=(votes,))
    whole = votes.read_bytes()
    for damage, message in DAMAGES:
        votes.write_bytes(whole)
        damage(votes)
        with pytest.raises(ValueError, match=message) as error:
            arc_evaluator(votes.parent / "data", extra_votes=[votes])
        assert "\n" not in str(error.value)
        assert str(votes) in str(error.value)


def test_votes_named_twice(votes):
    with pytest.raises(ValueError, match="name a file twice"):
        arc_evaluator(votes.parent / "data", extra_votes=[votes, votes.parent / "data" / ".." / votes.name])
