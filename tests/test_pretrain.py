"""The real program in real processes: its files, how a run continues, and that ranks do not change it."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from dataset.build import build_dataset
from evaluation import compilation
from tests.checkpoints import assert_equal, saved_tensors
from tests.float64 import TOLERANCE, assert_close
from tests.ranks import complete_program, run_program
from tests.tiny import OVERRIDES, STALL, TIMINGS, assert_same_row, logged_rows

_STEPS, _PER_ITERATION = 32, 16  # 200 puzzles, batches of 24: 2 epochs have 16 of them


def _train(
    folder: Path, data: Path, *overrides: str, world_size: int = 1, run: str = "a", **options: Any
) -> Path:
    words = (f"data_path='{data}'", f"run_name={run}", "project_name=p", *OVERRIDES, *overrides)
    complete_program("pretrain", *words, folder=folder, world_size=world_size, **options)
    return folder / "checkpoints" / "p" / run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, sudoku_folder) -> Path:
    """One process, uninterrupted."""
    return _train(tmp_path_factory.mktemp("whole"), sudoku_folder)


@pytest.mark.slow
def test_run_folder(whole_run, sudoku_folder):
    names = {path.name for path in whole_run.iterdir() if path.suffix != ".diff"}  # of code that is edited
    steps = {f"step_{step}" for step in (_PER_ITERATION, _STEPS)}
    assert names == {"config.yaml", "lock", "logs", "metrics.jsonl", "starts.jsonl", "status"} | steps
    config = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert (config["data_path"], config["run_name"]) == ([str(sudoku_folder)], "a")

    lines = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 10, 16, 20, 30, 32]
    assert all(next(iter(line)) == "step" for line in lines)
    for line in lines:
        assert line["train/step_seconds"] > 0
        assert line["train/examples_per_second"] == pytest.approx(24 / line["train/step_seconds"])
        assert line["train/petaflops"] == pytest.approx(line["step"] * lines[0]["train/petaflops"])
        assert line["train/lm_loss"] > 0
        assert line["train/grad_norm"] > 0
        assert line.keys() >= TIMINGS
        assert line["train/sync_seconds"] + line["train/data_wait_seconds"] < line["train/step_seconds"]
        assert ("eval/all/exact_accuracy" in line) == (STALL in line) == (line["step"] in (16, 32))
        assert 0 < line.get(STALL, 1) < 30
        assert line.get("eval/all/count", 100) == 100
        assert "eval/all/q_continue_loss" not in line
    assert lines[0]["train/lr"] == pytest.approx(1e-3 / 3)
    assert "train/accuracy" not in lines[0], "no slot has halted: there is nothing to report, and it is not 0"
    assert lines[-1]["train/accuracy"] > 0

    weights = load_file(whole_run / f"step_{_STEPS}" / "weights.safetensors")
    assert "lm_head.weight" in weights
    assert "puzzle_emb.weights" in weights
    assert not any("_orig_mod" in name or name.startswith("module.") for name in weights)


def _assert_the_same_end(run: Path, whole: Path, step: int) -> None:
    """The same bits, and the same lines of the log where the whole run has lines."""
    assert_equal(*(saved_tensors(each / f"step_{step}") for each in (run, whole)))
    regular = [line["step"] for line in logged_rows(whole)]
    assert [line for line in logged_rows(run) if line["step"] in regular] == logged_rows(whole)


@pytest.mark.slow
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(whole_run, tmp_path, sudoku_folder):
    run = _train(tmp_path, sudoku_folder, "max_steps=21")
    assert (run / "step_21").is_dir()
    assert "eval/all/accuracy" in logged_rows(run)[-1], "a stop saves and evaluates"
    _train(tmp_path, sudoku_folder)
    _assert_the_same_end(run, whole_run, _STEPS)
    assert [line["step"] for line in logged_rows(run)] == [1, 10, 16, 20, 21, 30, 32], "each step stands once"


def _build_anew_before_an_evaluation(folder: Path) -> None:
    """Replaces the dataset of a run, after its start, by another one."""
    import training.evaluation

    evaluate_split = training.evaluation.evaluate_split

    def evaluate_other(*arguments, **options):
        assert torch.are_deterministic_algorithms_enabled()
        other = ("--generate", "50", "--box", "2x2", "--seed", "9")
        build_dataset("sudoku", ["--output-dir", str(folder), *other])
        return evaluate_split(*arguments, **options)

    training.evaluation.evaluate_split = evaluate_other


@pytest.mark.slow
def test_data_that_is_built_anew_changes_no_run_and_is_told(whole_run, tmp_path, sudoku_folder):
    data = shutil.copytree(sudoku_folder, tmp_path / "data")
    words = (f"data_path={data}", "run_name=a", "project_name=p", *OVERRIDES, "evaluators=[sudoku]")
    words += ("deterministic=true", "max_steps=20")  # runs on CPUs are deterministic
    spoil = functools.partial(_build_anew_before_an_evaluation, data)
    finished = complete_program("pretrain", *words, folder=tmp_path, spoil=spoil)
    assert finished.stderr.count("dataset was rebuilt during the run: ") == 1
    run = tmp_path / "checkpoints" / "p" / "a"
    assert_equal(*(saved_tensors(each / f"step_{_PER_ITERATION}") for each in (run, whole_run)))
    rows = [row for row in logged_rows(whole_run) if row["step"] <= 20]
    for ours, theirs in zip(logged_rows(run), rows, strict=True):
        assert ours.items() >= theirs.items()
    finished = run_program("pretrain", *words, folder=tmp_path)
    assert finished.statuses == [1]
    assert "was trained on another dataset than data_path" in finished.error_lines[-1]


def _as_it_was(run: Path, step: int, folder: Path) -> Path:
    """Copies the run as it was when it had just saved `step`; what it had logged later may be there."""
    earlier = folder / "checkpoints" / "p" / "a"
    shutil.copytree(run, earlier, ignore=shutil.ignore_patterns("step_*"))
    shutil.copytree(run / f"step_{step}", earlier / f"step_{step}")
    return earlier


def _trust_the_compiler() -> None:
    """Leaves out the trial of the compiler, a process of its own: it has just passed."""
    compilation.find_compiler_failure = lambda device: None


def assert_resumed_is_bit_equal(folder: Path, data: Path, *options: str, world_size: int) -> None:
    options = (*options, "epochs=2", "checkpoint_interval=7", "keep_checkpoints=null")
    whole = _train(folder, data, *options, world_size=world_size, run="whole")
    said = (folder / ".output_pretrain" / "0.stdout").read_text()
    assert ("compiling: the first steps take up to minutes" in said) == ("compile=true" in options)
    run = _as_it_was(whole, 7, folder)
    _train(folder, data, *options, world_size=world_size, spoil=_trust_the_compiler)
    _assert_the_same_end(run, whole, _PER_ITERATION)


@pytest.mark.slow
def test_several_processes_that_are_resumed_have_the_same_bits(tmp_path, sudoku_folder):
    """Other networks and optimizers: test_layouts. A compiled run: system/test_long_runs.py."""
    options = ("arch.forward_dtype=bfloat16", "ema=0.9", "optimizer=muon", "gradient_accumulation_steps=2")
    assert_resumed_is_bit_equal(tmp_path, sudoku_folder, *options, "grad_clip_norm=0.5", world_size=2)


@pytest.mark.slow
def test_other_numbers_of_processes_are_the_same_run(tmp_path, sudoku_folder):
    """Two, then one, then four; in float64, since a split over processes changes the order of sums."""
    train = functools.partial(_train, tmp_path, sudoku_folder, "epochs=2", is_float64=True)
    whole_run = train(run="whole")
    train("max_steps=5", world_size=2)
    train("max_steps=8")
    run = train(world_size=4)
    ours, theirs = (saved_tensors(each / f"step_{_PER_ITERATION}") for each in (run, whole_run))
    for name in ("carry.data.rows", "carry.data.inputs", "carry.steps", "carry.halted"):
        assert torch.equal(ours[name], theirs[name]), name
    for name, value in theirs.items():
        assert_close(ours[name], value, what=name)
    rows = [row for row in logged_rows(run) if row["step"] not in (5, 8)]
    for mine, other in zip(rows, logged_rows(whole_run), strict=True):
        assert_same_row(mine, other, tolerance=TOLERANCE)


def _break_evaluation() -> None:
    import training.evaluation

    def fail(*_, **__):
        raise RuntimeError("evaluation fails")

    training.evaluation.evaluate_split = fail


@pytest.mark.slow
def test_evaluation_that_failed_loses_nothing_and_is_made_up_for(whole_run, tmp_path, sudoku_folder):
    """Also if a kill left half a line. The rows are those of a run that never failed."""
    run = tmp_path / "checkpoints" / "p" / "a"
    words = (f"data_path={sudoku_folder}", "run_name=a", "project_name=p", *OVERRIDES)
    for sanity_check in (True, False):  # true: it fails before the first step
        asked = f"sanity_check={sanity_check}"
        finished = run_program("pretrain", *words, asked, folder=tmp_path, spoil=_break_evaluation)
        assert finished.statuses == [1]
        assert "RuntimeError: evaluation fails" in finished.stderr
        assert ((run / "metrics.jsonl").stat().st_size > 0) != sanity_check
    assert (run / f"step_{_PER_ITERATION}").is_dir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "train/lm_l')
    _train(tmp_path, sudoku_folder)
    assert logged_rows(run) == logged_rows(whole_run)


@pytest.mark.slow
def test_any_folder_name_will_do_and_data_may_move(tmp_path, sudoku_folder):
    data = shutil.copytree(sudoku_folder, tmp_path / "_my set, v2")
    path = "checkpoints/_x=y z"
    for steps in (1, 2):
        _train(tmp_path, data, f"checkpoint_path='{path}'", f"max_steps={steps}", run="2024")
        data = data.rename(tmp_path / "after")
    assert (tmp_path / path / "step_2").is_dir()


@pytest.mark.slow
def test_a_run_that_does_not_get_better_ends_early(tmp_path, sudoku_folder):
    words = (*OVERRIDES, f"data_path={sudoku_folder}", "checkpoint_path=run", "keep_best=accuracy", "lr=0")
    words += ("puzzle_emb_lr=0", "epochs=3", "eval_interval=1", "stop_patience=1", "ema=null")
    ended = complete_program("pretrain", *words, folder=tmp_path, world_size=2)
    assert "stop_patience=1: accuracy (test split) was not better than" in ended.stdout
    run = tmp_path / "run"
    assert json.loads((run / "status").read_text()) == {"status": "finished", "step": 16}
    assert (run / "step_16").is_dir()
    again = complete_program("pretrain", *words, folder=tmp_path, world_size=2)
    assert "nothing to do" in again.stdout
    more = complete_program("pretrain", *words, "stop_patience=3", folder=tmp_path)
    assert "done: run is at training step 24 of 24" in more.stdout


@pytest.mark.slow
def test_finished_run_says_so(whole_run, sudoku_folder):
    before = (whole_run / "metrics.jsonl").read_text()
    words = (f"data_path={sudoku_folder}", "run_name=a", "project_name=p", *OVERRIDES, "report=true")
    (whole_run / "status").write_text(json.dumps({"status": "running", "step": 0}))  # killed at its end
    finished = complete_program("pretrain", *words, folder=whole_run.parents[2])
    assert "nothing to do" in finished.stdout
    (whole_run / "report.html").unlink()  # the finished run had none
    assert json.loads((whole_run / "status").read_text())["status"] == "finished"
    assert (whole_run / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_names_are_drawn_and_shared(tmp_path, sudoku_folder):
    overrides = [override for override in OVERRIDES if not override.startswith("epochs")]
    for _ in range(2):
        words = (f"data_path={sudoku_folder}", *overrides, "epochs=2", "max_steps=1")
        complete_program("pretrain", *words, folder=tmp_path, world_size=2)
    runs = list((tmp_path / "checkpoints").glob("hrm-sudoku/*"))
    assert len(runs) == 2, "both ranks write into one folder, and two starts into two"
    assert all((run / "step_1" / "carry_1_of_2.safetensors").is_file() for run in runs)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".output_pretrain", "checkpoints"]
