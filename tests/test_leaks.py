"""Test puzzles that are trained on: they are found, said, and the accuracy of the others is measured."""

from pathlib import Path

import numpy as np
import pytest

from dataset.format import open_dataset
from dataset.mixture import open_datasets
from evaluation.passes import evaluate_split
from tests import arc_source
from tests.ranks import complete_program, run_program
from tests.sudoku_source import HEADER, build_sets, source_rows, write_csv
from tests.tiny import OVERRIDES, halting_model, logged_rows, tiny_arch, tiny_config
from training.data import hold_out, open_data


def _build(folder: Path, *, train: list[list[str]], test: list[list[str]], num_aug: int = 0) -> Path:
    for name, rows in (("train", train), ("test", test)):
        write_csv(folder.with_suffix(".csv") / f"{name}.csv", rows, header=HEADER)
    build_sets("sudoku", folder, "--box", "2x2", "--source", folder.with_suffix(".csv"), "--num-aug", num_aug)
    return folder


@pytest.fixture(scope="module")
def leaky(tmp_path_factory) -> list[Path]:
    """Two folders. The training puzzles of `extra` contain the test puzzles 0, 2, 4, ... of `main`."""
    rows = [*{row[1]: row for row in source_rows(130)}.values()][:120]
    folder = tmp_path_factory.mktemp("data")
    main = _build(folder / "main", train=rows[:40], test=rows[40:60], num_aug=2)
    return [main, _build(folder / "extra", train=[*rows[40:60:2], *rows[60:90]], test=rows[90:])]


def _config(*folders: Path, **changes):
    arch = tiny_arch(puzzle_emb_ndim=0).model_dump()
    return tiny_config(data_path=list(map(str, folders)), arch=arch, **changes)


def _found(config) -> dict[str, list[int]]:
    return {name: leak.rows.tolist() for name, leak in open_data(config).leaks.found.items()}


def test_all_folders_stages_tests_and_held_out_puzzles_are_compared(leaky, capsys):
    main, extra = leaky
    every_second = [*range(0, 20, 2)]
    assert _found(_config(main)) == {"eval/all": []}
    assert "trained on" not in capsys.readouterr().err
    assert _found(_config(main, extra)) == {"eval/main.all": every_second, "eval/extra.all": []}
    said = f"10 of 20 test puzzles were trained on: set eval/main.all ({main}/test), the first is row 0."
    assert f"warning: {said} Their accuracy" in capsys.readouterr().err
    assert _found(_config(extra, test_data_path=[str(main)]))["test/main.all"] == every_second
    stage = {"data_path": [str(extra)], "epochs": 2}
    assert _found(_config(main, curriculum=[stage]))["eval/main.all"] == every_second
    with pytest.raises(SystemExit):
        _found(_config(main, extra, leaks="error"))
    assert f"error: leaks=error: {said} Remove them" in capsys.readouterr().err
    # A held-out puzzle of one folder is a training puzzle of its copy.
    copy = main.with_name("copy")
    _build(copy, train=_rows_of(main)[::-1], test=_rows_of(main)[:5])
    config = _config(main, copy, validation_fraction=0.3)
    held_out = hold_out(config, open_datasets([main, copy], read_everything=False))["all"]
    found = _found(config)["validation/all"]
    assert len(found) == sum(held_out[:40] ^ held_out[:39:-1]) > 0
    assert _found(_config(main, validation_fraction=0.3)) == {"eval/all": [], "validation/all": []}


def _rows_of(folder: Path) -> list[list[str]]:
    lines = (folder.with_suffix(".csv") / "train.csv").read_text().splitlines()[1:]
    return [line.split(",") for line in lines]


def test_checkpoints_leave_out_held_out_puzzles_and_stages_that_have_not_begun(leaky):
    main, extra = leaky
    stage = {"data_path": [str(extra)], "epochs": 2}
    data = open_data(_config(main, curriculum=[stage], validation_fraction=0.5))
    ends = data.plan.iteration_ends
    sizes = [len(data.trained_on(step).hashes) for step in (0, 1, ends[0], ends[0] + 1)]
    assert sizes == [0, 20, 20, 40]


