"""The training that is soaked, under torchrun."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.harness import REPOSITORY
from tests.stress.runs import last_words, newest_step, num_rows, wait_for

_STEPS_PER_EPOCH = 31  # 4000 puzzles in batches of 128
_MOST_STEPS_PER_SECOND = 1000  # so that it does not come to its end by itself
_CHECKPOINT_INTERVAL, _EVALUATION_EPOCHS = 40, 8
_GIVE_UP_SECONDS = 1800.0  # after which a run that should come to its end does not
_QUICK_SIZES = ("arch.hidden_size=32", "arch.H_layers=1", "arch.L_layers=1")
# A sitecustomize.py: a clock that a file shifts. (libfaketime makes `time.sleep` fail since Python 3.11.)
_CLOCK = """
import time
right, shift, read = time.time, 0.0, float("-inf")
def shifted():
    global shift, read
    if time.monotonic() > read + 1:
        with open({path!r}) as file:
            shift, read = float(file.read() or 0), time.monotonic()
        if shift:
            open({path!r} + ".felt", "w").close()
    return right() + shift
time.time = shifted
"""


class Job:
    """A training under torchrun that does not end by itself, but at a step that `finish` is told."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, run: Path):
        self._arguments, self._folder, self.run = arguments, folder, run
        self._output = folder / f"{run.name}.txt"
        self._output.touch()
        self.clock, self._code = folder / f"{run.name}.clock", folder / f"{run.name}.code"
        self.clock.write_text("0")
        self._code.mkdir()
        (self._code / "sitecustomize.py").write_text(_CLOCK.format(path=str(self.clock)))
        self.torchrun: subprocess.Popen | None = None

    def start(self, *words: str) -> None:
        arguments, folder = self._arguments, self._folder
        most_steps = 60 * arguments.minutes * _MOST_STEPS_PER_SECOND
        iterations = 1 + int(most_steps / _STEPS_PER_EPOCH / _EVALUATION_EPOCHS)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--log-dir", str(folder / "torchrun")),
            *("--nproc-per-node", str(arguments.processes), "--max-restarts", "100000"),
            *(str(REPOSITORY / "pretrain.py"), "experiment=demo"),
            *(f"data_path={folder / 'data'}", f"checkpoint_path={self.run}"),
            *(f"epochs={iterations * _EVALUATION_EPOCHS}", f"eval_interval={_EVALUATION_EPOCHS}"),
            *(f"checkpoint_interval={_CHECKPOINT_INTERVAL}", "keep_checkpoints=2", "keep_best=null"),
            *("ema=0.999", "compile=false", f"cpu_threads={arguments.threads}", "log_interval=50"),
            *("device=" + arguments.device, *(_QUICK_SIZES if arguments.quick else ()), *words),
        ]
        code = os.pathsep.join(filter(None, [str(self._code), os.environ.get("PYTHONPATH")]))
        environment = {"TMPDIR": str(folder / "scratch"), "PYTHONPATH": code, "WANDB_MODE": "disabled"}
        with open(self._output, "a") as output:
            self.torchrun = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env=os.environ | environment
            )

    def num_said(self) -> int:
        """Returns the number of bytes that the run has printed so far."""
        return self._output.stat().st_size

    def said(self, begin: int) -> str:
        """Returns what the run has printed since."""
        return self._output.read_bytes()[begin:].decode(errors="replace")

    def wait_until_it_steps(self) -> None:
        wait_for(lambda: num_rows(self.run) > 0, [self.torchrun], self._output, seconds=_GIVE_UP_SECONDS)

    def check(self) -> None:
        """Ends this program if the run has ended."""
        if self.torchrun.poll() is not None:
            self._fail("has ended")

    def stop(self) -> None:
        """Stops the run after a step, saved; torchrun's own status is 1 then."""
        self.torchrun.terminate()
        self._wait(_GIVE_UP_SECONDS)

    def finish(self, last_step: int) -> None:
        """Goes on to this step, or begins."""
        self.start(f"max_steps={last_step}")
        status = self._wait(_GIVE_UP_SECONDS + 60 * self._arguments.minutes)
        if status != 0 or newest_step(self.run) != last_step:
            self._fail("fails")

    def _wait(self, seconds: float) -> int:
        try:
            return self.torchrun.wait(seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"does not end within {seconds:.0f} s")

    def _fail(self, how: str) -> NoReturn:
        raise SystemExit(f"the run {how}, its last words:\n{last_words(self._output)}")
