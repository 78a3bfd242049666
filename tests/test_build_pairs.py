"""Datasets from pairs: reading gives what was written, variants are those of a plain loop, nothing leaks."""

import datetime
import json
from pathlib import Path

import numpy as np
import openpyxl
import pytest

from dataset.augmentations import NUM_DIHEDRAL, dihedral
from dataset.description import Vocabulary
from dataset.kinds.pairs import files
from tests.pairs_source import as_texts, build, random_pairs, read_back, write_csv, write_json, write_parquet
from tests.sudoku_source import files_of


@pytest.mark.parametrize("tasks", [1, 3])
def test_reading_back_gives_the_same_pairs(tmp_path, capsys, tasks):
    pairs = random_pairs(60, tasks=tasks)
    data = build(tmp_path / "data", write_json(tmp_path / "p.jsonl", pairs), "--test-fraction", 0.2)
    train, test = (read_back(data, split) for split in ("train", "test"))
    assert sorted(train + test) == sorted(as_texts(pairs))
    inputs = [{(question, task) for question, _, task in rows} for rows in (train, test)]
    assert not inputs[0] & inputs[1]
    assert data.metadata.symbols == tuple(sorted("#. ab"))
    assert (data.metadata.seq_len, data.metadata.num_columns, data.metadata.vocab_size) == (20, 5, 7)
    assert data.metadata.num_puzzle_identifiers == (1 if tasks == 1 else 4)
    for task in {row[2] for row in train + test}:
        counted = [sum(row[2] == task for row in rows) for rows in (train, test)]
        assert 1 <= counted[1] <= sum(counted) * 0.2 + 1
    printed = capsys.readouterr()
    assert "symbols (5): space # . a b\n" in printed.out
    grids = "grids: 20 sizes from 1x1 to 4x5, each in a field of 4x5 cells, with end tokens below"
    assert grids in printed.out
    assert ("tasks (3), each with a puzzle identifier: task 0 (20)," in printed.out) == (tasks > 1)


