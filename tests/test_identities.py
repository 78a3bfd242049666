"""Puzzle embeddings are found by the identity of their puzzles, not by the number of a row."""

import dataclasses
import functools
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model, load_weights, take_rows
from config.compose import config_with
from config.programs import PageConfig, SolveConfig
from dataset.files import DIGESTS, IDENTIFIERS
from dataset.identities import Identities, identities_of, read_identities
from dataset.mixture import fingerprint_of, open_datasets
from evaluation.known import check_same_rows, find_match, known_puzzles
from share.browser import prepare
from solve import load
from tests.arc_source import build, make_tasks, write_folder
from tests.ranks import NUM_THREADS, complete_program, run_program
from tests.solvers import save_run
from tests.tiny import OVERRIDES, tiny_arch
from training.run_folder import write_identities

_TABLE = "puzzle_emb.weights"
_RUN = (*OVERRIDES, "data_path=data/own", "eval_interval=null", "epochs=8", "arch.halt_max_steps=2")
_RUN += ("checkpoint_path=run", "puzzle_emb_lr=1", "arch.H_cycles=1", "arch.L_cycles=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six tasks; five of them in other rows, with another one; and other tasks of the same names."""
    folder = tmp_path_factory.mktemp("identities")
    common = ("--max-size", 8, "--dihedral")
    build(folder / "data" / "own", "--generate", 10, "--skip", 4, *common)
    build(folder / "data" / "shifted", "--generate", 11, "--skip", 5, *common)
    build(folder / "data" / "others", "--generate", 10, "--skip", 4, "--seed", 1, *common)
    return folder


def _open(folder, *names: str):
    return open_datasets([folder / "data" / name for name in names], splits=("test",), read_everything=False)


def _identities(folder, *names: str) -> Identities:
    return identities_of(_open(folder, *names))


def test_a_page_has_the_embeddings_of_its_puzzles(folder, tmp_path):
    """The dataset has other numbers, and a task that the model does not know."""
    small = {"hidden_size": 16, "puzzle_emb_ndim": 16, "H_cycles": 1, "L_cycles": 1}
    run = save_run(tmp_path / "run", folder / "data" / "own", name="trm", puzzle_emb_len=1, **small)
    (run / "identities.npz").write_bytes(_identities(folder, "own").to_bytes())
    shifted, checkpoint = str(folder / "data" / "shifted"), find_checkpoint(run)
    page = prepare(checkpoint, config_with(PageConfig, checkpoint=str(run), output="x", data_path=shifted))
    names = json.loads((folder / "data" / "own" / IDENTIFIERS).read_text())
    weights, puzzles = load_weights(checkpoint)[_TABLE], page.facts["puzzles"]
    assert len({puzzle["name"] for puzzle in puzzles}) == 5
    table = page.model.network.puzzle_emb.weights
    for puzzle in puzzles:
        assert torch.equal(table[puzzle["identifier"]], weights[names.index(puzzle["name"])])


def test_an_identity_is_a_name_and_a_task(folder):
    own, shifted, others = (_identities(folder, name) for name in ("own", "shifted", "others"))
    assert own.names == others.names
    assert not own.equals(others)
    match = own.match(shifted)
    names = [json.loads((folder / "data" / name / IDENTIFIERS).read_text()) for name in ("own", "shifted")]
    assert match.num_rows == 49
    assert match.num_additional == 8
    assert not match.is_other.any()
    assert (match.rows >= 0).sum() == 1 + 5 * 8
    for name, row in zip(names[1], match.rows.tolist(), strict=True):
        assert row == (names[0].index(name) if name in names[0] else -1)
    match = own.match(others)
    assert match.is_other.tolist() == [False] + 48 * [True]
    assert match.rows.tolist() == [0] + 48 * [-1]
    unknown = dataclasses.replace(others, digests=np.zeros(49, np.uint64))
    assert own.match(unknown).rows.tolist() == [*range(49)]


def test_the_order_of_demonstrations_and_the_role_of_a_task_do_not_matter(tmp_path):
    tasks = make_tasks(3)
    turned = {name: {**task, "train": task["train"][::-1]} for name, task in tasks.items()}
    both = ("--evaluate", "training", "--evaluate", "evaluation")
    for name, content, more in (("a", tasks, ()), ("b", turned, both)):
        for seed, subset in enumerate(("training", "evaluation")):
            write_folder(tmp_path / name / subset, content if not seed else make_tasks(3, seed=9))
        build(tmp_path / "data" / name, "--source", tmp_path / name, "--dihedral", *more)
    a, b = (_identities(tmp_path, name) for name in "ab")
    assert a.equals(b)
    assert (a.digests[1:] > 0).all()


def test_in_a_mixture_the_folder_belongs_to_the_identity(folder):
    both = _identities(folder, "own", "shifted")
    assert both.match(_identities(folder, "shifted", "own")).rows.tolist() == [*range(49, 98), *range(49)]
    assert both.match(_identities(folder, "shifted")).rows.tolist() == [*range(49, 98)]
    assert (both.match(_identities(folder, "others")).rows == -1).all()


def test_the_file_is_small_and_checked_when_read(folder, tmp_path, monkeypatch):
    path = tmp_path / "identities.npz"
    assert read_identities(path) is None
    own = _identities(folder, "own", "shifted")
    path.write_bytes(own.to_bytes())
    assert read_identities(path).equals(own)
    assert path.stat().st_size < 3000
    assert own.to_bytes() == path.read_bytes()
    for forged in (
        b"",
        path.read_bytes()[:-30],
        dataclasses.replace(own, digests=own.digests[1:]).to_bytes(),
        dataclasses.replace(own, digests=own.digests.astype(np.int64)).to_bytes(),
        dataclasses.replace(own, sizes=(-1, 99)).to_bytes(),
        dataclasses.replace(own, sizes=(math.inf, 49)).to_bytes(),
    ):
        path.write_bytes(forged)
        with pytest.raises(ValueError, match=r"^[^\n]*identities.npz [^\n]*Delete it\. [^\n]*\.$"):
            read_identities(path)
    path.write_bytes(own.to_bytes())
    monkeypatch.setattr("dataset.identities._MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_identities(path)
    assert dataclasses.replace(own, sizes=(48, 50)).match(own) is None  # as many names as another number


def test_a_missing_row_is_the_mean():
    table = torch.arange(8.0).reshape(4, 2)
    assert take_rows(table, np.array([3, -1, 0])).tolist() == [[6, 7], [3, 4], [0, 1]]


def _checkpoint(path, *, has_embeddings: bool = True) -> SimpleNamespace:
    arch = SimpleNamespace(has_puzzle_embeddings=has_embeddings)
    return SimpleNamespace(arch=arch, identities_file=path, fingerprint=None, dataset_info=None)


def test_who_is_matched_by_number_and_who_is_warned(folder, tmp_path, capsys):
    path = tmp_path / "identities.npz"
    path.write_bytes(_identities(folder, "own").to_bytes())
    assert find_match(_checkpoint(path), _open(folder, "own")) is None
    assert find_match(_checkpoint(path, has_embeddings=False), _open(folder, "shifted")) is None
    assert find_match(_checkpoint(path), _open(folder, "shifted")) is not None
    assert capsys.readouterr() == ("", "")
    assert find_match(_checkpoint(tmp_path / "none.npz"), _open(folder, "own")) is None
    assert "matched by number" in capsys.readouterr().err
    shutil.copytree(folder / "data" / "own", tmp_path / "data" / "nameless")
    (tmp_path / "data" / "nameless" / IDENTIFIERS).unlink()
    assert find_match(_checkpoint(path), _open(tmp_path, "nameless")) is None
    assert "nameless does not name its puzzle identifiers" in capsys.readouterr().err
    (tmp_path / "data" / "nameless" / DIGESTS).write_bytes(b"no array")
    (tmp_path / "data" / "nameless" / IDENTIFIERS).write_text("[]")
    with pytest.raises(ValueError, match=r"digests.npy cannot be read .*Build the dataset again\.$"):
        find_match(_checkpoint(path), _open(tmp_path, "nameless"))


def test_folders_without_named_tasks_are_matched_by_their_names(sudoku_folder, tmp_path):
    for name in ("easy", "hard"):
        shutil.copytree(sudoku_folder, tmp_path / "data" / name)
    path = tmp_path / "identities.npz"
    write_identities(tmp_path, tiny_arch(), _open(tmp_path, "easy", "hard"), is_new=True)
    assert find_match(_checkpoint(path), _open(tmp_path, "easy", "hard")) is None
    assert find_match(_checkpoint(path), _open(tmp_path, "hard", "easy")).rows.tolist() == [1, 0]
    assert find_match(_checkpoint(path), _open(tmp_path, "hard")).rows.tolist() == [1]
    (tmp_path / "data" / "hard").rename(tmp_path / "data" / "new")
    renamed, checkpoint = _open(tmp_path, "easy", "new"), _checkpoint(path)
    assert find_match(checkpoint, renamed).rows.tolist() == [0, -1]
    checkpoint.fingerprint = fingerprint_of(renamed.folders)
    assert find_match(checkpoint, renamed) is None


def test_only_known_puzzles_are_left(folder, capsys):
    data, own = _open(folder, "shifted"), _identities(folder, "own")
    match = own.match(identities_of(data))
    _, puzzles, metrics = known_puzzles(data, match, model="the model")
    identifiers = data.splits["test"].sets["all"].puzzle_identifiers
    assert (match.rows[identifiers[puzzles["all"]]] > 0).all()
    assert len(puzzles["all"]) == 40
    counts = {"common": 40, "missing": 8, "additional": 8, "other_task": 0}
    assert metrics == {"all": {f"identifiers_{name}": count for name, count in counts.items()}}
    assert (
        "40 with an embedding, 8 without, 0 with the name of another task, 8 embeddings"
        in capsys.readouterr().out
    )
    data = _open(folder, "shifted", "own")
    data, puzzles, _ = known_puzzles(data, own.match(identities_of(data)), model="the model")
    assert [*data.splits["test"].sets] == ["own.all"]
    assert puzzles.keys() == {"own.all"}
    data = _open(folder, "others")
    problem = "0 with an embedding, 0 without, 48 with the name of another task, 0 embeddings"
    match = own.match(identities_of(data))
    with pytest.raises(ValueError, match=f"no embedding .* {problem}"):
        known_puzzles(data, match, model="the model")


def test_test_data_with_other_rows_are_refused(folder):
    own = _open(folder, "own")
    check_same_rows(own, own)
    for name, count in (("shifted", 32), ("others", 48)):
        with pytest.raises(ValueError, match=f"^test_data_path: {count} of 48 puzzle .*{name}"):
            check_same_rows(own, _open(folder, name))


@pytest.mark.slow
def test_an_evaluation_of_other_data_uses_the_rows_of_the_known_tasks(folder):
    """The answers are those to the same puzzles of the own data, on any number of processes."""
    complete_program("pretrain", *_RUN, folder=folder, world_size=2, is_float64=True)

    def evaluate(name: str, **options) -> tuple[dict, np.ndarray, list[str]]:
        words = ("checkpoint=run", f"data_path=data/{name}", "evaluators=[arc]", f"output_dir={name}")
        words += ("save_outputs=[logits,puzzle_identifiers]", "device=cpu", f"cpu_threads={NUM_THREADS}")
        complete_program("evaluate", *words, folder=folder, is_float64=True, **options)
        outputs = np.load(folder / name / "all__outputs.npz")
        names = json.loads((folder / "data" / name / IDENTIFIERS).read_text())
        named = [names[each] for each in outputs["puzzle_identifiers"]]
        return json.loads((folder / name / "metrics.json").read_text())["all"], outputs["logits"], named

    (own, expected, names), (metrics, logits, named) = evaluate("own"), evaluate("shifted", world_size=2)
    assert not [name for name in own if name.startswith("identifiers")]
    assert (metrics["identifiers_common"], metrics["identifiers_missing"]) == (40, 8)
    assert metrics["arc/count"] == 5
    assert metrics["count"] == 80
    assert metrics["distinct_count"] == 10
    assert set(named) < set(names)
    assert len(set(named)) == 40
    for name in set(named):
        answers = ((logits, named), (expected, names))
        ours, theirs = (array[[each == name for each in of]] for array, of in answers)
        assert np.allclose(ours, theirs, atol=1e-6)

    words = ("checkpoint=run", "data_path=data/others", "device=cpu")
    finished = run_program("evaluate", *words, folder=folder, world_size=2)
    assert finished.statuses != [0, 0]
    assert "48 with the name of another task" in finished.stderr

    checkpoint, data = find_checkpoint(folder / "run"), _open(folder, "shifted")
    rows = find_match(checkpoint, data).rows
    table = load_weights(checkpoint)[_TABLE]
    model = load_trained_model(checkpoint, data.metadata, rows=rows)
    assert torch.equal(model.network.puzzle_emb.weights[rows >= 0], table[rows[rows >= 0]].float())

    for name, is_known in (("shifted", True), ("others", False)):
        solver = load(folder / "run", data_path=folder / "data" / name, device="cpu")
        tasks = json.loads((folder / "data" / name / "test_puzzles.json").read_text())
        asked = config_with(SolveConfig, checkpoint="run", puzzle=json.dumps(tasks["mirror_1"]))
        puzzle = solver.questions.read(asked)
        find = functools.partial(solver.questions.find_identifier, puzzle)
        config = config_with(SolveConfig, checkpoint="run", puzzle="")
        if not is_known:
            with pytest.raises(ValueError, match="has no embedding for the puzzle identifier 33 of .*others"):
                find(config)
        else:
            names = json.loads((folder / "data" / "own" / IDENTIFIERS).read_text())
            assert names[find(config)] == "mirror_1"

    words = (*_RUN, "data_path=data/shifted", "checkpoint_path=next", "init_from=run", "max_steps=1", "lr=0")
    words += ("puzzle_emb_lr=0", "puzzle_emb_weight_decay=0")
    for sharding in ("replicated", "rows"):
        words += (f"puzzle_emb_sharding={sharding}", f"checkpoint_path=next_{sharding}")
        finished = complete_program("pretrain", *words, folder=folder, world_size=2, is_float64=True)
        assert "41 of 49 puzzle embeddings are copied" in finished.stdout
        begun = load_weights(find_checkpoint(folder / f"next_{sharding}"))[_TABLE]
        assert torch.equal(begun, take_rows(table, rows))
