"""share: a model as ONNX answers as in torch, and the folder of its page has what a browser needs."""

import base64
import hashlib
import json
import os
import shutil
import signal
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from config.compose import config_with
from config.files import load_defaults
from config.programs import PageConfig
from config.schema import validate_config
from dataset.build import build_dataset
from dataset.drawing import page_style
from dataset.files import open_dataset
from dataset.kinds.kind import find_kind, kind_names
from dataset.kinds.maze import rules as maze
from dataset.kinds.sudoku import check_answers as check_sudoku
from dataset.kinds.sudoku.rules import BOXES, count_solutions
from dataset.metadata import usual_metadata
from models import HaltingModel
from models.carry import Reasoning
from share import browser
from share.__main__ import main
from share.browser import choose_puzzles, keep_embeddings, write_page
from share.onnx import check_packages, write_step
from tests.checkpoints import save_on
from tests.puzzle_sets import IGNORED, write
from tests.ranks import start_program
from tests.solvers import save_run
from tests.tiny import FACTS, random_batch, tiny_model
from tests.waiting import wait_for

_SLOTS = 3


def _write(run: Path, output: Path, **values) -> None:
    given = {"checkpoint": str(run), "output": str(output), **values}
    write_page(validate_config(PageConfig, load_defaults("page") | given))


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder that stands for the npm package."""
    folder = tmp_path / "package"
    (folder / "dist").mkdir(parents=True)
    for name in browser.FILES:
        (folder / "dist" / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sudoku_folder) -> Path:
    """A tiny HRM that computes in bfloat16, on 4x4 Sudoku; its Q head says something."""

    def shake(state):
        with torch.no_grad():
            state.model.network.q_head.weight.normal_(generator=torch.Generator().manual_seed(0))

    folder = tmp_path_factory.mktemp("trained")
    cycles = {"H_cycles": 1, "L_cycles": 1, "gradient_cycles": 0}
    return save_on(sudoku_folder, folder / "run", train=shake, forward_dtype="bfloat16", **cycles)


def _assert_same_answers(path: Path, model: HaltingModel, *, num_steps: int, num_identifiers: int) -> None:
    """Compares all outputs of all steps with torch's; one slot starts anew on the way, its state broken."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    batch, seq_len = random_batch(_SLOTS), FACTS.seq_len
    tokens, identifiers = batch.inputs % 6, batch.puzzle_identifiers % num_identifiers
    network = model.network
    state = fresh = network.initial_state(_SLOTS, seq_len=seq_len)
    fed = {name: np.full(tensor.shape, np.nan, np.float32) for name, tensor in state.items()}
    for step in range(num_steps):
        starts = torch.tensor([step == 0, step in (0, 2), step == 0])
        for name in fed:
            begins = starts.view(-1, *[1] * (fed[name].ndim - 1))
            fed[name] = np.where(begins.numpy(), np.nan, fed[name])
            state[name] = torch.where(begins, fresh[name], state[name])
        feeds = {"inputs": tokens.numpy(), "puzzle_identifiers": identifiers.numpy(), **fed}
        feeds |= {"starts": starts.numpy()} if fed else {}
        found = dict(zip(names, session.run(None, feeds), strict=True))
        with torch.inference_mode():
            state, prediction = model.network(
                state, tokens, identifiers, reasoning=model.eval_reasoning("max")
            )
        expected = {f"next_{name}": tensor for name, tensor in state.items()} | prediction._asdict()
        expected["wants_to_halt"] = network.wants_to_halt(state, prediction)
        expected = {name: tensor.numpy() for name, tensor in expected.items() if tensor is not None}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
        fed = {name: found[f"next_{name}"] for name in fed}


