"""Every mistake in what the builder of pairs is given: one line that says where, and nothing is written."""

import functools
import json
import sys

import pytest

from dataset.build import build_dataset
from dataset.kinds.pairs.build import main
from tests.refusals import refusal_of

refusal = functools.partial(refusal_of, main)

GOOD = [{"input": text, "output": text[::-1]} for text in ("ab", "bc", "cd")]


def lines_of(*pairs: dict) -> str:
    return "".join(json.dumps(pair) + "\n" for pair in pairs)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--test-fraction", "1"], "argument --test-fraction: must be a number between 0 and 1, not '1'"),
        (["--test-fraction", "ten"], "argument --test-fraction: must be a number between 0 and 1, not 'ten'"),
        (["--max-size", "8"], "argument --max-size: must be ROWSxCOLUMNS, such as 8x8, not '8'"),
        (["--max-size", "1x1"], "--max-size 1x1: no pair is that small"),
        (["--symmetries", "colours"], "must be dihedral, symbols or dihedral,symbols, not 'colours'"),
        (["--symmetries", "dihedral"], "turns and mirrors grids, but all of these are sequences"),
        (["--symmetries", "dihedral", "--num-aug", "3"], "--num-aug is for --symmetries with symbols: drop"),
        (["--fixed-symbols", "a"], "--fixed-symbols is for --symmetries with symbols: drop it"),
        (["--materialize"], "--materialize writes out the variants of --symmetries: drop it, or name some"),
        (["--symmetries", "symbols", "--fixed-symbols", "x"], "'x' is in no pair (the symbols are a b c d)"),
        (
            ["--symmetries", "symbols", "--fixed-symbols", "abc"],
            "needs two symbols or more that are not fixed",
        ),
        (["--symmetries", "symbols", "--num-aug", str(1 << 40)], "are more than int32 can count: lower"),
        (["--seed", "-1"], "argument --seed: must be an integer from 0"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, options, expected):
    source = tmp_path / "pairs.jsonl"
    source.write_text(lines_of(*GOOD))
    assert expected in refusal(tmp_path / "data", capsys, "--source", source, *options)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{", "not valid JSON (Expecting property name"),
        ("\xff", "not valid JSON ('utf-8' codec can't decode"),
        ("[1]", 'no pair, {"input": grid, "output": grid}'),
        ('{"output": "a"}', "no input"),
        ('{"input": "a", "output": null}', "no output"),
        ('{"input": "a", "output": 5}', "the output is 5, neither a grid nor a text"),
        ('{"input": "", "output": "a"}', "the input is empty"),
        ('{"input": [[]], "output": "a"}', "the input is empty"),
        ('{"input": ["ab", "a"], "output": "a"}', "the input is ragged: row 2 has 1 cells, row 1 has 2"),
        ('{"input": ["ab", 1], "output": "a"}', "row 2 of the input is 1, neither a list nor a text"),
        ('{"input": [[0.5]], "output": "a"}', "the input has the cell 0.5, neither a text nor an integer"),
        ('{"input": [[true]], "output": "a"}', "the input has the cell True, neither a text nor an integer"),
        ('{"input": [["a b"]], "output": "a"}', "the input has the cell 'a b', no printable symbol"),
        ('{"input": "a\\tb", "output": "a"}', "the input has the cell '\\t', no printable symbol"),
        ('{"input": "a", "output": "b", "task": "x"}', ":1: no task, but other pairs name theirs"),
        ('{"input": "a", "output": "b", "task": 7}', "the task is 7, not a printable text"),
        ('{"input": "a", "output": "b", "split": "dev"}', "the split is 'dev', neither train nor test"),
        ('{"input": "a", "output": "b", "split": "test"}', ":1: no split, but other pairs name theirs"),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, capsys, bad, expected):
    source = tmp_path / "pairs.jsonl"
    source.write_bytes(lines_of(GOOD[0]).encode() + b"\n" + bad.encode("latin-1") + b"\n")
    line = "" if expected.startswith(":") else ":3: "
    assert f"{source}{line}{expected}" in refusal(tmp_path / "data", capsys, "--source", source)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "pairs.csv",
            "input,answer\na,b\n",
            "pairs.csv:1: no column output: the first line names the columns",
        ),
        ("pairs.csv", "input,output\na,b\na\n", "pairs.csv:3: 1 columns, but 2 in the first line"),
        (
            "pairs.csv",
            b"input,output\n\xff,b\n",
            "pairs.csv:2: the input has the cell '\\ufffd', no printable",
        ),
        ("pairs.csv", "input,output\n", "pairs.csv has no pair"),
        ("pairs.jsonl", "", "pairs.jsonl has no pair"),
        ("pairs.jsonl.gz", "{}", "pairs.jsonl.gz is no gzip file, or not a whole one"),
        (
            "pairs.parquet",
            "",
            "pairs.parquet is neither a folder nor a file .jsonl, .jsonl.gz, .csv, .csv.gz",
        ),
        (
            "pairs.jsonl",
            lines_of(GOOD[0]),
            "no task has two different inputs, of which one could be held out",
        ),
        (
            "pairs.jsonl",
            lines_of(*GOOD, {"input": [list(range(255))], "output": "a"}),
            "the pairs have 259 different symbols, more than 254",
        ),
        (
            "pairs.jsonl",
            lines_of(*GOOD, {"input": "a" * 10001, "output": "a"}),
            "need 1x10001 cells, more than 10000 (the first: FOLDER/pairs.jsonl:4): leave some out with",
        ),
        (
            "pairs.jsonl",
            lines_of(*({**pair, "split": "train"} for pair in GOOD)),
            "the source has no pair for its test split",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path, capsys, name, content, expected):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / name)
    assert expected.replace("FOLDER", str(tmp_path)) in message


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ({}, [], "has 0 files of pairs, not train.jsonl and test.jsonl, or one file of all pairs"),
        ({"a.jsonl": "", "b.csv": ""}, [], "has 2 files of pairs, not train.jsonl and test.jsonl"),
        ({"train.jsonl": ""}, [], "has no test file (test.jsonl, test.csv), but the other split's"),
        ({"train.jsonl": "", "train.csv": "", "test.csv": ""}, [], "has both train.csv and train.jsonl"),
        (
            {"train.jsonl": lines_of({**GOOD[0], "split": "test"}), "test.jsonl": lines_of(GOOD[1])},
            [],
            "train.jsonl:1: its split is 'test', but the file's name says otherwise",
        ),
        (
            {"train.jsonl": lines_of(GOOD[0]), "test.jsonl": lines_of(GOOD[1])},
            ["--test-fraction", "0.5"],
            "--test-fraction is for a source without splits of its own: drop it",
        ),
    ],
)
def test_bad_folders_are_refused(tmp_path, capsys, files, options, expected):
    source = tmp_path / "source"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content)
    assert expected in refusal(tmp_path / "data", capsys, "--source", source, *options)


