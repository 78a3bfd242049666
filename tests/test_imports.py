"""Who may import whom: data flows one way. And what must stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY

# Downwards only. A package may always import itself.
_MAY_IMPORT = {
    "config": set(),
    "dataset": set(),
    "parallel": set(),
    "models": {"dataset.format"},
    "optimizers": {"parallel"},
    "evaluation": {"config", "dataset", "models", "parallel"},
    "training": {"config", "dataset", "evaluation", "models", "optimizers", "parallel"},
    "benchmarks": {"config", "dataset", "evaluation", "models", "optimizers", "parallel", "training"},
}
_OURS = {*_MAY_IMPORT, "pretrain", "evaluate", "tests"}


def _imports(path: Path) -> list[str]:
    """Every module that a file imports, at any depth."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.append(node.module)
    return names


@pytest.mark.parametrize("package", [name for name in _MAY_IMPORT if (REPOSITORY / name).is_dir()])
def test_imports_go_downwards(package):
    assert (REPOSITORY / package / "__init__.py").is_file()
    for path in (REPOSITORY / package).rglob("*.py"):
        for name in _imports(path):
            top = name.partition(".")[0]
            if top in _OURS and top != package:
                allowed = {top, name} & _MAY_IMPORT[package]
                assert allowed, f"{path.relative_to(REPOSITORY)} must not import {name}"


def test_nobody_imports_the_programs():
    for path in REPOSITORY.glob("*.py"):
        ours = {name.partition(".")[0] for name in _imports(path)} & _OURS
        assert ours <= set(_MAY_IMPORT), f"{path.name} imports {ours - set(_MAY_IMPORT)}"


@pytest.mark.parametrize("program", ["pretrain", "evaluate"])
@pytest.mark.parametrize("argument", ["--help", "lrr=1"])
def test_help_and_mistakes_answer_without_torch(program, argument):
    code = (
        f"import sys; sys.argv = ['{program}.py', '{argument}']; import {program}\n"
        f"try: {program}.main()\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "module",
    ["pretrain", "evaluate", "config.compose", "training.run_folder", "dataset.show", "dataset.build_arc"],
)
def test_what_must_not_import_torch(module):
    """So that --help and mistakes on the command line answer at once, and builders run without it."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
