"""Changes what the programs read from outside, at random: all is read as before, or refused in one line.

    python -m tests.stress.fuzz [--mutations 2000] [--first 0]
    python -m tests.stress.fuzz --first 1234 --mutations 1 --keep FOLDER

Every mutation must be read with the same meaning as before, or refused by one line of ours. What has no
digests, a text or a config, may also mean something else. All else is bad: a traceback, two lines, a line
that does not say where, codes of a terminal, another meaning under a manifest, a byte of a file that is
executed, a file beside the folder that is written, more than 20 seconds of a core or 2 minutes in all, more
than 2 GB of memory.
Each mutation is read in a process of its own, and is a function of its number. Status 1 where one is bad.
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

_SECONDS, _BYTES = 20, 2 * 2**30
_FINE = ("same", "other", "refused")  # what may come of a mutation


class Outcome(NamedTuple):
    """The outcome of a mutation. kind: one of _FINE, or what is bad. said: an error, or its traceback."""

    number: int
    target: str
    what: str
    kind: str
    said: str


class Fuzz:
    """All that is the same for every mutation; folder: where copies are made."""

    def __init__(self, folder: Path):
        self._folder, self._targets = folder, make_targets(folder)
        self._meant = {}
        for name, target in self._targets.items():
            kind, said = self._read_in_a_process(target, self._copy(target, "first"))
            assert kind == "read", f"{name}: {said}"
            self._meant[name] = said

    def try_one(self, number: int) -> Outcome:
        """Makes mutation `number`, and reads what it has changed in a process of its own."""
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
    """Writes the kind of outcome, and in the next line the meaning or the error."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS * 6)  # beside other programs
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
    """Returns how much memory of its own this process has, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
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