def test_arc_counts_test_pairs_and_not_demonstrations(tmp_path):
    tasks = arc_source.make_tasks(8)
    first, other = ({key: tasks[key] for key in sorted(tasks)[part]} for part in (slice(5), slice(4, 8)))
    test = tasks[sorted(tasks)[1]]["test"]
    other["ffff"] = {"train": [*test, *tasks[sorted(tasks)[0]]["train"]], "test": other[max(other)]["test"]}
    del other[sorted(tasks)[4]]
    folders = []
    for name, each in (("first", first), ("other", other)):
        source = arc_source.write_folder(tmp_path / name / "evaluation", each)
        folders.append(tmp_path / f"{name}_data")
        arc_source.build(folders[-1], "--source", source, "--num-aug", 2)
    mixed = open_datasets(folders, read_everything=False)
    found = open_data(tiny_config(data_path=list(map(str, folders)))).leaks.found
    tested = mixed.splits["test"].sets["first_data.all"]
    expected = range(*tested.puzzle_indices[tested.group_indices[1:3]])  # of all three variants
    assert found["eval/first_data.all"].rows.tolist() == [*expected]
    assert not len(found["eval/other_data.all"].rows)
    alone = open_data(tiny_config(data_path=[str(folders[0])], global_batch_size=4))
    assert not len(alone.leaks.found["eval/all"].rows)  # demonstrations are in both splits


def test_the_accuracy_of_the_others_is_that_of_an_evaluation_without_them(leaky):
    data = open_data(_config(*leaky))
    model = halting_model(leaky[0], steps=3)
    own = open_dataset(leaky[0], read_everything=False)
    leaks = {"all": data.leaks.found["eval/main.all"]}
    metrics = evaluate_split(model, own, global_batch_size=7, leaks=leaks)["all"].metrics
    others = {"all": np.arange(1, 20, 2)}
    rest = evaluate_split(model, own, global_batch_size=7, puzzles=others)["all"].metrics
    assert (metrics["trained_on"], metrics["trained_on_rate"], metrics["unseen/count"]) == (10, 1, 10)
    for each in ("accuracy", "exact_accuracy", "q_halt_accuracy"):
        assert metrics[f"unseen/{each}"] == pytest.approx(rest[each], abs=1e-6)
    assert metrics["accuracy"] != metrics["unseen/accuracy"]
    clean = {"all": data.leaks.found["eval/extra.all"]}
    metrics = evaluate_split(model, own, global_batch_size=7, leaks=clean)["all"].metrics
    assert (metrics["trained_on"], metrics["trained_on_rate"]) == (0, 1)
    assert not any(each.startswith("unseen/") for each in metrics)


@pytest.mark.slow
def test_a_run_logs_the_same_on_any_number_of_ranks(leaky, tmp_path):
    words = (f"data_path=[{leaky[0]},{leaky[1]}]", *OVERRIDES, "epochs=2", "evaluators=[]")
    for ranks in (1, 2):
        finished = complete_program(
            "pretrain", *words, f"checkpoint_path={ranks}", folder=tmp_path, world_size=ranks
        )
        assert finished.stderr.count("10 of 20 test puzzles were trained on") == 1
    alone, both = (logged_rows(tmp_path / str(ranks))[-1] for ranks in (1, 2))
    names = {name for name in alone if "trained_on" in name or "unseen" in name}
    assert {"eval/main.all/unseen/exact_accuracy", "eval/extra.all/trained_on"} <= names
    for name in names:
        assert both[name] == pytest.approx(alone[name], abs=1e-4)
    words = (*words, "leaks=error", "checkpoint_path=3")
    finished = run_program("pretrain", *words, folder=tmp_path, world_size=2)
    assert set(finished.statuses) == {1}
    assert "leaks=error: 10 of 20" in finished.stderr
    assert not (tmp_path / "3").exists()