def test_all_ways_of_writing_give_the_same_bytes(tmp_path, capsys):
    """Rows as texts, lists of numbers, JSON in CSV, lines in CSV, an array, parquet, fields of other names;
    the split in a field, by files or by shards, beside a file of another one and what a Mac leaves.
    """
    pairs = [pair | {"split": "test" if n % 5 == 0 else "train"} for n, pair in
             enumerate(random_pairs(30, symbols="0123"))]  # fmt: skip
    grids = ("input", "output")
    as_lists = [p | {side: [[int(cell) for cell in row] for row in p[side]] for side in grids} for p in pairs]
    as_lines = [p | {side: "\n".join(p[side]) for side in grids} for p in pairs]
    without = [{key: value for key, value in pair.items() if key != "split"} for pair in as_lists]
    in_files = {split: [w for w, p in zip(without, pairs, strict=True) if p["split"] == split]
                for split in ("train", "test")}  # fmt: skip
    write_json(tmp_path / "folder" / "train.jsonl", in_files["train"])
    write_csv(tmp_path / "folder" / "test.csv.gz", in_files["test"])
    for split, members in in_files.items():
        for shard in range(2):
            rows = members[: len(members) // 2] if shard == 0 else members[len(members) // 2 :]
            write_json(tmp_path / "shards" / f"{split}-{shard:05}-of-00002.jsonl", rows)
            write_parquet(tmp_path / "hub" / f"{split}-{shard:05}-of-00002.parquet", rows)
    write_json(tmp_path / "shards" / "validation.jsonl", in_files["test"])
    (tmp_path / "shards" / "dataset_infos.json").write_text("{}")
    (tmp_path / "shards" / "dev").mkdir()
    (tmp_path / "shards" / "._train-00000-of-00002.jsonl").write_bytes(b"\0\5\26\7")
    (tmp_path / "array.json").write_text(json.dumps(as_lists))
    renamed = [{"question": p["input"], "answer": p["output"], "split": p["split"]} for p in pairs]
    named = ["--fields", "question,answer"]
    sources = [
        write_json(tmp_path / "texts.jsonl", pairs),
        write_json(tmp_path / "lists.ndjson", as_lists),
        write_csv(tmp_path / "json.csv", as_lists),
        write_csv(tmp_path / "tabs.tsv", as_lists, delimiter="\t"),
        write_csv(tmp_path / "one" / "lines.csv", as_lines).parent,
        tmp_path / "folder",
        tmp_path / "shards",
        tmp_path / "hub",
        tmp_path / "array.json",
        write_parquet(tmp_path / "pairs.parquet", pairs),
    ]
    more = [
        [write(tmp_path / name, renamed), *named]
        for write, name in ((write_json, "named.jsonl"), (write_parquet, "named.parquet"))
    ]
    arrays = []
    for words in [*([source] for source in sources), *more]:
        build(tmp_path / "data", *words)
        files = files_of(tmp_path / "data")
        arrays.append({name: content for name, content in files.items() if "manifest" not in str(name)})
    assert all(each == arrays[0] for each in arrays[1:])
    assert "files not used: dev/, validation.jsonl\n" in capsys.readouterr().out


def test_sequences_and_equal_grids_have_no_padding(tmp_path, capsys):
    words = [{"input": word, "output": word[::-1]} for word in ("tone", "plan", "[[]]", '{"a}', "a bc")]
    data = build(tmp_path / "data", write_json(tmp_path / "words.jsonl", words))
    assert (data.metadata.seq_len, data.metadata.num_columns) == (4, 4)
    rows = read_back(data, "train") + read_back(data, "test")
    assert sorted(rows) == sorted((w["input"], w["output"], "<blank>") for w in words)
    assert all((data.splits[split].sets["all"].inputs >= 2).all() for split in ("train", "test"))
    assert "grids: all 1x4" in capsys.readouterr().out
    numbers = [{"input": [n, 3, 0], "output": [0, 3, n]} for n in (1, 7, 10)]
    data = build(tmp_path / "data", write_csv(tmp_path / "numbers.csv", numbers))
    rows = read_back(data, "train") + read_back(data, "test")
    assert sorted(rows) == sorted((f"{n} 3 0", f"0 3 {n}", "<blank>") for n in (1, 7, 10))
    colours = [{"input": [["red", "blue"], [n, -1]], "output": [["blue"]]} for n in range(12)]
    data = build(tmp_path / "data", write_csv(tmp_path / "colours.csv", [
        {side: json.dumps(pair[side]) for side in pair} for pair in colours]))  # fmt: skip
    assert data.metadata.symbols == ("-1", *map(str, range(12)), "blue", "red")
    rows = read_back(data, "train") + read_back(data, "test")
    assert sorted(rows) == sorted((f"red blue\n{n} -1", "blue", "<blank>") for n in range(12))


@pytest.mark.parametrize(
    ("options", "num_variants"),
    [
        (["--symmetries", "dihedral"], 7),
        (["--symmetries", "symbols", "--fixed-symbols", "# ", "--num-aug", "9"], 9),
        (["--symmetries", "dihedral,symbols", "--fixed-symbols", ".", "--num-aug", "12"], 12),
    ],
)
def test_variants_are_those_of_a_plain_loop(tmp_path, options, num_variants):
    source = write_json(tmp_path / "p.jsonl", random_pairs(50))
    data = build(tmp_path / "data", source, *options)
    puzzles, rows = data.splits["train"].sets["all"], read_back(data, "train")
    symbols = data.metadata.symbols
    fixed = options[3] if len(options) > 2 else ""
    transforms = puzzles.transforms.reshape(-1, 1 + num_variants, 1 + len(symbols)).tolist()
    assert len(rows) == 45 * (1 + num_variants)
    for group, of_group in enumerate(transforms):
        original = rows[group * (1 + num_variants)]
        assert of_group[0] == [0, *range(len(symbols))]
        for place, (number, *becomes) in enumerate(of_group):
            names = {symbol: symbols[new] for symbol, new in zip(symbols, becomes, strict=True)}
            assert all(names[symbol] == symbol for symbol in fixed)
            expected = []
            for text in original[:2]:
                grid = np.array([[names[cell] for cell in line] for line in text.split("\n")])
                expected.append("\n".join("".join(row) for row in dihedral(grid, number)))
            assert rows[group * (1 + num_variants) + place][:2] == tuple(expected)
    if "symbols" not in options[1]:
        assert [number for number, *_ in transforms[0]] == list(range(NUM_DIHEDRAL))
    elif "dihedral" in options[1]:
        assert len({number for of_group in transforms for number, *_ in of_group}) == NUM_DIHEDRAL
    held_out = {row[0] for row in read_back(data, "test")}
    assert not held_out & {row[0] for row in rows}
    full = build(tmp_path / "full", source, *options, "--materialize")
    assert full.metadata.augmentation is None
    assert read_back(full, "train") == rows


def test_no_variant_is_a_test_pair(tmp_path, capsys):
    """Every symmetric image of the test pair is there, of the same task and of another one."""
    grid = np.array([list("ab."), list("..#")])
    images = ["|".join("".join(row) for row in dihedral(grid, number)) for number in range(NUM_DIHEDRAL)]
    of_x = {"output": ["a"], "task": "x"}
    pairs = [{"input": image.split("|"), "split": "train"} | of_x for image in images[1:]]
    pairs.append({"input": images[0].split("|"), "split": "test"} | of_x)
    pairs.append({"input": images[1].split("|"), "output": ["b"], "task": "y", "split": "train"})
    source = write_json(tmp_path / "p.jsonl", pairs)
    rows = read_back(build(tmp_path / "data", source, "--symmetries", "dihedral"), "train")
    held_out = "\n".join(pairs[7]["input"])
    assert {row[2] for row in rows if row[0] == held_out} == {"y"}
    printed = capsys.readouterr()
    assert "variants that equal test puzzles, left out: 7\n" in printed.out
    assert printed.err == ""


def test_a_sheet_is_read_as_a_table_is(tmp_path, capsys, monkeypatch):
    def write(name: str, *rows: tuple, is_stream: bool = False) -> Path:
        book = openpyxl.Workbook(write_only=is_stream)
        sheet = book.create_sheet() if is_stream else book.active
        for row in rows:
            sheet.append(row)
        book.create_sheet("notes")
        book.save(tmp_path / name)
        return tmp_path / name

    rows = [("note", "input", "output"), (None, 12, "21"), (None, None, None)]
    rows.append((7, "[[1], [2]]", "[[2], [1]]"))
    data = build(tmp_path / "data", write("pairs.xlsx", *rows, (None, "12\n21", 2112.0)))
    assert {pair[:2] for split in ("train", "test") for pair in read_back(data, split)} == {
        ("12", "21"), ("1\n2", "2\n1"), ("12\n21", "2112")
    }  # fmt: skip
    assert "pairs.xlsx: sheets not used: notes" in capsys.readouterr().out
    # The rows of a file that was written as a stream have no cells after their last value.
    short = [("input", "output", "task"), ("1", "2"), ("2", "1")]
    data = build(tmp_path / "data", write("stream.xlsx", *short, is_stream=True))
    assert {pair[:2] for split in ("train", "test") for pair in read_back(data, split)} == {
        ("1", "2"), ("2", "1")
    }  # fmt: skip
    day, changed = datetime.date(2026, 5, 1), "a datetime. Excel has changed what was"
    for cell, message in (
        (day, f"2: the cell is datetime.datetime.*, {changed}"),
        (1234567890123456, "2: the cell is 1234567890123456, a int. Excel has"),
        (True, "2: the cell is True, a bool."),
    ):
        with pytest.raises(ValueError, match=message):
            build(tmp_path / "data", write("bad.xlsx", rows[0], (None, cell, "1")))
    with pytest.raises(ValueError, match=r"2: no input, only 1, 2, 4. .* add a first row with them."):
        build(tmp_path / "data", write("bare.xlsx", ("1", "2", None, "4"), ("1", "2", None, "4")))
    (tmp_path / "torn.xlsx").write_bytes(write("pairs.xlsx", *rows).read_bytes()[:3000])
    with pytest.raises(ValueError, match="torn.xlsx cannot be read as Excel"):
        build(tmp_path / "data", tmp_path / "torn.xlsx")
    monkeypatch.setattr(files, "_MOST_ROWS", 2)
    with pytest.raises(ValueError, match="stream.xlsx cannot be read as Excel .it has a row after row 2,"):
        build(tmp_path / "data", tmp_path / "stream.xlsx")


def test_spaces_between_symbols_and_parts_of_characters_are_no_symbols(tmp_path, capsys):
    heart, e, family = "\u2764\ufe0f", "e\u0301", "\U0001f468\u200d\U0001f469"
    pairs = [
        {"input": "1 . 3 4", "output": "1 2 3 4 "},
        {"input": "4.21", "output": "4321"},
        {"input": f"{heart}{e}{family}1", "output": "1234"},
    ]
    data = build(tmp_path / "data", write_json(tmp_path / "p.jsonl", pairs))
    found = [pair for split in ("train", "test") for pair in read_back(data, split)]
    assert {pair[0] for pair in found} == {"1.34", "4.21", f"{heart}\u00e9{family}1"}
    assert "spaces between symbols are removed in 1 of 3 pairs" in capsys.readouterr().out
    fixed = ("--symmetries", "symbols", "--num-aug", 1, "--fixed-symbols")
    data = build(tmp_path / "data", tmp_path / "p.jsonl", *fixed, f"{heart}{e}{family}1.")
    is_fixed = [symbol not in "234" for symbol in data.metadata.symbols]
    transforms = data.splits["train"].sets["all"].transforms[:, 1:]
    assert (transforms == np.arange(len(is_fixed)))[:, is_fixed].all()
    words = [{"input": [[f"{e}1", str(n)]], "output": [["1"]]} for n in range(4)]
    data = build(tmp_path / "words", write_json(tmp_path / "w.jsonl", words), *fixed, f"{e}1 1")
    assert Vocabulary.of(data.metadata).parse(f"{e}1 3") == [["\u00e91", "3"]]
    pairs.append({"input": "12 4", "output": "1234"})
    data = build(tmp_path / "data", write_json(tmp_path / "p.jsonl", pairs))
    assert "spaces separate" not in capsys.readouterr().out
    assert max(len(pair[1]) for split in ("train", "test") for pair in read_back(data, split)) == 8
    pairs = [{"input": [[n, " ", n]], "output": [[n, "x", n]]} for n in "12"]
    data = build(tmp_path / "data", write_json(tmp_path / "p.jsonl", pairs))
    assert {pair[0] for split in ("train", "test") for pair in read_back(data, split)} == {"1 1", "2 2"}


def test_odd_pairs_are_warned_of(tmp_path, capsys):
    pairs = [
        {"input": "ab", "output": "ba", "split": "train", "level": 3},
        {"input": "cc", "output": "cc", "split": "train"},
        {"input": "cd", "output": "dc", "split": "train"},
        {"input": "cd", "output": "dd", "split": "train"},
        {"input": "ab", "output": "ba", "split": "test"},
        {"input": "ab", "output": "ba", "split": "train"},
    ]
    data = build(tmp_path / "data", source := write_json(tmp_path / "p.jsonl", pairs))
    printed = capsys.readouterr()
    start = "build pairs: warning: "
    assert printed.err.splitlines() == [
        f"{start}1 of 5 pairs have an output equal to their input (the first: {source}:2)",
        f"{start}1 of 5 pairs are for training, but their inputs are also in the test split "
        f"(the first: {source}:1)",
        f"{start}2 of 5 pairs have an input with several outputs, so no model can get all of them right "
        f"(the first: {source}:3)",
    ]
    assert "fields not used: level\nrepeated pairs, used once: 1\n" in printed.out
    assert len(read_back(data, "train")) == 4


def test_larger_pairs_can_be_left_out(tmp_path, capsys):
    pairs = random_pairs(60)
    source = write_json(tmp_path / "p.jsonl", pairs)
    data = build(tmp_path / "data", source, "--max-size", "3x4")
    small = [p for p in pairs if all(len(p[s]) <= 3 and len(p[s][0]) <= 4 for s in ("input", "output"))]
    assert sorted(read_back(data, "train") + read_back(data, "test")) == sorted(as_texts(small))
    assert data.metadata.seq_len == 12
    assert f"pairs larger than 3x4, left out: {60 - len(small)}\n" in capsys.readouterr().out