def test_the_output_must_not_be_where_the_source_is(tmp_path, capsys):
    assert "--source nowhere does not exist" in refusal(tmp_path / "data", capsys, "--source", "nowhere")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    source = tmp_path / "data" / "pairs.jsonl"
    source.write_text(lines_of(*GOOD))
    message = refusal(tmp_path / "data", capsys, "--source", source)
    assert "holds the source and would be replaced: choose another --output-dir" in message


def test_a_dataset_of_another_builder_is_not_replaced(tmp_path, capsys):
    build_dataset("sudoku", ["--output-dir", str(tmp_path / "data"), "--generate", "20", "--box", "2x2"])
    capsys.readouterr()
    (tmp_path / "pairs.jsonl").write_text(lines_of(*GOOD))
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "pairs.jsonl")
    assert "data was made by dataset.build sudoku, not pairs: remove it, or choose" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--task", "chess", "--size", "9"], "argument --task: invalid choice: 'chess' (choose from"),
        (["--task", "maze", "--size", "1"], "argument --size: must be an integer from 2"),
        (["--task", "maze", "--size", "9", "--options", "n"], "--options: must be KEY=NUMBER, not 'n'"),
        (["--task", "maze", "--size", "9"], "this needs the package reasoning-gym"),
        (["--list"], "pip install reasoning-gym=="),
    ],
)
def test_reasoning_gym_without_the_package(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(SystemExit) as exit_of:
        build_dataset("reasoning_gym", ["--output-dir", str(tmp_path / "data"), *arguments])
    assert exit_of.value.code.startswith("build reasoning_gym: error: ")
    assert expected in exit_of.value.code
    assert "\n" not in exit_of.value.code
