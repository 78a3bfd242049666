"""Runs of tiny models for solve.py, one of each kind of puzzle, and the program in this process."""

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
    """A run folder with a model as it is drawn from the seed, but for its Q head and puzzle table."""
    dataset = open_dataset(data, read_everything=False)
    facts = read_info([data], dataset.metadata).to_json() if has_facts else None
    return save_on(data, run, train=lambda state: draw_small_parts_(state.model.network), facts=facts, **arch)


def save_maze_run(folder: Path) -> Path:
    """Mazes are in <folder>/mazes, the run in <folder>/maze."""
    build_dataset("maze", ["--output-dir", str(folder / "mazes"), "--generate", "30", "--size", "4"])
    return save_run(folder / "maze", folder / "mazes")


def save_arc_run(folder: Path) -> Path:
    """Tasks are in <folder>/tasks, the dataset (8x8 cells) in <folder>/arc_data, the run in <folder>/arc."""
    source = write_source(folder / "tasks", count=2)
    where = ["--output-dir", str(folder / "arc_data"), "--source", str(source)]
    build_dataset("arc", [*where, "--num-aug", "2", "--max-size", "8"])
    small = {"hidden_size": 16, "puzzle_emb_ndim": 16, "H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2}
    return save_run(folder / "arc", folder / "arc_data", name="trm", puzzle_emb_len=1, **small)


def run_solve(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Runs solve.py in this process: its status, what it printed, and its errors."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["solve.py", "cpu_threads=1", "device=cpu", *arguments])
    status = 0
    try:
        solve.main()
    except SystemExit as error:
        status = error.code
    shown = capsys.readouterr()
    return status, shown.out, shown.err
