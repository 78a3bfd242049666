"""Puzzles held out of training: which they are, that no step sees them, and how they are evaluated."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from checkpointing.files import STATE_FILE
from dataset.build.splits import make_split
from dataset.build.writing import write_dataset
from dataset.metadata import SPLITS
from dataset.mixture import open_datasets
from dataset.plan import EvaluationPlan, held_out_groups
from tests.checkpoints import seal
from tests.puzzle_sets import Groups, make_set, write
from tests.ranks import complete_program
from tests.sudoku_source import build_sets, source_rows
from tests.tiny import OVERRIDES, logged_rows, tiny_arch, tiny_config
from training.data import build_plan, hold_out

_GROUPS: Groups = [[1, 1], [2], [1, 3, 2], [1], [2, 2], [1], [1, 1], [3]]


def _without_embeddings(*folders: Path, **changes):
    arch = tiny_arch(puzzle_emb_ndim=0).model_dump()
    return tiny_config(data_path=list(map(str, folders)), arch=arch, global_batch_size=2, **changes)


def test_which_groups_are_held_out_depends_on_the_seed_alone():
    data = make_set(_GROUPS)
    chosen = {share: held_out_groups(data, seed=3, fraction=share) for share in (0.0, 0.25, 0.5, 0.99)}
    assert [int(groups.sum()) for groups in chosen.values()] == [0, 2, 4, 7]
    assert not (chosen[0.25] & ~chosen[0.5]).any(), "a smaller share is part of a larger one"
    assert (held_out_groups(make_set(_GROUPS, seed=5), seed=3, fraction=0.5) == chosen[0.5]).all()
    assert len({held_out_groups(data, seed=seed, fraction=0.5).tobytes() for seed in range(9)}) > 1


def test_of_every_folder_of_a_mixture_a_share_is_held_out(tmp_path):
    folders = [write(tmp_path / name, train={"all": _GROUPS}, test={"all": [[1]]}) for name in "ab"]
    mixed = open_datasets(folders, read_everything=False).splits["train"].sets["all"]
    alone = open_datasets(folders[:1], read_everything=False).splits["train"].sets["all"]
    groups = held_out_groups(mixed, seed=3, fraction=0.5)
    assert groups[: len(_GROUPS)].tolist() == held_out_groups(alone, seed=3, fraction=0.5).tolist()
    assert groups.sum() == len(_GROUPS)


def test_no_step_sees_a_held_out_group_and_all_others_are_seen(tmp_path):
    folder = write(tmp_path / "data", train={"all": _GROUPS}, test={"all": [[1]]})
    config = _without_embeddings(folder, validation_fraction=0.4, epochs=4, eval_interval=4)
    data = open_datasets([folder], read_everything=False)
    held_out = hold_out(config, data)[0]["all"]
    assert held_out.sum() == 3
    plan = build_plan(config, data, {"all": held_out})
    indices = data.splits["train"].sets["all"].group_indices
    seen = np.concatenate([batch.puzzles for batch in plan.batches()])
    assert set(indices.searchsorted(seen, side="right") - 1) == set((~held_out).nonzero()[0])


@pytest.mark.parametrize("global_batch_size", [1, 3, 100])
def test_chosen_puzzles_are_evaluated_with_all_their_examples(global_batch_size):
    data = make_set(_GROUPS)
    sizes = [size for group in _GROUPS for size in group]
    puzzles = np.array([0, 2, 4, 5, 12])
    plan = EvaluationPlan({"all": data}, global_batch_size=global_batch_size, puzzles={"all": puzzles})
    batches = list(plan.batches())
    assert all(len(batch.rows) == global_batch_size for batch in batches[:-1])
    firsts = np.cumsum([0, *sizes])
    expected = [row for puzzle in puzzles for row in range(firsts[puzzle], firsts[puzzle + 1])]
    assert np.concatenate([batch.rows for batch in batches]).tolist() == expected
    assert (
        np.concatenate([batch.puzzles for batch in batches]).tolist()
        == np.repeat(puzzles, [sizes[puzzle] for puzzle in puzzles]).tolist()
    )
    rest = [batch.rows.tolist() for batch in plan.batches(1)]
    assert rest == [batch.rows.tolist() for batch in batches[1:]]


def test_what_cannot_be_held_out_is_refused(tmp_path):
    folder = write(tmp_path / "data", train={"all": _GROUPS}, test={"all": [[1]]})
    data = open_datasets([folder], read_everything=False)
    with pytest.raises(ValueError, match=r"validation_fraction=0.1 selects none of 8 training puzzles"):
        hold_out(_without_embeddings(folder, validation_fraction=0.1), data)
    config = tiny_config(data_path=[str(folder)], validation_fraction=0.5)
    with pytest.raises(ValueError, match="'all' have their own embeddings"):
        hold_out(config, data)


# ----------------------------------------------------------------------------------------------- whole runs


def _run(cwd: Path, program: str, *overrides: str, world_size: int = 1):
    return complete_program(program, *overrides, folder=cwd, world_size=world_size, is_float64=True)


def _as_of_an_earlier_version(step: Path) -> None:
    state = json.loads((step / STATE_FILE).read_text())
    assert state.pop("joins_repeats")
    (step / STATE_FILE).write_text(json.dumps(state))
    seal(step)


@pytest.mark.long
@pytest.mark.slow
def test_repeated_puzzles_are_on_one_side_and_a_run_of_an_earlier_version_keeps_its_choice(tmp_path):
    """20 puzzles, each four times, in a folder of an earlier version."""
    texts = [[row[side].replace(".", "0") for side in (1, 2)] for row in source_rows(20)]
    pairs = np.array([[[1 + int(digit) for digit in text] for text in pair] for pair in texts], np.uint8)
    splits = {name: make_split(pairs.repeat(4, axis=0), vocab_size=6) for name in SPLITS}
    write_dataset(tmp_path / "data", splits=splits, identifiers=["<blank>"], builder={})
    words = (*OVERRIDES, "data_path=data", "validation_fraction=0.5", "evaluators=[]", "max_steps=2")
    warned, logged = {}, {}
    for ranks in (1, 2):
        _run(tmp_path, "pretrain", *words, f"checkpoint_path={ranks}", world_size=ranks)
        _as_of_an_earlier_version(shutil.copytree(tmp_path / str(ranks), tmp_path / f"old{ranks}") / "step_2")
        for name in (str(ranks), f"old{ranks}"):
            more = (f"checkpoint_path={name}", "max_steps=4")
            warned[name] = _run(tmp_path, "pretrain", *words, *more, world_size=ranks).stderr
            logged[name] = logged_rows(tmp_path / name)[-1]
    for name, text in warned.items():
        is_old = name.startswith("old")
        assert text.count("an earlier version started this run") == is_old
        state = json.loads((tmp_path / name / "step_4" / STATE_FILE).read_text())
        assert state["joins_repeats"] != is_old
        other = {"old1": "old2", "1": "2"}.get(name, name)
        for key in ("validation/all/count", "validation/all/lm_loss", "validation/all/trained_on"):
            assert logged[name][key] == pytest.approx(logged[other][key], rel=1e-9)
        assert (logged[name]["validation/all/trained_on"] > 0) == is_old
    assert logged["old1"]["validation/all/count"] == 40


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_selected_by_its_validation_puzzles(tmp_path):
    """80 puzzles with 2 further variants each, made while reading; 100 for testing."""
    folder = tmp_path / "sudoku"
    build_sets("sudoku", folder, "--generate", 80, "--box", "2x2", "--num-aug", 2)
    options = (*OVERRIDES, f"data_path={folder}", "validation_fraction=0.25", "keep_best=lm_loss")
    options += (f"test_data_path={folder}", "ema=0.5", "compile=false", "epochs=8", "eval_interval=2")
    _run(tmp_path, "pretrain", *options, "checkpoint_path=whole")
    whole = logged_rows(tmp_path / "whole")
    rows = [line for line in whole if "validation/all/lm_loss" in line]
    assert len(rows) == 4
    assert {(line["validation/all/count"], line["eval/all/count"]) for line in rows} == {(20, 100)}
    for line in rows:  # other test puzzles have a name of their own
        assert line[f"test/{folder.name}.all/lm_loss"] == line["eval/all/lm_loss"]
    values = {line["step"]: line["validation/all/lm_loss"] for line in rows}
    for line in rows:
        so_far = {step: value for step, value in values.items() if step <= line["step"]}
        assert line["best/lm_loss"] == min(so_far.values())
        assert so_far[line["best/step"]] == line["best/lm_loss"]
        assert line["best/selected_by"] == "validation"

    # On two processes, stopped on the way, it is the same run.
    _run(tmp_path, "pretrain", *options, "checkpoint_path=run", f"max_steps={rows[1]['step']}", world_size=2)
    _run(tmp_path, "pretrain", *options, "checkpoint_path=run")
    for ours, theirs in zip(logged_rows(tmp_path / "run"), whole, strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("validation/all/lm_loss", "eval/all/lm_loss", "best/lm_loss", "best/step"):
            assert ours.get(name) == (pytest.approx(theirs[name], rel=1e-9) if name in theirs else None), name

    # The best is evaluated by its name, and says who chose it.
    finished = _run(tmp_path, "evaluate", "checkpoint=whole/best", "device=cpu", "output_dir=out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["all"]
    assert metrics["selected_by"] == "validation"
    best = next(line for line in rows if line["step"] == rows[-1]["best/step"])
    assert metrics["lm_loss"] == pytest.approx(best["eval/all/lm_loss"], rel=1e-9)
    assert any(
        line.split() == ["selected", "on", "(selected_by)", "validation"]
        for line in finished.stdout.splitlines()
    )
