"""What goes wrong while a training is soaked."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.stress.soak.job import Job

_DAY = 86400.0
# What a run says that cannot write: while it steps, and at its start.
_COMPLAINTS = ("COULD NOT BE SAVED", "No space left on device", "Read-only file system")
IN_NAMESPACE = "SOAK_IN_NAMESPACE"
_FILL_SECONDS = 0.2


def can_mount() -> bool:
    """Tells whether this process may mount, in a namespace of its own."""
    if os.geteuid() or not shutil.which("unshare"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", folder]
        return subprocess.run(command, capture_output=True).returncode == 0


Trouble = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]  # gives: has the run noticed?


def troubles_of(disk: Path, job: Job) -> tuple[dict[str, Trouble], dict[str, str]]:
    """Returns by name what can go wrong here, and why the rest cannot."""
    troubles, skipped = {"clock set back": lambda: _clock_set_back(job.clock)}, {}
    if IN_NAMESPACE in os.environ:
        troubles |= {"full disk": lambda: _full(disk, job), "read-only folder": lambda: _read_only(job)}
    else:
        skipped |= dict.fromkeys(("full disk", "read-only folder"), "this process may not mount")
    return troubles, skipped


def mount(folder: Path, *, megabytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)


@contextlib.contextmanager
def _full(disk: Path, job: Job) -> Iterator[Callable[[], bool]]:
    """Fills the disk, and again whatever becomes free: of a failed save its files, and older checkpoints."""
    filler, is_over, begin = disk / "filler", threading.Event(), job.num_said()

    def fill() -> None:
        while not is_over.wait(_FILL_SECONDS):
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    try:
        yield lambda: any(words in job.said(begin) for words in _COMPLAINTS)
    finally:
        is_over.set()
        filling.join()
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def _read_only(job: Job) -> Iterator[Callable[[], bool]]:
    """Covers the folder by a mount of itself that nobody can write to; open files stay what they are."""
    run, begin = str(job.run), job.num_said()
    subprocess.run(["mount", "--bind", run, run], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
        yield lambda: any(words in job.said(begin) for words in _COMPLAINTS)
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)


@contextlib.contextmanager
def _clock_set_back(clock: Path) -> Iterator[Callable[[], bool]]:
    clock.write_text(f"{-_DAY}")
    try:
        yield Path(f"{clock}.felt").exists
    finally:
        clock.write_text("0")
