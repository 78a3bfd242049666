"""Times checkpoints: how long a step waits for a save, and how long saving and loading take.

    python -m benchmarks.checkpoint

Compares our checkpoints with `torch.save` of the same tensors, for the model of the demo, and for HRM with 27
M parameters and a million puzzle embeddings (--rows). Our checkpoints have checksums and are written in the
background. stall: time that a step waits. saved: time until the checkpoint is on disk. loaded: time until the
state is restored. For our checkpoints, this includes the verification of checksums.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.benchmark import timer

from benchmarks.harness import (
    benchmark_parser,
    cells,
    measurement,
    parse,
    positive,
    print_report,
    ratio,
    run_main,
)
from benchmarks.worlds import TINY, Trainer
from distributed.backend import choose_device, set_cpu_threads
from training.checkpoints import CheckpointManager

_PARTS = ("stall", "saved", "loaded")
Turn = tuple[float, float, float]  # seconds: stall, saved, loaded


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("checkpoint", description="Times saving and loading of checkpoints.", rounds=5)
    folder = "folder on the disk to measure (default: the temporary folder)"
    parser.add_argument("--folder", type=Path, help=folder)
    rows = "number of puzzle embeddings in the large table (default: %(default)s)"
    parser.add_argument("--rows", type=positive, default=1_000_000, metavar="N", help=rows)
    options = parse(parser, argv)
    set_cpu_threads(options.threads)
    device, rows, result = choose_device(options.device), [], {}
    for model, overrides, num_rows in (("demo", ["experiment=demo"], 2), ("hrm_27m", [], options.rows)):
        overrides += TINY if options.quick else ()
        trainer = Trainer(device, *overrides, puzzles=8, rows=100 if options.quick else num_rows)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            ways = {"ours": _ours, "torch.save": _torch_save}
            turns = {way: build(Path(folder), trainer) for way, build in ways.items()}
            rounds = [{way: next(turn) for way, turn in turns.items()} for _ in range(1 + options.rounds)]
        times = {
            # The first round is a warm-up.
            (way, part): measurement([turns_of_round[way][index] for turns_of_round in rounds[1:]])
            for way in ways
            for index, part in enumerate(_PARTS)
        }
        size = sum(tensor.nbytes for tensor in _tensors(trainer).values()) / 2**20
        for way in ways:
            parts = [cell for part in _PARTS for cell in cells(times[way, part])]
            rows.append([f"{model} {way}, {size:.0f} MiB", *parts])
        result[f"stall_over_torch_save_{model}"] = ratio(times["ours", "stall"], times["torch.save", "stall"])
    print_report(
        "checkpoint",
        options,
        header=["state", "stall ms", "spread ms", "saved ms", "spread ms", "loaded ms", "spread ms"],
        rows=rows,
        result=result,
    )


def _ours(folder: Path, trainer: Trainer) -> Iterator[Turn]:
    folder, state = folder / "ours", trainer.state
    folder.mkdir()
    checkpoints = CheckpointManager(folder, config=trainer.config, fingerprint="of random data")
    while True:
        state.step += 1  # `save` skips a step that is on disk already
        begin = timer()
        checkpoints.save(state)
        stalled = timer() - begin
        checkpoints.close()
        saved = timer() - begin
        begin = timer()
        checkpoints.resume(state)
        yield stalled, saved, timer() - begin


def _torch_save(folder: Path, trainer: Trainer) -> Iterator[Turn]:
    path, tensors = folder / "torch_save.pt", _tensors(trainer)
    while True:
        begin = timer()
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        saved = timer()
        for name, tensor in torch.load(path, weights_only=True).items():
            tensors[name].detach().copy_(tensor)
        yield saved - begin, saved - begin, timer() - saved


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    parts = trainer.parts()
    return {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}


if __name__ == "__main__":
    run_main(main)
