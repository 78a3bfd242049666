"""The builders of datasets: programs that read or generate puzzles and write a dataset folder.

A builder has the name of the kind of its puzzles. Exception: the builder reasoning_gym writes datasets of the
kind pairs. A builder is a module with three functions:

- add_options(parser) adds its options.
- check_options(options) sets defaults. It raises ValueError for contradictory options.
- build(options) writes the dataset.

--help prints the first line of the module's docstring. The builder of a kind is the module `build` of its
package. If a plugin is a single file, the file is also the builder.
"""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

import dataset.kinds
from dataset.build.writing import check_output_folder
from runtime.command_line import OneLineParser, add_plugin_option, import_plugins, integer
from runtime.plugins import defined, plugin_of

_OTHERS = {"reasoning_gym": "dataset.kinds.pairs.reasoning_gym"}  # builders for the datasets of another kind


def builders() -> dict[str, str]:
    """Returns the module of each dataset builder, such as {"maze": "dataset.kinds.maze.build"}.

    Includes the builders of imported plugins. Does not import the builders.
    """
    found = dict(_OTHERS)
    for folder in (entry for entry in Path(dataset.kinds.__file__).parent.iterdir() if entry.is_dir()):
        if (folder / "build.py").is_file():
            found[folder.name] = f"dataset.kinds.{folder.name}.build"
    for kind in defined("KIND"):
        plugin = plugin_of("KIND", kind)
        is_package = plugin.__spec__.submodule_search_locations is not None
        found[kind.name] = f"{plugin.__name__}.build" if is_package else plugin.__name__
    return dict(sorted(found.items()))


def build_dataset(kind: str, arguments: Sequence[str | int | Path]) -> None:
    """Builds a dataset, like the command `python -m dataset.build KIND ARGUMENTS`.

    Args:
        kind: Name of a builder, such as "sudoku".
        arguments: The other arguments of the command, such as ["--seed", 7, "--output-dir", "data/demo"].

    Raises:
        ValueError: An argument or the source of the puzzles is not valid. The message has one line. No
            dataset is written.
    """
    if isinstance(arguments, str):
        words = arguments.split()
        raise ValueError(f"the arguments are a text, {arguments!r}. Pass a list, such as {words}.")
    arguments = list(map(str, arguments))
    import_plugins(arguments)
    if kind not in (known := builders()):
        is_option = kind.startswith("-")
        problem = f"{kind} is before the name of a builder" if is_option else f"{kind!r} is not a builder"
        raise ValueError(
            f"{problem}. Pass one of {', '.join(known)}, then options or --help. For a kind of yours, add "
            "--plugin FILE after its name."
        )
    started = time.monotonic()
    builder = importlib.import_module(known[kind])
    parser = OneLineParser(f"dataset.build {kind}", description=builder.__doc__.partition("\n")[0])
    add_plugin_option(parser)
    output_dir = "folder to write; if a builder made it before, it is replaced"
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help=output_dir)
    seed = "seed of all random choices (default 0)"
    parser.add_argument("--seed", type=integer(at_least=0), default=0, help=seed)
    builder.add_options(parser)
    options = parser.parse_args(arguments)
    builder.check_options(options)
    check_output_folder(options.output_dir, builder=kind)
    builder.build(options)
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")
