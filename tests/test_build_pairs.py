"""Datasets from pairs: reading gives what was written, variants are those of a plain loop, nothing leaks."""

import csv
import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from dataset.build import build_dataset
from dataset.build.sources import find_source_files
from dataset.description import DatasetInfo, Vocabulary, read_info
from dataset.format import IGNORE_LABEL_ID, open_dataset
from dataset.kinds.kind import kind_of
from dataset.kinds.pairs.files import choose_files
from dataset.show import main as show
from dataset.symmetries import NUM_DIHEDRAL, dihedral
from evaluation.evaluators import Evaluators, build_evaluator
from tests.answers import answers
from tests.ranks import run_program
from tests.sudoku_source import files_of
from tests.tiny import OVERRIDES


def random_grid(draw: random.Random, symbols: str, num_rows: int, num_columns: int) -> list[str]:
    return ["".join(draw.choices(symbols, k=num_columns)) for _ in range(num_rows)]


def random_pairs(count: int, *, symbols: str = "#. ab", seed: int = 0, tasks: int = 1) -> list[dict]:
    """Grids of 1x1 to 4x5, inputs and outputs of different sizes."""
    draw = random.Random(seed)
    pairs = []
    for number in range(count):
        grids = [random_grid(draw, symbols, draw.randint(1, 4), draw.randint(1, 5)) for _ in range(2)]
        task = {"task": f"task {number % tasks}"} if tasks > 1 else {}
        pairs.append({"input": grids[0], "output": grids[1], **task})
    return pairs


def write_json(path: Path, pairs: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def write_parquet(path: Path, pairs: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), path)
    return path


