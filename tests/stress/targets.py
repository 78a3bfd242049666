"""Creates the inputs of the programs for `fuzz`: each is a folder to change and a function that reads it."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import random
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import yaml

from benchmarks.harness import run_program
from checkpointing.files import MANIFEST_FILE, SHARED_CONFIG_FILE
from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model, load_weights
from config.programs import SearchConfig
from config.schema import PretrainConfig
from dataset.build import build_dataset
from dataset.description import read_info, read_names
from dataset.files import load_metadata, open_dataset
from dataset.loader import read_rows
from dataset.metadata import Metadata
from dataset.show import main as show
from evaluation.leaks import find_trained
from report.page import write_report
from report.run import read_run
from runtime.reading import printable, read_yaml
from share.push import main as push
from solve import load
from tests.arc_source import make_tasks, write_kaggle, write_source
from tests.checkpoints import seal
from tests.maze_source import source_rows as maze_rows
from tests.pairs_source import write_parquet, write_sheet
from tests.stress.mutations import VALUES, mutate_files, mutate_text
from tests.sudoku_source import source_rows as sudoku_rows
from tests.sudoku_source import write_csv
from tuning.space import Space, compose_search, experiment_yaml
from tuning.study import Study

_MODEL = (
    *("arch.hidden_size=32", "arch.num_heads=2", "arch.H_layers=1", "arch.L_layers=1", "arch.H_cycles=1"),
    *("arch.L_cycles=1", "arch.halt_max_steps=2", "arch.puzzle_emb_ndim=32", "arch.forward_dtype=float32"),
)
_TRAINING = (
    *(
        "epochs=4",
        "eval_interval=2",
        "global_batch_size=16",
        "ema=0.9",
        "compile=false",
        "sanity_check=false",
    ),
    *("device=cpu", "cpu_threads=1", "wandb_mode=disabled"),
)
_SEARCHED = ("study=s", "trials=2", "experiment=demo")
_SEARCHED += ("lr=interval(1e-4,1e-2)", "optimizer=choice(adam_atan2,muon)")
_PAIRS_OPTIONS = ("--symmetries", "dihedral,symbols", "--num-aug", "3")
_SOURCES = {
    "parquet": ("pairs", _PAIRS_OPTIONS),
    "sheet": ("pairs", _PAIRS_OPTIONS),
    "tasks": ("arc", ("--num-aug", "2")),
    "Kaggle": ("arc", ("--num-aug", "2")),
    "Sudokus": ("sudoku", ("--box", "2x2")),
    "mazes": ("maze", ()),
}
_PUZZLES = ("1..4 .... .... 4..1", "1 . | . 4\n. . | . .\n----+----\n. . | . .\n4 . | . 1\n")


@dataclasses.dataclass(frozen=True)
class Target:
    """An input of the programs, such as a checkpoint.

    Attributes:
        files: Folder with the intact files.
        change: Function that changes a copy of the folder at random. Returns a description of the change.
        read: Function that reads a copy of the folder. Returns a digest of its meaning.
        is_sealed: Whether a manifest has the digests of the files. A copy with another meaning must then be
            refused. If False, another meaning is allowed.
    """

    files: Path
    change: Callable[[Path, random.Random], str]
    read: Callable[[Path], str]
    is_sealed: bool = False


def make_targets(folder: Path) -> dict[str, Target]:
    """Builds datasets in `folder`, trains a tiny model, and returns {name: target} of all targets."""
    sudoku, variants = folder / "sudoku", folder / "variants"
    build_dataset("sudoku", ["--output-dir", str(sudoku), "--generate", "40", "--box", "2x2"])
    pairs = _write_pairs(folder / "pairs")
    build_dataset("pairs", ["--source", str(pairs), "--output-dir", str(variants), *_PAIRS_OPTIONS])
    run, published = folder / "run", folder / "published"
    run_program("pretrain.py", f"data_path={sudoku}", f"checkpoint_path={run}", *_MODEL, *_TRAINING)
    _publish(run, published)
    read_model = functools.partial(_read_model, load_metadata(sudoku, "test"))
    newest = find_checkpoint(run).path
    shared, study, evaluation = folder / "shared", folder / "study", folder / "evaluation"
    _share(run, shared)
    _write_study(study)
    words = (f"checkpoint={run}", f"output_dir={evaluation}", "save_outputs=[inputs,labels,preds]")
    run_program("evaluate.py", *words, *_TRAINING[-3:-1], "compile=false")
    texts = _write(folder / "puzzles", {"lines": _PUZZLES[0]})
    sources = _write_sources(folder / "sources", pairs)
    return {
        "dataset": Target(sudoku, mutate_files, _read_dataset),
        "dataset with variants": Target(variants, mutate_files, _read_dataset),
        "checkpoint": Target(newest, mutate_files, read_model, is_sealed=True),
        "checkpoint with a new manifest": Target(newest, _change_and_seal, read_model),
        "report": Target(run, mutate_files, _write_report),
        "share push": Target(run, mutate_files, lambda copy: _share(copy, copy.with_name("pushed"))),
        "solve": Target(shared, mutate_files, lambda copy: _solve(copy, texts)),
        "search": Target(study, _change_study, _read_study),
        "saved outputs": Target(evaluation, mutate_files, lambda copy: _show(sudoku, copy)),
        "published checkpoint": Target(published, mutate_files, read_model),
        "puzzle": Target(texts, _change_puzzle, lambda copy: _solve(run, copy)),
        "pairs": Target(pairs, mutate_files, functools.partial(_build, "pairs", _PAIRS_OPTIONS)),
    } | {
        f"source of {path.name}": Target(path, mutate_files, functools.partial(_build, *_SOURCES[path.name]))
        for path in sources
    }


def _write_sources(folder: Path, pairs: Path) -> list[Path]:
    """Writes one source folder for each kind of source in `_SOURCES`. Returns the folders.

    pairs: Folder with pairs.jsonl.
    """
    rows = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()]
    write_parquet(folder / "parquet" / "pairs.parquet", rows)
    write_sheet(folder / "sheet" / "pairs.xlsx", rows)
    write_source(folder / "tasks", count=2)
    write_kaggle(folder / "Kaggle", "arc-agi_evaluation", make_tasks(3))
    write_csv(folder / "Sudokus" / "train.csv", sudoku_rows(20))
    lists = "".join(f"{row[1]}\n" for row in sudoku_rows(4, stream=1))
    write_csv(folder / "mazes" / "train.csv", maze_rows(8))
    write_csv(folder / "mazes" / "test.csv", maze_rows(3, stream=8))
    _write(folder / "Sudokus", {"test.sdm": lists})
    return sorted(folder.iterdir())


def _write_pairs(folder: Path) -> Path:
    grids = np.random.default_rng(0).integers(0, 4, (12, 3, 3)).tolist()
    rows = [json.dumps({"input": grid, "output": grid[::-1]}) for grid in grids]
    return _write(folder, {"pairs.jsonl": "".join(f"{row}\n" for row in rows)})


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _publish(run: Path, folder: Path) -> None:
    """Writes the newest checkpoint of a run to `folder`, as the public code of HRM would write it."""
    folder.mkdir()
    checkpoint = find_checkpoint(run)
    weights = {f"_orig_mod.model.inner.{name}": value for name, value in load_weights(checkpoint).items()}
    torch.save(weights, folder / "step_7")
    config = read_yaml(checkpoint.path / "config.yaml")
    config["arch"]["name"] = "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1"
    kept = {key: config[key] for key in ("arch", "data_path", "global_batch_size")}
    (folder / "all_config.yaml").write_text(yaml.safe_dump(kept))


def _change_and_seal(folder: Path, draw: random.Random) -> str:
    """Changes a file and writes a manifest with the new digests, as an attacker would do."""
    what = mutate_files(folder, draw)
    if not (folder / MANIFEST_FILE).is_dir():
        seal(folder)
    return what


def _change_puzzle(folder: Path, draw: random.Random) -> str:
    text = mutate_text(draw.choice(_PUZZLES), draw)
    (folder / "lines").write_bytes(text.encode())
    return repr(text)


def _digest(*parts: object) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return found.hexdigest()


def _read_dataset(folder: Path) -> str:
    data = open_dataset(folder, read_everything=True)
    parts: list[object] = [data.metadata, read_info([folder], data.metadata).style, read_names(folder)]
    for name, puzzle_set in data.splits["test"].sets.items():
        batch = read_rows(data, name, np.arange(min(puzzle_set.num_examples, 64)))
        parts += [column.numpy() for column in batch if column is not None]
    for puzzle_set in data.splits["train"].sets.values():
        parts.append(np.asarray(puzzle_set.inputs))
    return _digest(*parts)


def _read_model(metadata: Metadata, folder: Path) -> str:
    """Reads the model of a checkpoint as evaluate.py does. metadata: Metadata of the training data."""
    checkpoint = find_checkpoint(folder)
    network = load_trained_model(checkpoint, metadata).network
    weights = [weight.numpy() for _, weight in sorted(network.state_dict().items())]
    trained = find_trained(checkpoint)
    return _digest(checkpoint.arch, *weights, *([] if trained is None else [trained.hashes]))


def _write_report(folder: Path) -> str:
    run = read_run(folder)
    write_report(folder, num_puzzles=0)
    return _digest(run.config, run.rows, run.evaluation, run.starts, run.status)


def _share(run: Path, goal: Path) -> str:
    """Writes to `goal` the files that `share push` would upload. Returns a digest of model card and config.

    Raises AssertionError if a text of the run would break the layout of the model card.
    """
    push([str(run), "owner/name", "--dry-run", str(goal)])
    card = (goal / "README.md").read_text()
    assert printable(card) == card, "card"
    assert card.count("```") == 4, "card"
    assert "<b>" not in card, "card"
    return _digest(card, (goal / SHARED_CONFIG_FILE).read_bytes())


def _show(data: Path, folder: Path) -> str:
    show([str(data), "--outputs", str(folder)])
    return ""


def _write_study(folder: Path) -> None:
    config, space, run = _compose_study()
    study = Study(folder / "study.db", config, space, run)
    for score in (0.25, 0.5):
        study.optuna.tell(study.begin()[0], score)


def _compose_study() -> tuple[SearchConfig, Space, PretrainConfig]:
    sys.argv = ["search.py", *_SEARCHED, "folder=elsewhere"]
    return compose_search()


def _read_study(folder: Path) -> str:
    """Reads the best parameters of a study as search.py does at its end."""
    config, space, run = _compose_study()
    study = Study(folder / "study.db", config, space, run)
    values = study.parameters(study.best()) if study.best() else {}
    assert "evil" not in str(values), "study"
    return _digest(experiment_yaml(space.overrides(values), ""))


def _change_study(folder: Path, draw: random.Random) -> str:
    """Overwrites a column of a random table in study.db, or changes the file as `mutate_files` does."""
    if draw.random() < 0.3:
        return mutate_files(folder, draw)
    with sqlite3.connect(folder / "study.db") as study:
        tables = {
            table: [column for _, column, *_ in study.execute(f"PRAGMA table_info({table})")]
            for (table,) in study.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            if study.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        }
        table = draw.choice(list(tables))
        column = draw.choice(tables[table])
        old = study.execute(f"SELECT {column} FROM {table}").fetchall()[0][0]
        new = draw.choice((*VALUES, "hf://evil", '{"init_from": "hf://evil"}'))
        new = new if draw.random() < 0.5 and isinstance(new, (int, float, str)) else json.dumps(new)
        with contextlib.suppress(sqlite3.Error, OverflowError):
            study.execute(f"UPDATE {table} SET {column} = ?", (new,))
    return f"{table}.{column}: {str(old)[:40]!r} -> {new[:40] if isinstance(new, str) else new!r}"


def _solve(run: Path, folder: Path) -> str:
    answer = load(run, device="cpu").solve(folder / "lines")
    return _digest(answer.text)


def _build(kind: str, options: Sequence[str], folder: Path) -> str:
    """Builds a dataset from the files of a folder. Returns a digest of the dataset."""
    goal = folder.with_name("built")
    build_dataset(kind, ["--source", str(folder), "--output-dir", str(goal), *options])
    return _read_dataset(goal)
