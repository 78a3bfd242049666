"""Runs side by side in a report: which are a group, their table and its file formats, their mean curves."""

from pathlib import Path

import pytest

from config.schema import PretrainConfig
from evaluation.intervals import wilson_interval
from report.compare import comparison_charts
from report.run import RunRecord, read_run
from report.table import _OF_OUTPUT, Table, build_table, group_runs, without_repeats
from tests.report_runs import write_run
from tests.tiny import tiny_arch


def test_a_name_in_a_table_is_not_code_of_latex_or_markdown():
    table = Table(["runs", "solved"], [["\\input{/x} ~^>a_b\n| c", "1.000"]], [{}])
    name = r"\textbackslash{}input\{/x\} \textasciitilde{}\textasciicircum{}$>$a\_b"
    assert f"{name}\n| c & 1.000 \\\\\n" in table.to_latex()
    assert table.to_markdown().splitlines()[2] == "| \\input{/x} ~^>a_b \\| c | 1.000  |"


def test_a_table_of_many_differences_still_shows_the_architecture_and_halting(tmp_path, sudoku_folder):
    """Many other keys differ too. They are not shown."""
    options = {"has_checkpoint": False, "weight_decay": 0.5, "beta1": 0.8, "lr": 0.1, "lr_warmup_steps": 3}
    options |= {"arch": tiny_arch("hrm").model_dump(), "halting": "act"}
    folders = [write_run(tmp_path / "a", sudoku_folder, has_checkpoint=False)]
    folders.append(write_run(tmp_path / "b", sudoku_folder, **options))
    table = build_table(group_runs([read_run(folder) for folder in folders]))
    assert table.columns[:4] == ["runs", "arch.name", "halting", "seeds"]
    assert [row[:4] for row in table.rows] == [["a", "trm", "max", "1"], ["b", "hrm", "act", "1"]]


def test_columns_are_chosen_and_the_newest_finished_run_of_a_seed_counts(tmp_path):
    def run(name: str, *, seed: int, status: str, time: str, solved: float = 0.5) -> RunRecord:
        config = {"seed": seed, "run_name": name, "lr": 0.1, "arch": {"name": "trm"}}
        row = {"step": 8, "eval/all/exact_accuracy": solved, "eval/all/sudoku/valid_accuracy": 0.75}
        row |= {"eval/all/count": 100, "train/lm_loss": 0.125}
        start = {"time": time}
        return RunRecord(Path(name), config, [row], [start], {"status": status}, {}, None, "f", [])

    runs = [
        run("old", seed=0, status="finished", time="2026-01-01", solved=0.1),
        run("new", seed=0, status="finished", time="2026-02-01"),
        run("stopped", seed=0, status="stopped", time="2026-03-01", solved=0.9),
        run("other", seed=1, status="stopped", time="2026-01-01"),
    ]
    said = []
    counted = without_repeats(runs, said.append)
    assert [each.name for each in counted] == ["new", "other"]
    assert [line.partition(" with ")[0] for line in said] == ["old repeats new", "stopped repeats new"]
    table = build_table(group_runs(counted), ["sudoku/valid_accuracy", "solved", "train/lm_loss"])
    assert table.columns == ["runs", "sudoku/valid_accuracy", "solved", "train/lm_loss"]
    assert [table.rows[0][1], table.rows[0][3]] == ["0.75", "0.125"]
    assert "sudoku/valid_accuracy,train/lm_loss" in table.to_csv().splitlines()[0]
    for column, words in {
        "accuracy2": "Choose from seeds, solved, p, ",
        "sudoku/valid": "Choose from seeds, solved, p, ",
        "maze/valid_accuracy": r"the evaluator maze did not run in training\. Train with evaluators=\[maze\]",
    }.items():
        with pytest.raises(ValueError, match=f"--columns: no run has {column}.*{words}"):
            build_table(group_runs(counted), [column])


