"""The models in weights/: small, found by name, and as good on puzzles that are made anew for them."""

from pathlib import Path

import pytest

from checkpointing.files import SHARED_CONFIG_FILE, SHARED_WEIGHTS_FILE
from checkpointing.finding import SHIPPED, find_checkpoint
from checkpointing.loading import load_trained_model
from dataset.build import build_dataset
from dataset.mixture import open_datasets
from evaluation.leaks import find_trained
from evaluation.passes import evaluate_split

# The words of the builder that make the puzzles of each model, and how many of them it solves. QUICK: the
# models that are asked here; tests/system asks the others.
_NEW, _FEWER = (f"--generate 1 --num-test {number} --seed 7" for number in (200, 100))
SOLVED = {
    "demo": (f"sudoku --box 2x2 {_FEWER}", 100),
    "sudoku_6x6": (f"sudoku --box 2x3 {_FEWER}", 100),
    "sudoku_9x9": (f"sudoku {_NEW}", 175),
    "maze_15x15": (f"maze --size 15 --perfect {_NEW}", 200),
    "maze_30x30": ("maze --size 30 --generate 1 --num-test 50 --seed 7", 37),
    "arc_mini": ("arc --generate 40 --max-size 8 --dihedral", 302),  # the tasks that it was trained on
}
QUICK = ("demo", "sudoku_6x6")


def test_all_are_small_and_tested():
    sizes = {path.parent.name: path.stat().st_size / 1e6 for path in SHIPPED.glob(f"*/{SHARED_WEIGHTS_FILE}")}
    assert sizes.keys() == SOLVED.keys() | {"sudoku_extreme"}  # which tests/system asks
    assert max(sizes.values()) < 3
    assert sum(sizes.values()) < 12
    for name in sizes:
        assert {SHARED_CONFIG_FILE, "README.md"} < {path.name for path in (SHIPPED / name).iterdir()}
        card = (SHIPPED / name / "README.md").read_text()
        assert all(
            each in card for each in ("| code | commit `", "fingerprint", "pretrain.py", "exact_accuracy")
        )


def test_it_is_known_what_each_was_trained_on():
    found = {name: find_trained(find_checkpoint(name)) for name in (*SOLVED, "sudoku_extreme")}
    assert all(len(each.hashes) for each in found.values())
    assert all(each.is_complete for each in found.values())
    assert len(found["demo"].hashes) == 4000
    assert len(found["maze_30x30"].hashes) == 1000 + 20_000  # with those of its init_from


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("demo").path == SHIPPED / "demo" / SHARED_WEIGHTS_FILE
    Path("demo").mkdir()
    with pytest.raises(ValueError, match="no checkpoint step_<N> in demo"):
        find_checkpoint("demo")
    with pytest.raises(ValueError, match="weights/: .*demo, .*sudoku_6x6"):
        find_checkpoint("demo_2")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_it_solves_new_puzzles(name, tmp_path):
    check_solved(name, tmp_path)


def check_solved(name: str, tmp_path: Path) -> None:
    """CPUs round differently: one puzzle more or less may be solved elsewhere."""
    words, expected = SOLVED[name]
    kind, *options = words.split()
    build_dataset(kind, [*options, "--output-dir", str(tmp_path / "data")])
    data = open_datasets([tmp_path / "data"], splits=("test",), read_everything=False)
    model = load_trained_model(find_checkpoint(name), data.metadata, forward_dtype="float32")
    (result,) = evaluate_split(model, data, global_batch_size=100).values()
    count = result.metrics["count"]
    solved = round(count * result.metrics["exact_accuracy"])
    assert abs(solved - expected) <= 1, f"{solved} of {count:.0f}"