def write_csv(path: Path, pairs: list[dict], *, delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(pairs[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(pairs)
    return path


def build(folder: Path, source: Path, *options):
    build_dataset("pairs", [str(each) for each in ("--output-dir", folder, "--source", source, *options)])
    return open_dataset(folder, read_everything=True)


def text_of(vocabulary: Vocabulary, grid: list[list[str]]) -> str:
    return "\n".join((" " if vocabulary.parts_by_spaces else "").join(row) for row in grid)


def grid_of(vocabulary: Vocabulary, tokens: np.ndarray) -> list[list[str]]:
    """A cell that has no symbol, in a model's answer, is '?'."""
    texts = ("?", "?", *vocabulary.symbols)
    return [[texts[token] for token in row] for row in tokens[vocabulary.cells_of(tokens)].tolist()]


def read_back(data, split: str) -> list[tuple]:
    """(input, output, task) of every example, each grid as rows of text, variants written out."""
    names = json.loads((data.folders[0] / "identifiers.json").read_text())
    vocabulary, puzzles = Vocabulary.of(data.metadata), data.splits[split].sets["all"]
    written = puzzles.materialize()
    texts = [
        [text_of(vocabulary, grid_of(vocabulary, tokens)) for tokens in array]
        for array in (written.inputs, written.labels)
    ]
    tasks = [names[number] for number in puzzles.puzzle_identifiers]
    return list(zip(*texts, tasks, strict=True))


def as_texts(pairs: list[dict]) -> list[tuple]:
    return [("\n".join(p["input"]), "\n".join(p["output"]), p.get("task", "<blank>")) for p in pairs]


# ---------------------------------------------------------------------------------------------------- reading


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
    for task in {row[2] for row in test}:
        counted = [sum(row[2] == task for row in rows) for rows in (train, test)]
        assert 1 <= counted[1] <= sum(counted) * 0.2 + 1
    printed = capsys.readouterr()
    assert "symbols (5): space # . a b\n" in printed.out
    assert "grids: 20 sizes from 1x1 to 4x5, each with its end marked in 4x5\n" in printed.out
    assert ("tasks (3), a puzzle identifier each: task 0 (20)," in printed.out) == (tasks > 1)


def test_what_a_mac_leaves_beside_pairs_is_no_file_of_pairs(tmp_path):
    path = write_json(tmp_path / "pairs.jsonl", [{"input": "a", "output": "b"}])
    (tmp_path / "._pairs.jsonl").write_bytes(b"\0\5\26\7")
    found = find_source_files(tmp_path, choose_files, needed="pairs", output_dir=tmp_path / "out")
    assert found == [path]


def test_all_ways_of_writing_give_the_same_bytes(tmp_path, capsys):
    """Rows as texts, lists of numbers, JSON in CSV, lines in CSV, an array, parquet, fields of other names;
    the split in a field, by files or by shards, beside a file of another one.
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


# ------------------------------------------------------------------------------------------------- augmenting


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
    pairs = [
        {"input": image.split("|"), "output": ["a"], "task": "x", "split": "train"} for image in images[1:]
    ]
    pairs.append({"input": images[0].split("|"), "output": ["a"], "task": "x", "split": "test"})
    pairs.append({"input": images[1].split("|"), "output": ["b"], "task": "y", "split": "train"})
    source = write_json(tmp_path / "p.jsonl", pairs)
    rows = read_back(build(tmp_path / "data", source, "--symmetries", "dihedral"), "train")
    held_out = "\n".join(pairs[7]["input"])
    assert {row[2] for row in rows if row[0] == held_out} == {"y"}
    printed = capsys.readouterr()
    assert "variants that are test puzzles, left out: 7\n" in printed.out
    assert printed.err == ""


# --------------------------------------------------------------------------------------------------- warnings


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
        f"{start}1 of 5 pairs are for training, but their inputs are in the test split too "
        f"(the first: {source}:1)",
        f"{start}2 of 5 pairs have an input with several outputs, and no model can know which one "
        f"(the first: {source}:3)",
    ]
    assert "fields not used: level\nrepeated pairs, taken once: 1\n" in printed.out
    assert len(read_back(data, "train")) == 4


def test_larger_pairs_can_be_left_out(tmp_path, capsys):
    pairs = random_pairs(60)
    source = write_json(tmp_path / "p.jsonl", pairs)
    data = build(tmp_path / "data", source, "--max-size", "3x4")
    small = [p for p in pairs if all(len(p[s]) <= 3 and len(p[s][0]) <= 4 for s in ("input", "output"))]
    assert sorted(read_back(data, "train") + read_back(data, "test")) == sorted(as_texts(small))
    assert data.metadata.seq_len == 12
    assert f"pairs larger than 3x4, left out: {60 - len(small)}\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("symbols", "text", "grid"),
    [
        ("#.ab", "#.\nab\n", [["#", "."], ["a", "b"]]),
        ("#.ab", "#. ab", [["#", "."], ["a", "b"]]),
        ("# ab", "# \nab", [["#", " "], ["a", "b"]]),
        (["10", "2", "x"], " 10 2\n x x", [["10", "2"], ["x", "x"]]),
        ("ab", "ab", [["a", "b"]]),
    ],
)
def test_text_to_tokens_and_back(symbols, text, grid):
    vocabulary = Vocabulary(tuple(symbols), num_rows=3, num_columns=3)
    assert vocabulary.parse(text) == grid
    assert vocabulary.parse(text_of(vocabulary, grid)) == grid
    assert grid_of(vocabulary, vocabulary.tokens_of(grid)) == grid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the grid is empty"),
        ("ab a", "the grid is ragged: row 2 has 1 cells, row 1 has 2"),
        ("aaa", "the grid has 1x3 cells, but the dataset has at most 2x2"),
        ("ax", "'x' is no symbol of the dataset (a b)"),
    ],
)
def test_text_that_does_not_fit(text, expected):
    with pytest.raises(ValueError, match=re.escape(expected) + "$"):
        Vocabulary(("a", "b"), num_rows=2, num_columns=2).parse(text)


def test_a_models_answer_may_be_no_grid():
    vocabulary = Vocabulary(("a", "b"), num_rows=2, num_columns=3)
    assert grid_of(vocabulary, np.array([2, 3, 1, 2, 1, 0])) == [["a", "b"], ["a", "?"]]
    assert grid_of(vocabulary, np.array([1, 3, 1, 2, 1, 0])) == []
    assert vocabulary.tokens_of([["a", "b"]]).tolist() == [2, 3, 1, 1, 1, 0]
    assert (vocabulary.style.gap, Vocabulary(("a", "b"), num_rows=1, num_columns=3).style.gap) == (" ", "")


# -------------------------------------------------------------------------------------- the rest of the house


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two tasks; 16 cells and 4 symbols, as a 4x4 Sudoku has with those of its digits."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("pairs")
    grids = [random_grid(draw, "ab", 4, 4) for _ in range(100)]
    pairs = [{"input": grid, "output": grid[::-1] if n % 2 else [row[::-1] for row in grid],
              "task": ("down", "right")[n % 2]} for n, grid in enumerate(grids)]  # fmt: skip
    build(folder / "data", write_json(folder / "p.jsonl", pairs))
    return folder / "data"


def test_show_draws_with_the_datasets_own_symbols(tmp_path, capsys):
    pairs = [{"input": ["# a", "..."], "output": ["a"], "split": split} for split in ("train", "test")]
    build(tmp_path / "data", write_json(tmp_path / "p.jsonl", pairs))
    capsys.readouterr()
    show([str(tmp_path / "data")])
    assert capsys.readouterr().out.endswith("puzzle   answer\n#   a    a\n. . .\n\n")


def test_a_checkpoint_keeps_the_symbols(folder):
    facts = read_info([folder], open_dataset(folder, read_everything=False).metadata)
    assert DatasetInfo.from_json(json.loads(json.dumps(facts.to_json())), where="") == facts
    assert facts.style.symbols == ("_", "+", "a", "b")
    question = facts.vocabulary.read_puzzle("aba\nbab")
    assert question.tokens[question.cells_of(question.tokens)].tolist() == [[2, 3, 2], [3, 2, 3]]
    assert question.vocab_size == facts.metadata.vocab_size


def test_other_kinds_leave_it_alone(folder):
    metadata = open_dataset(folder, read_everything=False).metadata
    assert kind_of(metadata, builder="reasoning_gym").name == "pairs"
    with pytest.raises(ValueError, match="is no sudoku dataset: its symbols are its own"):
        build_evaluator("sudoku", folder=folder, metadata=metadata)


def test_the_evaluator_counts_each_task(folder, tmp_path):
    data = open_dataset(folder, splits=("test",), read_everything=False)
    puzzles = data.splits["test"].sets["all"]
    preds = np.array(puzzles.labels)
    preds[np.flatnonzero(puzzles.puzzle_identifiers == 2)[0], 3] ^= 1
    evaluators = Evaluators(["pairs"], data)
    labels = np.where(puzzles.labels == 0, IGNORE_LABEL_ID, puzzles.labels)
    given = answers(puzzles.inputs, labels, preds)._replace(puzzle_identifiers=puzzles.puzzle_identifiers)
    for rows in (slice(0, 3), slice(3, None)):
        evaluators.add("all", type(given)(*(column[rows] for column in given)))
    assert evaluators.gather_metrics()["all"] == {"pairs/exact_accuracy": 0.9, "pairs/count": 10}
    evaluators.write(tmp_path)
    tasks = {name: {"exact_accuracy": share, "count": 5} for name, share in (("down", 1.0), ("right", 0.8))}
    assert json.loads((tmp_path / "tasks.json").read_text()) == {"all": tasks}


@pytest.mark.slow
def test_a_run_learns_from_them(folder, tmp_path):
    arguments = (*OVERRIDES, "evaluators=[pairs]", "wandb_mode=disabled", f"data_path={folder}")
    finished = run_program("pretrain", *arguments, "checkpoint_path=run", folder=tmp_path)
    assert finished.statuses == [0], finished.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["train/lm_loss"] < lines[0]["train/lm_loss"]
    assert lines[-1]["eval/all/pairs/exact_accuracy"] == lines[-1]["eval/all/exact_accuracy"]
    tasks = json.loads(next((tmp_path / "run" / "evaluation").rglob("tasks.json")).read_text())
    assert {name: task["count"] for name, task in tasks["all"].items()} == {"down": 5, "right": 5}
    question = ("checkpoint=run", "task=right", "puzzle=abab bbbb aaaa baba", "device=cpu")
    solved = run_program("solve", *question, folder=tmp_path)
    assert solved.statuses == [0], solved.stderr
    assert "a b a b" in solved.stdout
