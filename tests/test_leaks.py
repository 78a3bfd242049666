"""Test puzzles that are trained on: they are found, said, and the accuracy of the others is measured."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from checkpointing.files import TRAINED_FILE
from checkpointing.finding import find_checkpoint
from dataset.build.splits import make_split
from dataset.build.writing import write_dataset
from dataset.equal import Trained, hash_examples
from dataset.files import open_dataset
from dataset.mixture import open_datasets
from dataset.plan import held_out_groups
from evaluation.evaluators import Evaluators
from evaluation.intervals import wilson_interval
from evaluation.leaks import Leaks, find_trained
from evaluation.passes import evaluate_split
from evaluation.results import all_metrics
from tests import arc_source
from tests.checkpoints import state_on
from tests.ranks import complete_program, run_program
from tests.sudoku_source import HEADER, build_sets, source_rows, write_csv
from tests.tiny import OVERRIDES, halting_model, logged_rows, tiny_arch, tiny_config
from training.checkpoints import CheckpointManager
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
    data = open_data(_config(main, extra))
    data.leaks.broadcast_find(data.trained_on(1), model="the checkpoint that this run started from")
    assert said not in capsys.readouterr().err, "the console leaves out an equal warning"
    assert _found(_config(extra, test_data_path=[str(main)]))["test/main.all"] == every_second
    stage = {"data_path": [str(extra)], "epochs": 2}
    assert _found(_config(main, curriculum=[stage]))["eval/main.all"] == every_second
    with pytest.raises(SystemExit):
        _found(_config(main, extra, leaks="error"))
    assert f"error: leaks=error: {said} Remove them" in capsys.readouterr().err
    # The puzzles of a folder and of its copy are held out together.
    copy = main.with_name("copy")
    _build(copy, train=_rows_of(main)[::-1], test=_rows_of(main)[:5])
    config = _config(main, copy, validation_fraction=0.3)
    held_out = hold_out(config, open_datasets([main, copy], read_everything=False))[0]["all"]
    assert held_out[:40].tolist() == held_out[:39:-1].tolist()
    assert _found(config)["validation/all"] == []
    # An earlier version did not do so. A run of that version keeps its choice.
    step = main.with_name("run") / "step_1"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    config = config.model_copy(update={"checkpoint_path": str(step.parent)})
    data = open_datasets([main, copy], read_everything=False)
    old = held_out_groups(data.splits["train"].sets["all"], seed=config.seed, fraction=0.3)
    capsys.readouterr()
    chosen, joins_repeats = hold_out(config, data)
    assert (chosen["all"].tolist(), joins_repeats) == (old.tolist(), False)
    said = f"({sum(old ^ held_out)} puzzles would now be split differently)"
    assert capsys.readouterr().err.count(f"an earlier version started this run {said}") == 1
    # The newest checkpoint is damaged: the one before it counts.
    step.with_name("step_2").mkdir()
    assert hold_out(config, data)[1] is False
    (step / "state.json").write_text('{"joins_repeats": true}')
    assert hold_out(config, data)[1] is True
    (step / "state.json").write_text("{}")
    assert len(_found(config)["validation/all"]) == sum(old[:40] ^ old[:39:-1]) > 0
    capsys.readouterr()
    assert _found(_config(main, validation_fraction=0.3, resume=str(step)))["validation/all"] == []
    assert "earlier version" not in capsys.readouterr().err  # without repeats, both choices are the same
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
        arc_source.build(folders[-1], "--source", source, "--num-aug", 2, "--max-size", 6)
    mixed = open_datasets(folders, read_everything=False)
    found = open_data(tiny_config(data_path=list(map(str, folders)))).leaks.found
    tested = mixed.splits["test"].sets["first_data.all"]
    expected = range(*tested.puzzle_indices[tested.group_indices[1:3]])  # of all three variants
    assert 3 * found["eval/first_data.all"].num_distinct == tested.num_examples
    assert found["eval/first_data.all"].rows.tolist() == [*expected]
    assert not len(found["eval/other_data.all"].rows)
    own = open_dataset(folders[0], read_everything=False)
    options = {"leaks": {"all": found["eval/first_data.all"]}, "evaluators": Evaluators(["arc"], own)}
    metrics = evaluate_split(halting_model(folders[0], steps=2), own, global_batch_size=9, **options)
    metrics, num_inputs = metrics["all"].metrics, sum(len(task["test"]) for task in first.values())
    assert (metrics["arc/count"], metrics["arc/test_inputs"]) == (5, num_inputs)
    assert (metrics["unseen/arc/count"], metrics["unseen/arc/test_inputs"]) == (4, num_inputs - len(test))
    alone = open_data(tiny_config(data_path=[str(folders[0])], global_batch_size=4))
    assert not len(alone.leaks.found["eval/all"].rows)  # demonstrations are in both splits


def test_repeated_test_puzzles_have_the_interval_of_different_ones(leaky, tmp_path):
    test = open_dataset(leaky[0], read_everything=False).splits["test"].sets["all"]
    pairs = np.stack([test.inputs, test.labels], axis=1)
    splits = {name: make_split(pairs.repeat(5, axis=0), vocab_size=6) for name in ("train", "test")}
    write_dataset(tmp_path / "data", splits=splits, identifiers=["<blank>"], builder={})
    data = open_data(_config(tmp_path / "data"))
    leaks = {"all": data.leaks.found["eval/all"]}
    model = halting_model(leaky[0], steps=3)
    results = evaluate_split(model, data.dataset, global_batch_size=7, leaks=leaks)
    values = all_metrics(results, selected_by=None, forward_dtype=None)["all"]
    assert (values["count"], values["distinct_count"]) == (100, 20)
    ends = wilson_interval(values["accuracy"], 20)
    assert (values["accuracy_low"], values["accuracy_high"]) == pytest.approx(ends)


def test_the_accuracy_of_the_others_is_that_of_an_evaluation_without_them(leaky):
    data = open_data(_config(*leaky))
    model = halting_model(leaky[0], steps=3)
    own = open_dataset(leaky[0], read_everything=False)
    leaks = {"all": data.leaks.found["eval/main.all"]}
    options = {"global_batch_size": 7, "evaluators": Evaluators(["sudoku"], own)}
    metrics = evaluate_split(model, own, leaks=leaks, **options)["all"].metrics
    others = {"all": np.arange(1, 20, 2)}
    options["evaluators"] = Evaluators(["sudoku"], own)
    rest = evaluate_split(model, own, puzzles=others, **options)["all"].metrics
    assert (metrics["trained_on"], metrics["trained_on_rate"], metrics["unseen/count"]) == (10, 1, 10)
    of_kind = ("sudoku/count", "sudoku/valid_accuracy", "sudoku/exact_accuracy")
    for each in ("accuracy", "exact_accuracy", "q_halt_accuracy", *of_kind):
        assert metrics[f"unseen/{each}"] == pytest.approx(rest[each], abs=1e-6)
    assert metrics["accuracy"] != metrics["unseen/accuracy"]
    clean = {"all": data.leaks.found["eval/extra.all"]}
    metrics = evaluate_split(model, own, global_batch_size=7, leaks=clean)["all"].metrics
    assert (metrics["trained_on"], metrics["trained_on_rate"]) == (0, 1)
    assert not any(each.startswith("unseen/") for each in metrics)


def test_a_sample_gives_an_estimate_and_unknown_puzzles_a_lower_bound(leaky, capsys):
    own = open_dataset(leaky[0], read_everything=False)
    tested = own.splits["test"].sets["all"]
    hashes = hash_examples(tested, "test", own.folders)
    model = halting_model(leaky[0], steps=3)

    def measure(trained: Trained | None) -> dict[str, float]:
        leaks = Leaks("warn")
        leaks.add("all", tested, "test", own.folders)
        leaks.broadcast_find(trained, model="the model")
        metrics = evaluate_split(model, own, global_batch_size=7, leaks=leaks.found)["all"].metrics
        return {name: value for name, value in metrics.items() if "trained" in name or "unseen" in name}

    half = Trained.of([hashes[::2]]).sample(0.5)
    num_known = (hashes < 2**63).sum()
    low, high = wilson_interval(len(half.hashes) / num_known, num_known)
    estimate = {"trained_on_rate": 0.5, "trained_on": 20 * len(half.hashes) / num_known}
    estimate |= {"trained_on_low": 20 * low, "trained_on_high": 20 * high}
    assert measure(half) == pytest.approx(estimate)
    shown = f"about {estimate['trained_on']:.0f} ({20 * low:.0f} to {20 * high:.0f}) of 20 test puzzles"
    assert shown in capsys.readouterr().err
    assert measure(Trained.of([hashes[:3]], is_complete=False)) == {"trained_on_rate": 0, "trained_on": 3}
    said = capsys.readouterr()
    assert "at least 3 of 20 test puzzles were trained on" in said.err
    assert "Some training puzzles of the model are unknown, so some test puzzles may be" in said.out
    assert measure(None) == {"trained_on_rate": 0}
    assert measure(Trained.of([hashes])) == {"trained_on_rate": 1, "trained_on": 20, "unseen/count": 0}


def _save(run: Path, config, **options) -> Path:
    run.mkdir()
    state = state_on(Path(config.data_path[0]), config)
    state.step = 1
    with CheckpointManager(run, config=config, **options) as checkpoints:
        checkpoints.save(state)
    return run / "step_1"


def test_a_checkpoint_knows_its_examples_by_its_file_or_by_unchanged_data(leaky, tmp_path):
    config = _config(leaky[0], validation_fraction=0.5)
    data = open_data(config)
    own, described = data.trained_on(1).hashes.tolist(), {"fingerprint": data.fingerprint}
    assert len(own) == 20
    new = _save(tmp_path / "new", config, trained_on=data.trained_on, **described)
    old = _save(tmp_path / "old", config, **described)
    assert not (old / TRAINED_FILE).exists()
    for each in (new, old):
        found = find_trained(find_checkpoint(each))
        assert (found.hashes.tolist(), found.rate, found.is_complete) == (own, 1, True)
    assert find_trained(find_checkpoint(_save(tmp_path / "other", config, fingerprint="x"))) is None
    later = config.model_copy(update={"init_from": str(new)})
    assert not find_trained(find_checkpoint(_save(tmp_path / "later", later, **described))).is_complete
    # Without the file, held-out puzzles are those that the run's version selects.
    _build(tmp_path / "copy", train=_rows_of(leaky[0])[::-1], test=_rows_of(leaky[0])[:5])
    config = _config(leaky[0], tmp_path / "copy", validation_fraction=0.5)
    described = {"fingerprint": open_data(config).fingerprint}
    joined = _save(tmp_path / "joined", config, **described)
    apart = _save(tmp_path / "apart", config, joins_repeats=False, **described)
    assert len(find_trained(find_checkpoint(joined)).hashes) == 20
    assert len(find_trained(find_checkpoint(apart)).hashes) > 20
    (new / TRAINED_FILE).write_bytes(b"")
    with pytest.raises(ValueError, match="corrupt"):
        find_checkpoint(new)


def test_a_run_also_knows_the_examples_of_the_checkpoint_that_it_started_from(leaky, tmp_path):
    first, second = (open_data(_config(folder)) for folder in leaky)
    new = _save(tmp_path / "new", _config(leaky[0]), fingerprint="a", trained_on=first.trained_on)
    unknown = _save(tmp_path / "unknown", _config(leaky[0]), fingerprint="a")
    number = {each: len(data.trained_on(1).hashes) for each, data in (("a", first), ("b", second))}

    def resume(run: Path, **changes) -> tuple[int, bool]:
        run.mkdir(exist_ok=True)
        config = _config(leaky[1], **changes)
        with CheckpointManager(run, config=config, fingerprint="a", trained_on=second.trained_on) as manager:
            manager.resume(state_on(leaky[1], config))
            found = manager.trained_at(1)
        return len(found.hashes), found.is_complete

    assert resume(tmp_path / "nothing") == (number["b"], True)
    assert resume(tmp_path / "started", init_from=str(new)) == (number["a"] + number["b"], True)
    assert resume(tmp_path / "branch", resume=str(new)) == (number["a"] + number["b"], True)
    assert resume(tmp_path / "doubtful", init_from=str(unknown)) == (number["b"], False)
    assert resume(new.parent) == (number["a"] + number["b"], True)
    # An earlier version saved the checkpoint of this run.
    assert resume(unknown.parent) == (number["b"], True)
    assert resume(unknown.parent, init_from=str(new)) == (number["b"], False)


@pytest.mark.slow
def test_evaluate_states_what_a_run_and_its_predecessor_were_trained_on(leaky, tmp_path):
    main, extra = leaky
    words = (*OVERRIDES, "epochs=2")
    second = [f"data_path={main}", "init_from=first"]
    for ranks, name, more in ((1, "first", [f"data_path={extra}"]), (2, "second", second)):
        options = {"folder": tmp_path, "world_size": ranks}
        finished = complete_program("pretrain", *words, *more, f"checkpoint_path={name}", **options)
    assert finished.stderr.count("10 of 20 test puzzles were trained on: set eval/all") == 1
    logged = logged_rows(tmp_path / "second")[-1]
    found = []
    for ranks in (1, 2):
        words = ("checkpoint=second", f"output_dir={ranks}")
        finished = complete_program("evaluate", *words, folder=tmp_path, world_size=ranks)
        assert finished.stderr.count(f"10 of 20 test puzzles were trained on: set all ({main}/test)") == 1
        assert re.search(r"^trained on \(trained_on\) +10$", finished.stdout, re.MULTILINE)
        found.append(json.loads((tmp_path / str(ranks) / "metrics.json").read_text())["all"])
        for name in ("trained_on", "trained_on_rate", "unseen/exact_accuracy", "unseen/count"):
            assert found[-1][name] == pytest.approx(logged[f"eval/all/{name}"], abs=1e-4)
    training = (*OVERRIDES, f"data_path=[{main},{extra}]", "checkpoint_path=third")
    for program, words in (("pretrain", training), ("evaluate", ("checkpoint=second", "output_dir=3"))):
        finished = run_program(program, *words, "leaks=error", folder=tmp_path, world_size=2)
        assert set(finished.statuses) == {1}
        assert "leaks=error: 10 of 20" in finished.stderr
    assert not (tmp_path / "third").exists()
