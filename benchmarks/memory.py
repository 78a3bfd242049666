"""Measures how much memory a rank of a training needs, with and without sharding.

    python -m benchmarks.memory --processes 1 2 4

The table lists the tensors of a rank by part of a checkpoint, and the peak memory of the process, in MiB.
"""

import runtime.environment  # noqa: F401 - sets variables that OpenMP reads when torch is imported

import argparse
from collections.abc import Sequence

import torch

from benchmarks.harness import parse, positive, print_report, run_main
from benchmarks.worlds import Trainer, World, model_sizes, world_parser
from training.clock import peak_memory_bytes

_MIB = 2**20
_WHOLE_UPDATE = "data_parallel_shard_degree=1"
_MEMORY: dict[str, tuple[str, ...]] = {
    "": (_WHOLE_UPDATE,),
    "data_parallel_shard_degree=-1": ("data_parallel_shard_degree=-1",),
    "puzzle_emb_sharding=rows": (_WHOLE_UPDATE, "puzzle_emb_sharding=rows"),
    "both": ("data_parallel_shard_degree=-1", "puzzle_emb_sharding=rows"),
    "activation_checkpointing=block": (_WHOLE_UPDATE, "activation_checkpointing=block"),
}


class _Memory:
    """A model after a training step, with many puzzle embeddings and averaged weights."""

    def __init__(self, device: torch.device, options: argparse.Namespace, overrides: Sequence[str]):
        arguments = (*model_sizes(options), "ema=0.999", *overrides)
        rows = 1000 if options.quick else options.rows
        trainer = Trainer(device, *arguments, puzzles=options.puzzles, rows=rows)
        # Write the table, because memory pages that are never written would not count.
        trainer.state.model.network.puzzle_emb.weights.fill_(0.5)
        trainer.step()
        self._trainer, self._device = trainer, device

    def memory_bytes(self) -> dict[str, int]:
        """Returns how many bytes of tensors this rank stores, and its peak memory as "peak".

        The tensors are grouped by their part of a checkpoint. Example: {"weights": 4096, "optimizer": 8192,
        "peak": 1048576}.
        """
        parts = {
            part: sum(tensor.nbytes for tensor in tensors.values())
            for part, tensors in self._trainer.parts().items()
        }
        return parts | {"peak": peak_memory_bytes(self._device)}


def main(argv: Sequence[str] | None = None) -> None:
    description = "Measures how much memory a rank of a training needs, with and without sharding."
    parser = world_parser("memory", description=description, rounds=0, compares_numbers=True)
    of_rows = "number of puzzle embeddings (default: %(default)s)"
    parser.add_argument("--rows", type=positive, default=10**6, metavar="N", help=of_rows)
    options = parse(parser, argv)
    rows, result = [], {}
    for count in sorted({1, *options.processes}):
        for setting, overrides in _MEMORY.items():
            if count == 1 and setting not in ("", "activation_checkpointing=block"):
                continue
            with World(options, _Memory, options, overrides, processes=count) as world:
                ranks = world.call("memory_bytes")
            memory = {name: max(of_rank.get(name, 0) for of_rank in ranks) / _MIB for name in ranks[0]}
            peak = memory.pop("peak")
            name = "_".join([str(count), *setting.split("=")[:1]]).strip("_")
            result |= {f"kept_mib_{name}": sum(memory.values()), f"peak_mib_{name}": peak}
            numbers = (f"{mebibytes:.0f}" for mebibytes in (*memory.values(), peak))
            rows.append([f"{count} {setting}".strip(), *numbers])
            header = ["processes", *memory, "peak"]
    print_report(
        "memory",
        options,
        header=header,
        rows=rows,
        notes=["MiB, maximum over ranks. peak: peak memory of the process, with activations and libraries."],
        result=result,
    )


if __name__ == "__main__":
    run_main(main)
