"""The builders of datasets, by the name of their kind in `BUILDERS`.

A builder is a module with add_options(parser); check_options(options), which fills in defaults and raises
ValueError for contradictions; and build(options), which writes the dataset. --help prints the first line of
its docstring.
"""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from dataset.build.writing import check_output_folder
from runtime.command_line import OneLineParser, integer

BUILDERS = {
    "arc": "dataset.kinds.arc.build",
    "maze": "dataset.kinds.maze.build",
    "pairs": "dataset.kinds.pairs.build",
    "reasoning_gym": "dataset.kinds.pairs.reasoning_gym",
    "sudoku": "dataset.kinds.sudoku.build",
}


def build_dataset(kind: str, arguments: Sequence[str]) -> None:
    """Builds a dataset as `python -m dataset.build KIND ARGUMENTS` does.

    ValueError, one line, where the arguments or the source are wrong; then nothing is written.
    """
    if kind not in BUILDERS:
        raise ValueError(f"name what to build, one of {', '.join(BUILDERS)}, then its options or --help")
    started = time.monotonic()
    builder = importlib.import_module(BUILDERS[kind])
    parser = OneLineParser(f"dataset.build {kind}", description=builder.__doc__.partition("\n")[0])
    output_dir = "replaced if built before"
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help=output_dir)
    seed = "what is drawn at random (default 0)"
    parser.add_argument("--seed", type=integer(at_least=0), default=0, help=seed)
    builder.add_options(parser)
    options = parser.parse_args(arguments)
    builder.check_options(options)
    check_output_folder(options.output_dir, builder=kind)
    builder.build(options)
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")
