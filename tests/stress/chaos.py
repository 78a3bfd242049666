"""Kills random ranks of the demo at random times, by `kill -9`: does the run survive, with the same bits?

    python -m tests.stress.chaos --kills 10
    python -m tests.stress.chaos --kills 3 --nodes 2

The same training is done twice under torchrun: left alone, and with kills, after each of which torchrun
starts all ranks again and they go on from the newest checkpoint. Identical means that the final weights have
the same bits. A recovery is the time from the kill until the first new step is done.

With --nodes the processes are spread over emulated machines (root), and a kill ends all that runs on one of
them, torchrun too, which is started there again after a while. Any but the first, which holds the meeting
point of all.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import (
    REPOSITORY,
    Sample,
    add_processes,
    benchmark_parser,
    parse,
    positive,
    print_report,
)
from dataset.build import build_dataset
from parallel.process_group import num_cores
from tests.stress.runs import digest, kill_run, last_words, num_rows, recoveries, wait_for, workers
from tests.system.machines import Machines, emulate, why_not

_STEPS_PER_KILL, _QUICK_STEPS_PER_KILL = 60, 300  # enough that the run is not over before the last kill
_QUICK_SIZES = ("arch.hidden_size=16", "arch.H_layers=1", "arch.L_layers=1", "global_batch_size=32")
_STEPS_PER_EPOCH, _QUICK_STEPS_PER_EPOCH = 31, 12  # 4000 puzzles in batches of 128, 400 of 32
_LONGEST_WAIT_SECONDS = 3.0  # from a new step to the next kill
_GIVE_UP_SECONDS = 120.0
_RUNS = ("alone", "chaos")
_MEETING_POINT = (
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "--rdzv-id", "chaos"),
    *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3"),  # missed after 3 s instead of 15
)


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "chaos", description="Survives kills of random ranks at random times.", rounds=None
    )
    parser.add_argument("--kills", type=positive, default=10, metavar="N", help="default: 10")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills; default: 0")
    help_nodes = "emulated machines, of which whole ones are killed; default: none"
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help=help_nodes)
    add_processes(parser)
    arguments = parse(parser, words)
    if arguments.processes % arguments.nodes:
        parser.error(
            f"--processes {arguments.processes} cannot be spread evenly over --nodes {arguments.nodes}"
        )
    if arguments.nodes > 1 and (reason := why_not()):
        parser.error(f"--nodes {arguments.nodes} needs emulated machines: {reason}")
    if not Path("/proc/self/environ").exists():
        parser.error("the ranks to kill are found in /proc, which is not here")
    arguments.kills = 2 if arguments.quick else arguments.kills
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        for name in _RUNS:
            opened.callback(kill_run, folder / name)
        machines = None
        if arguments.nodes > 1:
            machines = opened.enter_context(emulate(arguments.nodes, folder / "machines"))
        measure(arguments, folder, machines)


def measure(arguments: argparse.Namespace, folder: Path, machines: Machines | None) -> None:
    build_dataset(
        "sudoku",
        [
            "--output-dir",
            str(folder / "data"),
            "--box",
            "2x2",
            "--generate",
            _puzzles(arguments),
            "--num-aug",
            "8",
        ],
    )
    began = time.monotonic()
    alone = _Job(arguments, folder, "alone", machines)
    if alone.wait() != 0:
        raise SystemExit(f"the run that is left alone fails: {alone.last_words()}")
    alone_seconds = time.monotonic() - began

    chaos, chance, survived = _Job(arguments, folder, "chaos", machines), random.Random(arguments.seed), []
    chaos.wait_for(lambda: num_rows(folder / "chaos") > 0)
    for number in range(arguments.kills):
        time.sleep(chance.uniform(0.0, _LONGEST_WAIT_SECONDS))
        killed = time.monotonic()
        if not chaos.kill_something(chance):
            break
        chaos.wait_for(lambda number=number: len(recoveries(folder / "chaos")) > number)
        survived.append(time.monotonic() - killed)
    status = chaos.wait()
    is_identical = status == 0 and digest(folder / "alone") == digest(folder / "chaos")
    redone = [steps for _, steps in recoveries(folder / "chaos")]
    seconds = np.array(survived or [float("nan")])
    print_report(
        "chaos",
        header=[
            "run",
            "kills of nodes" if machines else "kills",
            "recovery median s",
            "worst s",
            "steps redone",
            "weights",
        ],
        rows=[
            ["left alone", "0", "", "", "", digest(folder / "alone")[:16]],
            [
                "with kills",
                str(len(survived)),
                f"{np.median(seconds):.1f}",
                f"{seconds.max():.1f}",
                str(sum(redone)),
                digest(folder / "chaos")[:16],
            ],
        ],
        notes=[f"left alone it took {alone_seconds:.0f} s"],
        result={
            "kills": arguments.kills,
            "survived": len(survived),
            "identical": is_identical,
            "recovery_seconds_median": float(np.median(seconds)),
            "recovery_seconds_max": float(seconds.max()),
            "steps_redone": sum(redone),
        },
        samples={"recovery": Sample.of(seconds)},
        arguments=arguments,
    )
    if not is_identical or len(survived) < arguments.kills:
        raise SystemExit(1)


def _puzzles(arguments: argparse.Namespace) -> str:
    return "400" if arguments.quick else "4000"


class _Job:
    """A run of the demo under torchrun, on this machine or, one torchrun each, on emulated ones."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, name: str, machines: Machines | None):
        self._arguments, self._folder, self._name, self._machines = arguments, folder, name, machines
        self._output = folder / f"{name}.txt"
        self._torchruns = [self._start(node) for node in range(arguments.nodes)]

    def _start(self, node: int) -> subprocess.Popen:
        arguments, folder = self._arguments, self._folder
        threads = arguments.threads
        if threads == "auto" and self._machines:  # each takes the cores for its own
            threads = max(1, num_cores() // arguments.processes)
        per_kill = _QUICK_STEPS_PER_KILL if arguments.quick else _STEPS_PER_KILL
        per_epoch = _QUICK_STEPS_PER_EPOCH if arguments.quick else _STEPS_PER_EPOCH
        epochs = -(-per_kill * arguments.kills // per_epoch) + 4
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(arguments.processes // arguments.nodes)),
            *("--max-restarts", str(2 * arguments.kills), *(_MEETING_POINT if self._machines else ())),
            *("--nnodes", str(arguments.nodes), str(REPOSITORY / "pretrain.py"), "experiment=demo"),
            *(f"data_path={folder / 'data'}", f"checkpoint_path={folder / self._name}", f"epochs={epochs}"),
            *("eval_interval=null", "checkpoint_interval=10", "keep_checkpoints=2"),
            *("device=" + arguments.device, f"cpu_threads={threads}"),
            *(_QUICK_SIZES if arguments.quick else ()),
        ]
        with open(self._output, "a") as output:
            options = {"cwd": folder, "stdout": output, "stderr": output}
            if self._machines is None:
                return subprocess.Popen(command, **options)
            environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            return self._machines.start(node, command, env=environment, **options)

    def kill_something(self, chance: random.Random) -> bool:
        """Kills a rank, or a machine, which is started again soon; False where the run has ended."""
        if self._machines:
            node = chance.randrange(1, len(self._torchruns))  # the first holds the meeting point
            if self._torchruns[node].poll() is not None:
                return False
            self._machines.kill(node)
            time.sleep(chance.uniform(0.0, _LONGEST_WAIT_SECONDS))
            self._torchruns[node] = self._start(node)
            return True
        ranks = workers(self._torchruns[0].pid)
        if self._torchruns[0].poll() is None and ranks:
            os.kill(chance.choice(ranks), signal.SIGKILL)
        return bool(ranks)

    def wait(self) -> int:
        """Returns the first exit status that is not 0, once all have ended."""
        return next(filter(None, [torchrun.wait() for torchrun in self._torchruns]), 0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, self._torchruns, self._output, seconds=_GIVE_UP_SECONDS)

    def last_words(self) -> str:
        return last_words(self._output)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: nothing of the runs is left
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
