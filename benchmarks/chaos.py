"""Kills random ranks of the demo at random times, by `kill -9`: does the run survive, with the same bits?

    python -m benchmarks.chaos --kills 10

The same training is done twice under torchrun: left alone, and with kills, after each of which torchrun
starts all ranks again and they go on from the newest checkpoint. Identical means that the final weights have
the same bits. A recovery is the time from the kill until the first new step is done.
"""

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
from dataset.build_sudoku import main as build_sudoku

_STEPS_PER_KILL = 60  # enough that the run is not over before the last kill
_STEPS_PER_EPOCH = 31  # 4000 puzzles in batches of 128
_LONGEST_WAIT_SECONDS = 3.0  # from a new step to the next kill
_GIVE_UP_SECONDS = 120.0
_RECOVERED = re.compile(r"recovered: step \d+ is done ([\d.]+) s after the failure, (\d+) steps? done again")


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "chaos", description="Survives kills of random ranks at random times.", rounds=1
    )
    parser.add_argument("--kills", type=positive, default=10, metavar="N", help="default: 10")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills; default: 0")
    add_processes(parser)
    arguments = parse(parser, words)
    if not Path("/proc/self/environ").exists():
        parser.error("the ranks to kill are found in /proc, which is not here")
    arguments.kills = 2 if arguments.quick else arguments.kills
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    build_sudoku(
        ["--output-dir", str(folder / "data"), "--box", "2x2", "--generate", "4000", "--num-aug", "8"]
    )
    began = time.monotonic()
    alone = _start(arguments, folder, "alone")
    if alone.wait() != 0:
        raise SystemExit(f"the run that is left alone fails: {(folder / 'alone.txt').read_text()[-2000:]}")
    alone_seconds = time.monotonic() - began

    chaos, chance, recoveries = _start(arguments, folder, "chaos"), random.Random(arguments.seed), []
    _wait_for(folder, chaos, lambda: _num_steps(folder) > 0)
    for number in range(arguments.kills):
        time.sleep(chance.uniform(0.0, _LONGEST_WAIT_SECONDS))
        workers = _workers(chaos.pid)
        if chaos.poll() is not None or not workers:
            break
        os.kill(chance.choice(workers), signal.SIGKILL)
        killed = time.monotonic()
        _wait_for(folder, chaos, lambda number=number: len(_recoveries(folder)) > number)
        recoveries.append(time.monotonic() - killed)
    status = chaos.wait()
    is_identical = status == 0 and _weights(folder / "alone") == _weights(folder / "chaos")
    redone = [steps for _, steps in _recoveries(folder)]
    seconds = np.array(recoveries)
    print_report(
        "chaos",
        header=["run", "kills", "recovery median s", "worst s", "steps redone", "weights"],
        rows=[
            ["left alone", "0", "", "", "", _weights(folder / "alone")[:16]],
            [
                "with kills",
                str(len(recoveries)),
                f"{np.median(seconds):.1f}",
                f"{seconds.max():.1f}",
                str(sum(redone)),
                _weights(folder / "chaos")[:16],
            ],
        ],
        notes=[f"left alone it took {alone_seconds:.0f} s"],
        result={
            "kills": arguments.kills,
            "survived": len(recoveries),
            "identical": is_identical,
            "recovery_seconds_median": float(np.median(seconds)),
            "recovery_seconds_max": float(seconds.max()),
            "steps_redone": sum(redone),
        },
        samples={"recovery": Sample.of(seconds)},
        arguments=arguments,
    )
    if not is_identical or len(recoveries) < arguments.kills:
        raise SystemExit(1)


def _start(arguments: argparse.Namespace, folder: Path, name: str) -> subprocess.Popen:
    epochs = -(-_STEPS_PER_KILL * arguments.kills // _STEPS_PER_EPOCH) + 4
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.processes)),
        *("--max-restarts", str(2 * arguments.kills), str(REPOSITORY / "pretrain.py"), "experiment=demo"),
        *(f"data_path={folder / 'data'}", f"checkpoint_path={folder / name}", f"epochs={epochs}"),
        *("eval_interval=null", "checkpoint_interval=10", "keep_checkpoints=2"),
        *("device=" + arguments.device, f"cpu_threads={arguments.threads}"),
    ]
    with open(folder / f"{name}.txt", "w") as output:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)


def _wait_for(folder: Path, process: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output = (folder / "chaos.txt").read_text()[-3000:]
            raise SystemExit(f"the run does not go on, its last words:\n{output}")
        time.sleep(0.05)


def _workers(torchrun: int) -> list[int]:
    """Returns the process ids of the ranks: children of torchrun that have a RANK."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and b"\0RANK=" in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # the process has ended in the meantime
            continue
    return sorted(found)


def _num_steps(folder: Path) -> int:
    path = folder / "chaos" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _recoveries(folder: Path) -> list[tuple[float, int]]:
    """Reads (seconds, steps redone) of each recovery from the log of rank 0."""
    path = folder / "chaos" / "logs" / "rank_0.log"
    text = path.read_text() if path.exists() else ""
    return [(float(seconds), int(steps)) for seconds, steps in _RECOVERED.findall(text)]


def _weights(run: Path) -> str:
    """Returns the sha256 of the newest weights."""
    steps = [int(path.name[5:]) for path in run.glob("step_*") if path.name[5:].isdigit()]
    path = run / f"step_{max(steps)}" / "weights.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