@pytest.mark.long
@pytest.mark.slow
def test_onnx_looks_at_boards_as_torch_does(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    network = tiny_model("ldt").eval().network
    reasoning = Reasoning(1, halting="max", loops=2)
    assert write_step(network, reasoning, tmp_path / "model.onnx", seq_len=FACTS.seq_len) == {}
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    alive = (torch.rand(_SLOTS, FACTS.seq_len, len(network.values)) < 0.7).float()
    with torch.inference_mode():
        expected = network.look(alive, None, loops=2).last()._asdict()
    assert [each.name for each in session.get_outputs()] == list(expected)
    for found, value in zip(session.run(None, {"alive": alive.numpy()}), expected.values(), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_page_keeps_its_other_models(trained, files, tmp_path, monkeypatch):
    """An export takes many seconds. Here, model.onnx is an empty file."""
    monkeypatch.setattr(browser, "write_step", lambda network, reasoning, path, **_: path.touch())
    page, second = tmp_path / "page", tmp_path / "second"
    shutil.copytree(trained, second)
    for run, replace, expected in (
        (trained, False, ["run"]),
        (second, False, ["second", "run"]),
        (trained, False, ["run", "second"]),
        (second, True, ["second"]),
    ):
        if expected == ["run", "second"]:  # the replacement before was killed after it had moved the page
            scratch = page.with_name("page.unfinished")
            (scratch / "new").mkdir(parents=True)
            (scratch / "lock").touch()
            page.rename(scratch / "old")
        _write(run, page, runtime=str(files), puzzles=2, replace=replace)
        listed = json.loads((page / "models.json").read_text())
        assert [entry["name"] for entry in listed] == expected
        assert {path.parent.name for path in page.glob("*/model.onnx")} == set(expected)
    (page / "models.json").write_text('[{"name": "../run"}]')
    with pytest.raises(
        ValueError, match=r"models.json does not list the models of this page. Set replace=true"
    ):
        _write(trained, page, runtime=str(files))
    for folder, name in ((tmp_path, ".."), (page, ""), (page / "page.js", "page.js")):
        if folder.is_file():
            folder.unlink()
        folder.mkdir(exist_ok=True)
        (folder / "model.onnx").touch()
        (page / "models.json").write_text(json.dumps([{"name": name}]))
        with pytest.raises(ValueError, match=rf"models.json: '{name}' is not the name of a model's folder"):
            _write(trained, page, runtime=str(files))


@pytest.mark.slow
def test_a_page_opens_in_the_browser(tmp_path):
    """The program of BROWSER gets the address, and finds the page there."""
    (tmp_path / "models.json").write_text("[]")
    code = "import sys, urllib.request as web; web.urlretrieve(sys.argv[1] + '/models.json', 'seen')"
    visit = f'{sys.executable} -c "{code}" %s'
    lines = ["import os, runpy, signal, sys", f"os.environ['BROWSER'] = {visit!r}"]
    lines += ["signal.signal(signal.SIGINT, signal.default_int_handler)"]  # which jobs of a shell ignore
    lines += [f"sys.argv[1:] = ['open', {str(tmp_path)!r}]", "runpy.run_module('share', run_name='__main__')"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    process = start_program(str(tmp_path / "script"), folder=tmp_path)
    wait_for((tmp_path / "seen").exists, "no program was started")
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    assert process.exitcode == 0


def assert_onnx_answers_as_torch(name: str, changes: dict, folder: Path) -> None:
    """HRM is below; for the others see system/test_long_runs.py."""
    cycles = {} if name == "transformer" else {"H_cycles": 2 if name == "hrm" else 1, "L_cycles": 1}
    model = tiny_model(name, **cycles, **changes).eval()
    state = write_step(
        model.network, model.eval_reasoning("max"), folder / "model.onnx", seq_len=FACTS.seq_len
    )
    assert state.keys() == model.network.initial_state(1, seq_len=FACTS.seq_len).keys()
    assert list(folder.iterdir()) == [folder / "model.onnx"]  # the weights are inside
    _assert_same_answers(folder / "model.onnx", model, num_steps=4, num_identifiers=20)


@pytest.mark.slow
def test_a_page_has_the_model_its_facts_and_the_runtime(trained, sudoku_folder, files, tmp_path, capsys):
    output = tmp_path / "page"
    _write(trained, output, runtime=str(files), puzzles=5, halt_max_steps=6)
    told = capsys.readouterr()
    assert f"python -m share open {output}" in told.out
    assert told.err == ""
    scripts = ("start", "page", "kinds", "model", "search", "theme", "grid")
    site = ["index.html", "style.css", "theme.css", *(f"{name}.js" for name in scripts)]
    names = sorted(path.name for path in output.iterdir())
    assert names == sorted([*browser.FILES, *site, "models.json", "run"])
    assert {path.name for path in (output / "run").iterdir()} == {"model.onnx", "page.json"}
    (listed,) = json.loads((output / "models.json").read_text())
    assert listed == {"name": "run", "title": "Sudoku 4 × 4 · run", "kind": "sudoku", "rows": 4, "columns": 4}

    facts = json.loads((output / "run" / "page.json").read_text())
    expected = {"kind": "sudoku", "regions": [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2, "steps": 6}
    expected |= {"loss_type": "stablemax_cross_entropy"}
    assert {name: facts[name] for name in expected} == expected
    assert facts["state"] == {"z_H": [17, 32], "z_L": [17, 32]}
    test = open_dataset(sudoku_folder, splits=("test",), read_everything=False).splits["test"].sets["all"]
    rows = [each["inputs"] for each in facts["puzzles"]]
    assert rows == [test.inputs[row].tolist() for row in (0, 20, 40, 60, 80)]  # 100 puzzles
    assert facts["puzzles"][0]["labels"] == test.labels[0].tolist()

    checkpoint = find_checkpoint(trained)
    data = open_dataset(sudoku_folder, splits=("test",), read_everything=False)
    model = load_trained_model(checkpoint, data.metadata, forward_dtype="float32").eval()
    assert model.network.dtype == torch.float32
    _assert_same_answers(output / "run" / "model.onnx", model, num_steps=6, num_identifiers=1)


def test_the_puzzles_and_sizes_of_a_page_are_those_of_the_data(tmp_path, monkeypatch):
    """Also if the data was built again with another size, and for a model of weights/ with a data_path."""
    mazes, size = tmp_path / "mazes", ["--output-dir", str(tmp_path / "mazes"), "--generate", "9", "--size"]
    build_dataset("maze", [*size, "4"])
    grids = {"conv": "instead", "pos_encodings": "none", "puzzle_emb_ndim": 0, "puzzle_emb_len": 0}
    run = save_run(tmp_path / "run", mazes, name="trm", **grids)
    monkeypatch.setattr(type(find_checkpoint(run).arch), "title", "")  # as of a plugin
    build_dataset("maze", [*size, "5"])
    sets = open_dataset(mazes, splits=("test",), read_everything=False).splits["test"].sets
    for checkpoint, data_path in ((str(run), None), ("maze_15x15", str(mazes))):
        config = config_with(PageConfig, checkpoint=checkpoint, output="x", data_path=data_path, puzzles=1)
        facts = browser.prepare(find_checkpoint(checkpoint), config).facts
        assert (facts["rows"], facts["columns"], facts["arch"]) == (5, 5, "TRM")
        assert [puzzle["inputs"] for puzzle in facts["puzzles"]] == sets["all"].inputs[:1].tolist()


def test_puzzles_are_originals_and_keep_their_embeddings_alone(tmp_path):
    groups = {"all": [[1, 2], [3], [2, 1]], "more.hard": [[2]]}
    data = open_dataset(write(tmp_path / "data", train=groups, test=groups), read_everything=False)
    puzzles = choose_puzzles(data, 99)
    test = data.splits["test"].sets
    rows = ((0, 0), (2, 3), (2, 4), (2, 5), (3, 6), (3, 7))
    expected = [(test["all"], number, row) for number, row in rows]
    expected += [(test["more.hard"], 0, row) for row in (0, 1)]
    for puzzle, (of, number, row) in zip(puzzles, expected, strict=True):
        assert puzzle["identifier"] == of.puzzle_identifiers[number]
        labels = [-1 if label == IGNORED else label for label in of.labels[row].tolist()]
        assert (puzzle["inputs"], puzzle["labels"]) == (of.inputs[row].tolist(), labels)

    model = tiny_model("transformer")
    before, identifiers = model.network.puzzle_emb.weights.clone(), [7, 3, 7, 19, 3, 3, 7, 3]
    for puzzle, identifier in zip(puzzles, identifiers, strict=True):
        puzzle["identifier"] = identifier
    keep_embeddings(model, puzzles)
    kept = model.network.puzzle_emb.weights
    assert len(kept) == 3
    for puzzle, identifier in zip(puzzles, identifiers, strict=True):
        assert torch.equal(kept[puzzle["identifier"]], before[identifier])


def test_looks_say_what_a_cell_shows():
    looks = {name: find_kind(name).style for name in kind_names()}
    sudoku = page_style(looks["sudoku"], SimpleNamespace(vocab_size=8, seq_len=36, pad_id=0))
    assert sudoku["symbols"] == ["", "", "1", "2", "3", "4", "5", "6"]
    assert sudoku["regions"] == [*([0] * 3 + [1] * 3) * 2, *([2] * 3 + [3] * 3) * 2, *([4] * 3 + [5] * 3) * 2]
    assert sudoku["first_of_field"] is None
    arc = page_style(looks["arc"], SimpleNamespace(vocab_size=12, seq_len=900, pad_id=0))
    assert arc["colors"][:3] == [None, None, "#000000"]
    assert (arc["regions"], arc["first_of_field"]) == (None, 2)


def _put_npm(folder: Path, script: str) -> None:
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)


def test_npm_must_bring_the_very_package(tmp_path, files, monkeypatch):
    package = tmp_path / "onnxruntime-web.tgz"
    with tarfile.open(package, "w:gz") as archive:
        archive.add(files, "package")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    _put_npm(tmp_path, f'cp {package} "$4"')
    with pytest.raises(ValueError, match=r"npm downloaded a onnxruntime-web@.* digest: .*runtime=FOLDER"):
        browser.find_runtime(None, scratch)
    digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    monkeypatch.setattr(browser, "_INTEGRITY", digest)
    assert [path.read_text() for path in browser.find_runtime(None, scratch)] == list(browser.FILES)
    (scratch / package.name).unlink()
    _put_npm(tmp_path, "echo 'npm error network is down' >&2; exit 1")
    with pytest.raises(
        ValueError, match=r"npm cannot download .* \(npm error network is down\)\. Set runtime="
    ):
        browser.find_runtime(None, scratch)


@pytest.mark.slow
def test_mistakes_are_one_line_and_leave_nothing(trained, sudoku_folder, files, tmp_path, monkeypatch):
    page, noisy = tmp_path / "page", save_on(sudoku_folder, tmp_path / "noisy", state_noise=0.1)
    with pytest.raises(ValueError, match=r"needs noise \(init_noise or state_noise\)"):
        _write(noisy, page, runtime=str(files))
    with pytest.raises(ValueError, match=r"needs noise \(arch=flow is random\)"):
        _write(save_on(sudoku_folder, tmp_path / "flow", name="flow"), page, runtime=str(files))
    search = save_on(sudoku_folder, tmp_path / "ldt", name="ldt")
    with monkeypatch.context() as change:
        change.setattr(browser, "MOST_TOKENS", 5)
        with pytest.raises(ValueError, match="has 6 tokens. A page supports at most 5 for"):
            _write(search, page, runtime=str(files))
    with pytest.raises(ValueError, match="checkpoint: 2 run folders have the name run. Rename them."):
        _write(trained, page, checkpoint=[str(trained)] * 2)
    with pytest.raises(ValueError, match="checkpoint missing does not exist. Pass a run folder"):
        _write(Path("missing"), page, runtime=str(files))
    (files / "dist" / browser.FILES[1]).rename(files / browser.FILES[1])  # there it counts as well
    with pytest.raises(ValueError, match="does not exist. Build it"):
        _write(trained, page, runtime=str(files), data_path=["nowhere"])
    (files / browser.FILES[1]).unlink()
    with pytest.raises(
        ValueError, match=f"has no {browser.FILES[1]}. Set runtime=FOLDER to a folder with the"
    ):
        _write(trained, page, runtime=str(files))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("")
    (tmp_path / "own" / "models.json").write_text("[]")
    with pytest.raises(ValueError, match="own is not empty and was not made by share page. Choose another"):
        _write(trained, tmp_path / "own")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="npm is not installed. Set runtime=FOLDER"):
        _write(trained, page)
    assert {path.name for path in tmp_path.iterdir()} == {"package", "own", "noisy", "flow", "ldt"}


def test_the_command_line(monkeypatch, capsys):
    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["share", *words])
        main()

    run("page", "--help")
    assert capsys.readouterr().out.startswith("python -m share page [KEY=VALUE ...]")
    for words, mistake in (
        (["page", "output=page", "data_path=data"], "config: data_path needs exactly one checkpoint"),
        (["page", "checkpoint=run"], "config: output is missing"),
        (["pull"], "unknown action: 'pull'. Choose push, keep, page or open"),
    ):
        with pytest.raises(SystemExit, match="1"):
            run(*words)
        assert capsys.readouterr().err.startswith(f"error: {mistake}")


def test_a_page_of_all_models_leaves_out_other_files_of_weights(tmp_path, monkeypatch):
    """Example: the Finder of macOS writes .DS_Store."""
    weights, found = tmp_path / "weights", []
    for name in ("demo", "sudoku_6x6"):
        shutil.copytree(browser.SHIPPED / name, weights / name)
    (weights / ".DS_Store").touch()

    def prepare(checkpoint, _config) -> SimpleNamespace:
        found.append(checkpoint.run_folder)
        return SimpleNamespace(name=checkpoint.run_folder.name)

    monkeypatch.setattr(browser, "SHIPPED", weights)
    monkeypatch.setattr(browser, "prepare", prepare)
    with pytest.raises(ValueError, match=r"^runtime=\S+ has no "):
        write_page(config_with(PageConfig, output=str(tmp_path / "page"), runtime=str(tmp_path)))
    assert found == [weights / "sudoku_6x6", weights / "demo"]


def test_a_page_offers_as_many_puzzles_as_asked_for_a_model_of_weights():
    config = config_with(PageConfig, checkpoint="demo", output="x", puzzles=101)
    assert len(browser.prepare(find_checkpoint("demo"), config).facts["puzzles"]) == 101


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="share page needs onnx and onnxscript. Run pip install"):
        check_packages()


def test_puzzles_are_made_up_by_the_rules_of_their_kind():
    for box in ("2x3", "3x3"):
        rows, columns = BOXES[box]
        size = rows * columns
        metadata = usual_metadata(vocab_size=size + 2, seq_len=size**2, num_puzzle_identifiers=1)
        questions, answers = find_kind("sudoku").make_up(metadata, 5)
        assert len({question.tobytes() for question in questions}) == 5
        assert check_sudoku(questions, answers, box=(rows, columns))["valid"].all()
        for question in questions - 1:
            assert count_solutions(question.tolist(), box=(rows, columns)) == 1
    metadata = usual_metadata(vocab_size=6, seq_len=64, num_puzzle_identifiers=1)
    mazes, answers = find_kind("maze").make_up(metadata, 5)
    assert maze.is_path(mazes, answers).all()
    assert (maze.shortest_path_cells(mazes) >= 16).all()
    is_open = mazes.reshape(-1, 8, 8) != maze.WALL  # and a tree
    doors = (is_open[:, 1:] & is_open[:, :-1]).sum((1, 2)) + (is_open[..., 1:] & is_open[..., :-1]).sum(
        (1, 2)
    )
    assert (doors == is_open.sum((1, 2)) - 1).all()
