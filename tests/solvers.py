"""Writes runs of tiny models for tests of solve.py, and runs solve.py in the process of a test."""

import sys
from pathlib import Path

import solve
from dataset.build import build_dataset
from dataset.description import read_info
from dataset.files import open_dataset
from tests.arc_source import write_source
from tests.checkpoints import save_on
from tests.tiny import draw_small_parts_

PUZZLE = "1..4 .... .... 4..1"
CLUES = [2, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 5, 1, 1, 2]


def save_run(run: Path, data: Path, *, has_facts: bool = True, **arch) -> Path:
    """Writes a run folder with an untrained model for the dataset in `data`. Returns the run folder.

    The Q head and the puzzle embeddings are random, because they are zeros in a new model. has_facts: Whether
    the checkpoint describes its dataset. arch: Changed settings of the model.
    """
    dataset = open_dataset(data, read_everything=False)
    facts = read_info([data], dataset.metadata).to_json() if has_facts else None
    return save_on(data, run, train=lambda state: draw_small_parts_(state.model.network), facts=facts, **arch)


def save_maze_run(folder: Path) -> Path:
    """Builds a dataset of 4x4 mazes in <folder>/mazes, and writes a run in <folder>/maze. Returns the run."""
    build_dataset("maze", ["--output-dir", str(folder / "mazes"), "--generate", "30", "--size", "4"])
    return save_run(folder / "maze", folder / "mazes")


def save_arc_run(folder: Path) -> Path:
    """Writes ARC tasks, their dataset with fields of 8x8 cells, and a run. Returns the run folder.

    The folders are <folder>/tasks, <folder>/arc_data and <folder>/arc.
    """
    source = write_source(folder / "tasks", count=2)
    where = ["--output-dir", str(folder / "arc_data"), "--source", str(source)]
    build_dataset("arc", [*where, "--num-aug", "2", "--max-size", "8"])
    small = {"hidden_size": 16, "puzzle_emb_ndim": 16, "H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2}
    return save_run(folder / "arc", folder / "arc_data", name="trm", puzzle_emb_len=1, **small)


def run_solve(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Runs solve.py in this process. Returns (exit status, text of stdout, text of stderr)."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["solve.py", "cpu_threads=1", "device=cpu", *arguments])
    status = 0
    try:
        solve.main()
    except SystemExit as error:
        status = error.code
    shown = capsys.readouterr()
    return status, shown.out, shown.err
