"""Compares the bytes that a rank stores and sends in a training with formulas (docs/parallel.md).

    python -m benchmarks.layout --device cuda --layout pipeline_parallel_degree=2

First, the program tests the messages of a pipeline with a time limit. They may deadlock on NCCL (untested).
"""

import runtime.environment  # noqa: F401 - sets variables that OpenMP reads when torch is imported

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import fail, parse, print_report, run_main
from benchmarks.worlds import TINY, Trainer, World, world_parser
from config.schema import PretrainConfig
from dataset.metadata import Metadata
from distributed.mesh import AXES, Mesh
from distributed.pipeline import Ring, circulate
from distributed.shards import tensor_of
from distributed.world import world_size
from training.dry_run import Needs, Sent
from training.layout import layout_of
from training.model import count_steps
from training.state import TrainState

_OVERRIDES = ("arch.q_target=exact", "arch.forward_dtype=bfloat16", "ema=0.999", "sync=flat")
_TINY = (*TINY, "arch.H_layers=2", "arch.L_layers=2")
_RING_SECONDS = 60  # includes the time that NCCL needs to open connections
# {function of torch.distributed: (index of the message argument, times that each of n ranks sends it,
# purpose)}.
_COLLECTIVES = {
    "all_reduce": (0, lambda n: 2 * (n - 1) / n, None),  # the purpose depends on the message
    "isend": (0, lambda n: 1, "stages"),
    "all_gather": (1, lambda n: n - 1, "gradients of puzzle rows"),
    "all_gather_single": (0, lambda n: (n - 1) / n, "weights of shards"),
    "all_gather_into_tensor": (0, lambda n: (n - 1) / n, "weights of shards"),
    "broadcast": (0, lambda n: (n - 1) / n, "weights of shards"),
    "gather": (0, lambda n: (n - 1) / n, "updates of matrices"),  # mean over ranks that take turns as root
    "scatter": (0, lambda n: (n - 1) / n, "updates of matrices"),
    "all_to_all_single": (1, lambda n: (n - 1) / n, "gradients of puzzle rows"),
}


@contextlib.contextmanager
def counting() -> Iterator[dict[str, Sent]]:
    """Counts the messages that this rank sends with torch.distributed in a `with` block.

    Yields a dict {purpose: (number of messages, number of bytes)} that is filled while the block runs. A
    purpose is for example "sums of gradients". The bytes of a collective are computed. Example: in an
    all-reduce of n ranks, each rank sends 2 (n - 1) / n times the size of the tensor.
    """
    sent: dict[str, Sent] = defaultdict(lambda: Sent(0, 0))

    def counted(name: str, function: Any) -> Any:
        position, times, usual = _COLLECTIVES[name]

        def call(*arguments: Any, group: Any = None, **options: Any) -> Any:
            message = arguments[position]
            purpose = usual or _purpose_of_sum(message, is_async=options.get("async_op", False))
            num_bytes = times(dist.get_world_size(group)) * message.nbytes
            sent[purpose] = Sent(sent[purpose].messages + 1, sent[purpose].bytes + num_bytes)
            return function(*arguments, group=group, **options)

        return call

    functions = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    try:
        for name, function in functions.items():
            setattr(dist, name, counted(name, function))
        yield sent
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


def _purpose_of_sum(message: Tensor, *, is_async: bool) -> str:
    # Only sums of gradients run during other work (distributed/sync.py). Features have three axes.
    return "sums of gradients" if is_async else "sums of features" if message.ndim > 2 else "metrics"


def stored_bytes(state: TrainState) -> dict[str, int]:
    """Returns how many bytes this rank stores between training steps: {"weights": 4096, ...}."""
    weights = list(state.model.network.parameters())
    gradients = [view for flat in state.weights.flats for view in flat.views(flat.gradients).values()]
    parts = {
        "weights": weights,
        "gradients": gradients,
        "moments": [tensor for tensor in map(tensor_of, state.weights.moments().values()) if tensor.ndim],
        "averages": map(tensor_of, state.average.tensors().values()),
        "puzzle rows": map(tensor_of, state.table.tensors().values()),
        "averages of rows": map(tensor_of, state.table.average.tensors().values()),
        "carry": list(state.carry.tensors().values()),
    }
    counted = {part: _covered(tensors) for part, tensors in parts.items()}
    updated = map(tensor_of, state.weights.owned.values())
    return counted | {"masters": _covered([*weights, *updated]) - counted["weights"]}


