"""The builders of datasets, by the name of their kind.

A builder is a module with three functions: add_options(parser); check_options(options), which fills in
defaults and raises ValueError for contradictions; build(options), which writes the dataset. --help prints
the first line of the module's docstring. The builder of a kind is the module `build` of its package. In a
plugin that is one file, it is the file itself.
"""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

import dataset.kinds
from dataset.build.writing import check_output_folder
from runtime.command_line import OneLineParser, add_plugin_option, import_plugins, integer
from runtime.plugins import defined, plugin_of

_OTHERS = {"reasoning_gym": "dataset.kinds.pairs.reasoning_gym"}  # builders that have no kind of their own


def builders() -> dict[str, str]:
    """Returns {name of a builder: its module}, with those of imported plugins. Imports no builder."""
    found = dict(_OTHERS)
    for folder in (each for each in Path(dataset.kinds.__file__).parent.iterdir() if each.is_dir()):
        if (folder / "build.py").is_file():
            found[folder.name] = f"dataset.kinds.{folder.name}.build"
    for kind in defined("KIND"):
        plugin = plugin_of("KIND", kind)
        is_package = plugin.__spec__.submodule_search_locations is not None
        found[kind.name] = f"{plugin.__name__}.build" if is_package else plugin.__name__
    return dict(sorted(found.items()))


def build_dataset(kind: str, arguments: Sequence[str]) -> None:
    """Builds a dataset as `python -m dataset.build KIND ARGUMENTS` does.

    ValueError, one line, where the arguments or the source are wrong; then nothing is written.
    """
    import_plugins(arguments)
    if kind not in (known := builders()):
        raise ValueError(f"name what to build, one of {', '.join(known)}, then its options or --help")
    started = time.monotonic()
    builder = importlib.import_module(known[kind])
    parser = OneLineParser(f"dataset.build {kind}", description=builder.__doc__.partition("\n")[0])
    add_plugin_option(parser)
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