def test_test_sets_of_folders_that_were_moved_before_the_run_resumed_count_once():
    """The names of the sets contain those of the folders."""
    of_steps = [{"a.all": 0.2, "b.all": 0.4}, {"a.all": 0.9, "b.all": 0.7}, {"c.all": 0.75, "d.all": 0.25}]
    rows = [{"step": step} for step in range(1, 4)]
    for row, sets in zip(rows, of_steps, strict=True):
        for name, value in sets.items():
            row |= {f"eval/{name}/exact_accuracy": value, f"eval/{name}/count": 100}
    run = RunRecord(Path("run"), {}, rows, [], {}, {}, None, None, [])
    (record,) = build_table(group_runs([run])).records
    assert (record["solved"], record["best"]) == (0.5, pytest.approx(0.8))
    assert (record["low"], record["high"]) == wilson_interval(0.5, 200)


def test_every_test_puzzle_counts_once_if_the_sets_have_different_sizes():
    row = {"step": 1, "eval/a.all/exact_accuracy": 0.5, "eval/a.all/count": 100, "eval/a.all/trained_on": 0}
    row |= {"eval/b.all/exact_accuracy": 0.9, "eval/b.all/count": 900, "eval/b.all/trained_on": 800}
    row |= {"eval/b.all/unseen/exact_accuracy": 0.2, "eval/b.all/unseen/count": 100}
    run = RunRecord(Path("run"), {}, [row], [], {}, {}, None, None, [])
    (record,) = build_table(group_runs([run])).records
    assert (record["solved"], record["unseen"]) == (pytest.approx(0.86), pytest.approx(0.35))
    assert (record["low"], record["high"]) == pytest.approx(wilson_interval(0.86, 1000))


def test_keys_that_change_no_training_are_no_difference(tmp_path, sudoku_folder):
    """The same training that is logged elsewhere is a repetition, not another seed."""
    assert {*_OF_OUTPUT} < {*PretrainConfig.model_fields}
    changes = {"a": {"loggers": ["csv"], "log_interval": 5}, "b": {"loggers": [], "lr": 0.1}}
    changes["c"] = {"wandb_log_puzzles": 0, "checkpoint_interval": 9, "lr": 0.1}
    runs = [
        read_run(write_run(tmp_path / name, sudoku_folder, has_checkpoint=False, **keys))
        for name, keys in changes.items()
    ]
    assert [run.name for run in without_repeats(runs)] == ["a", "b"]
    assert [group.label for group in group_runs(runs)] == ["lr=0.001", "lr=0.1"]


@pytest.mark.slow
def test_the_table_has_the_accuracy_of_puzzles_that_were_not_trained_on(sudoku_folder, tmp_path):
    run = read_run(write_run(tmp_path / "run", sudoku_folder, has_checkpoint=False))
    assert not {"trained on", "unseen"} & {*build_table(group_runs([run])).columns}
    clean = {"eval/clean/exact_accuracy": 0.5, "eval/clean/trained_on": 0}
    run.rows[-1].update({"eval/all/trained_on": 30, "eval/all/unseen/exact_accuracy": 0.1, **clean})
    (record,) = build_table(group_runs([run])).records
    assert (record["trained on"], record["unseen"]) == (30, pytest.approx(0.3))


def test_a_mean_of_seeds_is_over_steps_that_all_have_logged():
    """A run that max_steps ended and another command continued has a row more."""
    of_seeds, runs = {0: (10, 15, 20), 1: (10, 20)}, []
    for seed, steps in of_seeds.items():
        rows = [{"step": step, "eval/all/exact_accuracy": step / 40 + seed / 10} for step in steps]
        runs.append(RunRecord(Path(f"r{seed}"), {"seed": seed}, rows, [], {}, {}, None, None, []))
    (chart,) = comparison_charts(group_runs(runs), "training steps")
    (name,) = [name for name, _ in chart.legend]
    means = [text for *_, text in chart.points if text.startswith(f"{name} ")]
    assert [text.removeprefix(f"{name} ") for text in means] == [
        "0.300 at 10 training steps",
        "0.550 at 20 training steps",
    ]
