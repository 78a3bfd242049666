"""Who may import whom: data flows one way. And what must stay light."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY, run_code


def _read_table() -> dict[str, set[str]]:
    """Who may import whom: the table of CONTRIBUTING.md. A package may always import itself."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    text = text.partition("| folder | may import |")[2].partition("\n\n")[0]
    table: dict[str, set[str]] = {}
    for folders, names in re.findall(r"^\| (`[^|.]+`) \| ([^|]+) \|$", text, re.MULTILINE):
        allowed = {*re.findall(r"`([\w.]+)`", names), *(table if "all of these" in names else ())}
        table |= dict.fromkeys(re.findall(r"\w+", folders), allowed)
    assert len(table) >= 14
    return table


_MAY_IMPORT = _read_table()
_MAY_IMPORT["benchmarks"] = _MAY_IMPORT["benchmarks"] | {"tests.system.machines"}
_OURS = {*_MAY_IMPORT, "pretrain", "evaluate", "solve", "search", "tests"}


def _imports(path: Path) -> list[str]:
    """Every module that a file imports, at any depth, for annotations too."""
    names = []
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.append(node.module)
    return names


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements in a node, at any depth. `ast.walk` also visits expressions: 9 times slower."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from _statements(each)


def test_the_core_imports_nothing_that_is_built_on_it():
    on_top = {"report", "share", "tuning", "records", "benchmarks"}
    core = {name for name in _MAY_IMPORT if (REPOSITORY / name).is_dir()} - on_top - {"launch"}
    assert len(core) == 9
    for folder in core:
        assert not _MAY_IMPORT[folder] & on_top, folder


@pytest.mark.parametrize("package", [name for name in _MAY_IMPORT if (REPOSITORY / name).is_dir()])
def test_imports_go_downwards(package):
    assert (REPOSITORY / package / "__init__.py").is_file()
    for path in (REPOSITORY / package).rglob("*.py"):
        for name in _imports(path):
            top = name.partition(".")[0]
            is_allowed = top not in _OURS or {top, name} & ({package} | _MAY_IMPORT[package])
            assert is_allowed, f"{path.relative_to(REPOSITORY)} must not import {name}"


def test_nobody_imports_the_programs():
    for path in REPOSITORY.glob("*.py"):
        ours = {name.partition(".")[0] for name in _imports(path)} & _OURS
        ours -= {path.stem}  # the door imports its own
        assert ours <= set(_MAY_IMPORT), f"{path.name} imports {ours - set(_MAY_IMPORT)}"


def test_a_set_of_names_is_written_once():
    """Example: `NumberFormat`, which packages need that must not import each other."""
    places: dict[str, list[str]] = {}
    for path in (path for name in _MAY_IMPORT for path in (REPOSITORY / name).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                places.setdefault(ast.unparse(node), []).append(path.name)
    assert places.pop("NumberFormat = Literal['bfloat16', 'float32']") == ["formats.py"]
    assert all(len(files) == 1 for files in places.values()), places


@pytest.mark.slow
def test_help_whose_reader_leaves_is_no_error():
    """As with `--help | head`: the text is longer than what a pipe holds back."""
    code = "from config.compose import compose_config; from config.schema import PretrainConfig\n"
    command = [sys.executable, "-c", f"{code}compose_config(PretrainConfig)", "--help", "all"]
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(command, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_what_must_not_import_torch():
    """So that builders, and mistakes on their command lines, answer at once."""
    code = """
        import importlib, sys
        for module in sys.argv[1:]:
            importlib.import_module(module)
            if "torch" in sys.modules:
                sys.exit(module)
    """
    modules = ["config.compose", "dataset.show", "dataset.kinds.arc.build", "dataset.kinds.sudoku.build"]
    modules += ["runtime.hub", "dataset.kinds.pairs.build", "dataset.description"]
    run = run_code(code, *modules)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_run_loads_only_what_it_needs(sudoku_folder):
    """Opening a dataset needs no kind of puzzle; its kind is found without the other kinds.

    On the device "meta", a product of tensors imports torch._dynamo. That takes as long as torch.
    """
    code = """
        import sys
        from pathlib import Path
        import pretrain
        from dataset.mixture import open_datasets
        data = open_datasets([Path(sys.argv[1])], read_everything=True)
        names = ("dataset.build", "dataset.kinds.", "runtime.hub", "dataset.show", "share", "huggingface_hub")
        needed = ("dataset.kinds.kind", "dataset.kinds.evaluator")
        opened = [name for name in sys.modules if name.startswith(names) and name not in needed]
        from dataset.description import read_info
        assert read_info(data.folders, data.metadata).kind.name == "sudoku"
        others = ("dataset.kinds.arc", "dataset.kinds.maze", "dataset.kinds.pairs")
        print(opened, [name for name in sys.modules if name.startswith(others)])

        import torch
        from config.architecture import architectures
        from config.files import load_defaults
        from dataset.metadata import usual_metadata
        from models import build_model

        facts = usual_metadata(num_puzzle_identifiers=2, vocab_size=11, seq_len=81)
        for name, arch in architectures().items():
            with torch.device("meta"):
                build_model(arch(**load_defaults(f"arch/{name}") | {"forward_dtype": "float32"}), facts)
            if "torch._dynamo" in sys.modules:
                sys.exit(name)
    """
    run = run_code(code, sudoku_folder)
    assert (run.stdout, run.stderr) == ("[] []\n", "")
