"""Changes input files of the programs at random. Each must be read as before, or refused in one line.

    python -m tests.stress.fuzz [--mutations 2000] [--first 0]
    python -m tests.stress.fuzz --first 1234 --mutations 1 --keep FOLDER

A changed file must be read with the same meaning as before, or be refused with one line of error message. A
file without digests, such as a text or a config, may also get another meaning. Every other outcome is bad: a
traceback, several lines, a message that does not name the file, terminal codes in a message, another meaning
despite a manifest, code in a file that is executed, a write to a file beside the folder, more than 20 s of a
core or 2 minutes in total, or more than 2 GiB of memory.

Each change is read in a separate process, and depends only on its number. The exit status is 1 if an outcome
is bad.
"""

from runtime.environment import num_cores

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from benchmarks.harness import positive, run_main, table
from runtime.command_line import OneLineParser
from runtime.reading import printable
from tests.stress.mutations import MARKER, VICTIM
from tests.stress.targets import Target, make_targets

_SECONDS, _TOTAL_SECONDS, _BYTES = 20, 120, 2 * 2**30
_FINE = ("same", "other", "refused")  # what may come of a mutation


class Outcome(NamedTuple):
    """The outcome of reading a changed file.

    Attributes:
        number: Number of the mutation.
        target: Name of the input that was changed, such as "checkpoint".
        what: Description of the change.
        kind: One of _FINE, or a text that says what is bad, such as "bad: too long".
        said: Digest of the meaning, error message or traceback.
    """

    number: int
    target: str
    what: str
    kind: str
    said: str


class Fuzz:
    """Makes mutations and reads them. Creates all inputs, and reads each of them without a change.

    folder: Folder for the inputs and their copies.
    """

    def __init__(self, folder: Path):
        self._folder, self._targets = folder, make_targets(folder)
        self._meant = {}
        for name, target in self._targets.items():
            kind, said = self._read_in_a_process(target, self._copy(target, "first"))
            assert kind == "read", f"{name}: {said}"
            self._meant[name] = said

    def try_one(self, number: int) -> Outcome:
        """Makes mutation `number` in a copy of an input, and reads the copy in a new process."""
        name = list(self._targets)[number % len(self._targets)]
        target, copy = self._targets[name], self._copy(self._targets[name], f"number_{number}")
        what = target.change(copy, random.Random(number))
        victim = copy.with_name(VICTIM)
        before = victim.read_bytes() if victim.exists() else b""
        kind, said = self._read_in_a_process(target, copy)
        if kind == "read":
            kind = "same" if said == self._meant[name] else "other"
            kind = "bad meaning" if kind == "other" and target.is_sealed else kind
        if before and victim.read_bytes() != before:
            kind = "bad: written through a link"
        if kind in _FINE:
            shutil.rmtree(copy.parent)
        return Outcome(number, name, what, kind, said)

    def _copy(self, target: Target, name: str) -> Path:
        shutil.rmtree(self._folder / name, ignore_errors=True)
        return shutil.copytree(target.files, self._folder / name / target.files.name)

    def _read_in_a_process(self, target: Target, copy: Path) -> tuple[str, str]:
        said, marker = copy.parent / "said", copy.parent / "executed"
        os.environ[MARKER] = str(marker)
        child = os.fork()
        if child == 0:
            _read_and_exit(target, copy, said)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = said.read_text(errors="replace") if said.exists() else ""
        if marker.exists():
            return "bad: executed", text
        if status:
            is_long = -status in (signal.SIGALRM, signal.SIGXCPU)
            return "bad: too long" if is_long else f"bad: status {status}", text
        kind, _, text = text.partition("\n")
        if kind == "refused" and len(text.splitlines()) != 1:
            kind = "bad: not one line"
        elif kind == "refused" and not text.isprintable():
            kind = "bad: codes of a terminal"
        elif kind == "refused":
            sources = ["config: ", str(self._folder), *(path.stem for path in target.files.rglob("*.*"))]
            kind = kind if any(source in text for source in sources) else "bad: not said where"
        return kind, text


def _read_and_exit(target: Target, copy: Path, said: Path) -> NoReturn:
    """Reads a copy, writes the outcome to the file `said`, and ends this process.

    The first line of the file is the kind of outcome. The digest of the meaning or the error follows.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_TOTAL_SECONDS)  # beside other programs
    used = int(time.process_time())  # by the process that this one is a copy of
    resource.setrlimit(resource.RLIMIT_CPU, (used + _SECONDS, used + 2 * _SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + _BYTES,) * 2)
    output = os.open(copy.parent / "output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        found = f"read\n{target.read(copy)}"
    except ValueError as error:
        found = f"refused\n{printable(str(error))}"  # as `distributed.log` shows it
    except SystemExit as end:  # of a program with --options
        found = f"refused\n{end.code}" if isinstance(end.code, str) else "bad: ended\n"
    except MemoryError:
        found = f"bad: memory\n{traceback.format_exc()}"
    except BaseException:
        found = f"bad: traceback\n{traceback.format_exc()}"
    said.write_text(found, errors="replace")
    os._exit(0)


def _data_bytes() -> int:
    """Returns the size in bytes of this process's private memory, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if an outcome is bad, otherwise 0."""
    about = __doc__.partition("\n")[0]
    parser = OneLineParser("tests.stress.fuzz", description=about)
    parser.add_argument("--mutations", type=positive, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first (default: 0)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what was made and changed there")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        fuzz = Fuzz(folder)
        numbers = range(arguments.first, arguments.first + arguments.mutations)
        # Each worker has the memory of this process, as it is now, and makes a process for each mutation.
        with multiprocessing.get_context("fork").Pool(num_cores(), _keep, (fuzz,)) as pool:
            for outcome in pool.imap(_try, numbers):
                counts.setdefault(outcome.target, Counter())[outcome.kind] += 1
                if outcome.kind not in _FINE:
                    print(f"--first {outcome.number}: {outcome.target}: {outcome.what}")
                    print(f"{outcome.kind}: {outcome.said}\n", flush=True)
    rows = [["target", *_FINE, "bad"]]
    for name, found in counts.items():
        fine = [found[kind] for kind in _FINE]
        rows.append([name, *map(str, fine), str(found.total() - sum(fine))])
    print(*table(rows), sep="\n")
    total = sum(counts.values(), Counter())
    num_bad = arguments.mutations - sum(total[kind] for kind in _FINE)
    result = {"mutations": arguments.mutations, "bad": num_bad} | {kind: total[kind] for kind in _FINE}
    print(json.dumps({"benchmark": "fuzz", **result}))
    return 1 if num_bad else 0


def _keep(fuzz: Fuzz) -> None:
    global _fuzz
    _fuzz = fuzz


def _try(number: int) -> Outcome:
    return _fuzz.try_one(number)


if __name__ == "__main__":
    run_main(lambda: sys.exit(main()))