def computed(config: PretrainConfig, metadata: Metadata) -> tuple[dict[str, float], dict[str, Sent]]:
    """Computes from formulas how many bytes each rank should store and send.

    Returns ({part: stored bytes}, {purpose: (number of messages, bytes) in a training step}). Example of a
    part: "weights". Example of a purpose: "sums of gradients".
    """
    counter = count_steps(config, metadata)
    needs = Needs(config, counter, layout_of(config, world_size()))
    return needs.memory(), needs.sent(counter.model.reasoning)


def _covered(tensors: Iterable[Tensor]) -> int:
    """Returns how many bytes some contiguous tensors use. Memory that they share counts once."""
    total, end = 0, 0
    for begin, length in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        total += max(0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total


class _Ring:
    """Sends a tensor around all ranks, as the stages of a pipeline do."""

    def __init__(self, device: torch.device):
        mesh = Mesh({axis: world_size() if axis == "pipeline" else 1 for axis in AXES})
        self._ring, self._own = Ring(mesh.pipeline, mesh.owners), torch.ones(1024, 1024, device=device)

    def run(self) -> float:
        tensor = self._own
        for is_forward in (True, True, True, False, False):
            tensor = circulate(self._ring, tensor, lambda _, received: received + 1, forward=is_forward)
        return float(tensor[0, 0])


class _Layout:
    def __init__(self, device: torch.device, options: argparse.Namespace):
        overrides = (*(_TINY if options.quick else ()), *_OVERRIDES, *options.layout)
        self._trainer = Trainer(device, *overrides, puzzles=options.puzzles)

    def count(self) -> tuple[dict[str, float], dict[str, float]]:
        """Makes a training step. Returns (counted bytes, computed bytes) of this rank.

        Both are {"weights": bytes, "sums of gradients": bytes, ...}, with stored and sent bytes. All ranks
        call it.
        """
        trainer = self._trainer
        with counting() as sent:
            trainer.step()
        memory, formulas = computed(trainer.config, trainer.metadata)
        counted, expected = (
            {what: total.bytes for what, total in totals.items()} for totals in (sent, formulas)
        )
        return stored_bytes(trainer.state) | counted, memory | expected


def main(argv: Sequence[str] | None = None) -> None:
    parser = world_parser("layout", description="Compares stored and sent bytes with formulas.", rounds=0)
    keys = "config keys of the training, as for pretrain.py"
    parser.add_argument("--layout", nargs="+", default=(), metavar="KEY=VALUE", help=keys)
    options = parse(parser, argv)
    processes = options.processes
    with World(options, _Ring, processes=processes) as world:
        print(f"testing the messages of a pipeline of {processes} processes", flush=True)
        world.send("run")
        numbers = world.receive(timeout=_RING_SECONDS)
        if numbers != [1 + 5 * processes] * processes:
            fail(
                f"wrong results of messages in a pipeline: {numbers}, expected {1 + 5 * processes} on each "
                "process. Look for an error in distributed/pipeline.py."
            )
    with World(options, _Layout, options, processes=processes) as world:
        counted, formulas = zip(*world.call("count"), strict=True)
    rows, result = [], {}
    for what, num_bytes in formulas[0].items():
        mean = sum(bytes_of_process.get(what, 0) for bytes_of_process in counted) / processes
        rows.append([what, f"{mean / 1e6:.3f}", f"{num_bytes / 1e6:.3f}"])
        result[what.replace(" ", "_")] = mean / num_bytes
    print_report(
        "layout",
        options,
        header=["MB per process", "counted", "computed"],
        rows=rows,
        notes=["The test of pipeline messages passed. The column counted has the mean of all processes."],
        result=result,
    )


if __name__ == "__main__":
    run_main(main)
