"""A real torchrun in the background, its workers, and how the run ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.ranks import REPOSITORY
from tests.tiny import OVERRIDES

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"


class Launch:
    """torchrun with two workers of pretrain.py on a small model, in `folder`/run."""

    def __init__(self, folder: Path, data: Path, *arguments: str, options: tuple[str, ...] = ()):
        self.folder, self.run = folder, folder / "run"
        self._output = (folder / "output.txt").open("a")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options),
                *(str(REPOSITORY / "pretrain.py"), f"data_path={data}", *OVERRIDES),
                f"checkpoint_path={self.run}",
                *arguments,
            ],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
            stdout=self._output,
            stderr=self._output,
        )

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def step(self) -> int:
        """The newest logged one."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max([json.loads(line)["step"] for line in lines if line.endswith("\n")], default=0)

    def log(self, rank: int) -> str:
        return (self.run / "logs" / f"rank_{rank}.log").read_text()

    def wait_for(self, condition: Callable[[], bool], *, what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.output[-3000:]}"
            time.sleep(0.05)

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self.process.pid:
                    continue
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended in the meantime
                continue
            found |= {int(item[5:]): int(entry.name) for item in environment if item.startswith(b"RANK=")}
        return found

    def end(self) -> None:
        """Nothing of it stays behind."""
        for worker in self.workers().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._output.close()


@contextlib.contextmanager
def launch(folder: Path, data: Path, *arguments: str, options: tuple[str, ...] = ()) -> Iterator[Launch]:
    started = Launch(folder, data, *arguments, options=options)
    try:
        yield started
    finally:
        started.end()
