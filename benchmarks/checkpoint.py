"""Times a checkpoint: how long a step waits for a save, and how long saving and loading take.

    python -m benchmarks.checkpoint

For the demo's model, and for HRM with 27 M parameters and a table of a million puzzles, or --rows: ours (in
the background, with checksums), `torch.save` of the same tensors, and torch.distributed.checkpoint.
stall: seconds that a step waits; saved: until the checkpoint is on disk; loaded: until the state is restored,
for ours with all bytes verified.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.harness import (
    REPOSITORY,
    Sample,
    add_threads,
    benchmark_parser,
    now,
    parse,
    positive,
    print_report,
)
from benchmarks.processes import run
from config.schema import PretrainConfig, validate_config
from training.checkpoint import tensors_of
from training.checkpoints import CheckpointManager
from training.state import TrainState, build_train_state

_EXPERIMENT = {"demo": ["experiment=demo"], "hrm_27m": []}
_QUICK_ROWS, _QUICK_SIZES = 100, ("arch.hidden_size=32", "arch.num_heads=2")


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("checkpoint", description="Saving and loading the state of a run.", rounds=5)
    add_threads(parser)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary one")
    parser.add_argument(
        "--rows", type=positive, default=1_000_000, metavar="N", help="of the large table; default: 1000000"
    )
    parser.set_defaults(processes=1)
    run(measure, parse(parser, words))


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    samples, rows, ratios = {}, [], {}
    for name, num_rows in (("demo", 2), ("hrm_27m", arguments.rows)):
        config = _config(name, _QUICK_SIZES if arguments.quick else ())
        metadata = SimpleNamespace(
            vocab_size=11, seq_len=81, num_puzzle_identifiers=_QUICK_ROWS if arguments.quick else num_rows
        )
        state = build_train_state(config, metadata, device=device)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            ways = {
                "ours": _ours(Path(folder), config, state, device),
                "torch.save": _torch_save(Path(folder), state, device),
                "dcp": _dcp(Path(folder), state, device),
            }
            rounds = [{way: next(turns) for way, turns in ways.items()} for _ in range(1 + arguments.rounds)]
        for way in ways:
            seconds = np.array([each[way][:3] for each in rounds[1:]]).T  # the first round warms up
            parts = [Sample.of(values) for values in seconds]
            samples |= {
                f"{name} {way} {part}": sample
                for part, sample in zip(("stall", "saved", "loaded"), parts, strict=True)
            }
            cells = [cell for sample in parts for cell in sample.cells()]
            rows.append([f"{name} {way}", f"{rounds[-1][way][3] / 2**20:.1f}", *cells])
        ratios[name] = samples[f"{name} ours stall"].median / samples[f"{name} torch.save stall"].median
    header = ["state", "MiB", "stall ms", "spread ms", "saved ms", "spread ms", "loaded ms", "spread ms"]
    print_report(
        "checkpoint",
        header=header,
        rows=rows,
        notes=[f"{name}: stall of ours / torch.save = {ratio:.2f}" for name, ratio in ratios.items()],
        result={
            "stall_over_torch_save": ratios["hrm_27m"],
            "stall_over_torch_save_demo": ratios["demo"],
        },
        samples=samples,
        arguments=arguments,
    )


Turn = tuple[float, float, float, int]  # seconds of the stall, until saved, of loading; bytes


def _ours(folder: Path, config: PretrainConfig, state: TrainState, device: torch.device) -> Iterator[Turn]:
    folder /= "ours"
    folder.mkdir()
    checkpoints = CheckpointManager(folder, config=config, fingerprint="of random data")
    while True:
        state.step += 1  # a step that is on disk is not saved again
        begin = now(device)
        checkpoints.save(state)
        stalled = now(device) - begin
        checkpoints.close()
        saved = now(device) - begin
        begin = now(device)
        checkpoints.resume(state)
        yield stalled, saved, now(device) - begin, _size(folder / f"step_{state.step}")


def _torch_save(folder: Path, state: TrainState, device: torch.device) -> Iterator[Turn]:
    path = folder / "torch_save.pt"

    def save() -> None:
        with path.open("wb") as file:
            torch.save(_tensors(state), file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        for name, tensor in torch.load(path, weights_only=True).items():
            _tensors(state)[name].copy_(tensor)

    return _blocking(save, load, path, device)


def _dcp(folder: Path, state: TrainState, device: torch.device) -> Iterator[Turn]:
    path = folder / "dcp"

    def save() -> None:
        shutil.rmtree(path, ignore_errors=True)
        dcp.save(_tensors(state), checkpoint_id=path)

    return _blocking(save, lambda: dcp.load(_tensors(state), checkpoint_id=path), path, device)


def _blocking(
    save: Callable[[], None], load: Callable[[], None], path: Path, device: torch.device
) -> Iterator[Turn]:
    """Yields turns of a way to save that is over when it returns."""
    while True:
        begin = now(device)
        save()
        saved = now(device) - begin
        begin = now(device)
        load()
        yield saved, saved, now(device) - begin, _size(path)


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return {f"{file}/{name}": t for file, named in tensors_of(state).items() for name, t in named.items()}


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


def _config(name: str, sizes: Sequence[str]) -> PretrainConfig:
    """Composes the demo's config, or the published one. sizes: overrides of it."""
    with initialize_config_dir(str(REPOSITORY / "config"), version_base="1.3"):
        composed = compose("pretrain", overrides=[*_EXPERIMENT[name], *sizes])
    return validate_config(PretrainConfig, OmegaConf.to_container(composed, resolve=True))


if __name__ == "__main__":
    main()
