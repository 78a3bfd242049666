"""Runs the tests with other versions of Python and torch, each in a new environment: `make matrix`.

    python -m tests.matrix                  # every combination: hours
    python -m tests.matrix --fast --record  # the tests of `make test-fast`, into benchmarks/RESULTS.md
    python -m tests.matrix --only py3.12-torch2.11.0 --tests tests/test_layers.py
    python -m tests.matrix --resolve        # only whether they can be installed

uv finds the Pythons (pyenv's too), and downloads those that are missing. The registry and the folders of
wheels are pip's; the other packages have the versions of constraints.txt. An environment takes 1 to 6 GB, and
is deleted after its tests. --record puts each row into benchmarks/RESULTS.md as soon as it is there, in place
of the row that its combination has.
"""

import argparse
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import REPOSITORY

PYTHONS = ("3.10", "3.12", "3.13")
NEWEST = "newest"
TORCHES = ("2.11.0", NEWEST)
_UV = str(Path(sys.executable).with_name("uv"))
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"
_BEGIN, _END = "<!-- versions -->\n", "<!-- end of versions -->"
_HEAD = ("| Python | torch | installed | tests | result | took | date, commit |", "|---" * 7 + "|")
_SUMMARY = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in ([\d.]+)s", re.MULTILINE)
_LAST_WORDS = 2000  # characters


@dataclasses.dataclass(frozen=True)
class Combination:
    python: str
    torch: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}"

    @property
    def key(self) -> str:
        """The first two cells of its row."""
        return f"| {self.python} | {self.torch} |"

    @property
    def requirement(self) -> str:
        return "torch" if self.torch == NEWEST else f"torch=={self.torch}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a combination. torch: its full version, where it could be installed."""

    combination: Combination
    torch: str
    said: str
    seconds: float
    is_good: bool

    def row(self, tests: str, today: str) -> str:
        minutes = f"{self.seconds / 60:.0f} min"
        return f"{self.combination.key} {self.torch} | {tests} | {self.said} | {minutes} | {today} |"


COMBINATIONS = [Combination(python, torch) for python in PYTHONS for torch in TORCHES]
_KEYS = [each.key for each in COMBINATIONS]


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where all tests of all combinations pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.partition("\n")[0])
    names = [each.name for each in COMBINATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="%(choices)s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fast", action="store_true", help="without the tests that take seconds")
    which.add_argument("--tests", nargs="+", metavar="PATH", help="only these, for pytest")
    which.add_argument("--resolve", action="store_true", help="only look whether they can be installed")
    parser.add_argument("--record", action="store_true", help=f"keep each row in benchmarks/{RESULTS.name}")
    arguments = parser.parse_args(words)
    if arguments.record and (arguments.resolve or arguments.tests):
        parser.error("--record is for all tests, or all of --fast")
    tests = arguments.tests or ["tests", "--ignore", "tests/system"]
    tests += ["-m", "not slow"] if arguments.fast else []
    what = "fast" if arguments.fast else "these" if arguments.tests else "all"
    try:
        today = _today()
        _output([_UV, "--version"])
    except (OSError, subprocess.CalledProcessError) as error:
        parser.error(f"git and uv are needed ({error}): make setup, in a checkout")
    results = []
    for combination in COMBINATIONS:
        if combination.name in arguments.only:
            print(f"{combination.name} ...", flush=True)
            results.append(try_combination(combination, tests, resolves_only=arguments.resolve))
            if arguments.record:
                record(results[-1].row(what, today))
            print(results[-1].row(what, today), flush=True)
    print("", *_HEAD, *(result.row(what, today) for result in results), sep="\n")
    return 0 if all(result.is_good for result in results) else 1


def record(row: str) -> None:
    """Puts a row into the table between the two marks, in the order of the combinations."""
    before, _, rest = RESULTS.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    rows = {key: line for line in [*table.splitlines(), row] for key in _KEYS if line.startswith(key)}
    lines = [*_HEAD, *(rows[key] for key in _KEYS if key in rows)]
    RESULTS.write_text("".join([before, _BEGIN, *(f"{line}\n" for line in lines), _END, after]))


def try_combination(combination: Combination, tests: Sequence[str], *, resolves_only: bool) -> Result:
    """Installs a combination, runs its tests, and deletes it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        version, said, is_good = "", "", False
        try:
            python = _install(combination, Path(folder), resolves_only=resolves_only)
            if resolves_only:
                version, said, is_good = combination.torch, "can be installed", True
            else:
                version = _output([python, "-c", "import torch; print(torch.__version__)"])
                said, is_good = _run_tests(python, tests)
        except subprocess.CalledProcessError as error:
            print((error.stdout + error.stderr)[-_LAST_WORDS:], flush=True)
            said = "cannot be installed"
    return Result(combination, version or combination.torch, said, time.monotonic() - began, is_good)


def _install(combination: Combination, folder: Path, *, resolves_only: bool) -> str:
    """Makes the environment and returns its Python. CalledProcessError where that fails."""
    python = str(folder / "venv" / "bin" / "python")
    _output([_UV, "venv", "--python", _find_python(combination.python), str(folder / "venv")])
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
    command = [_UV, "pip", "install", "--python", python, "-c", str(constraints), *_registry()]
    command += ["-r", str(REPOSITORY / "requirements.txt")]
    command += ["--group", f"{REPOSITORY / 'pyproject.toml'}:dev", combination.requirement]
    command += ["--dry-run"] if resolves_only else []
    try:  # the small build, where torch's own registry can be reached
        _output([*command, "--torch-backend=cpu"])
    except subprocess.CalledProcessError:
        _output(command)
    return python


def _find_python(version: str) -> str:
    """Returns pyenv's, which uv finds only where a shim is set; else what uv finds by the version."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(of_pyenv[-1]) if of_pyenv else version


def _registry() -> list[str]:
    """Returns pip's registry and folders of wheels as uv's options."""
    options = []
    for key, option in (("index-url", "--default-index"), ("find-links", "--find-links")):
        value = os.environ.get(f"PIP_{key.replace('-', '_').upper()}")
        if not value:
            asked = [sys.executable, "-m", "pip", "config", "get", f"global.{key}"]
            value = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        options += [option, value] if value else []
    return options


def _run_tests(python: str, tests: Sequence[str]) -> tuple[str, bool]:
    """Returns pytest's last line, with the names of what failed, and whether all is well."""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", finished.stdout, re.MULTILINE)
    found = _SUMMARY.findall(finished.stdout)
    said = found[-1][0] if found else f"pytest ended with status {finished.returncode}"
    if finished.returncode:
        print((finished.stdout + finished.stderr)[-_LAST_WORDS:], flush=True)
    return "; ".join([said, *failed]), finished.returncode == 0


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def _today() -> str:
    return f"{time.strftime('%Y-%m-%d')}, `{_output(['git', 'rev-parse', '--short', 'HEAD'])}`"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the environment is deleted
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
