"""Times the sparse optimizer of the puzzle table, over table sizes and shares of repeats, against

- plain: every rank gathers the identifiers and rows of all slots as they are, and sums in float64;
- torch: `nn.Embedding(sparse=True)`, its sparse gradients summed over ranks, and torch's SGD;
- rows: ours, of a table whose rows live on one rank each (`puzzle_emb_sharding=rows`).

    python -m benchmarks.sparse_optimizer

Timed are lookup, backward pass, exchange and update; 768 slots over all ranks. How many rows each rank has,
`ours` counts, and is told of the others, as in a run, where that travels with the dense gradients. The time
must not grow with the table. Bytes are those of the tensors that one rank hands to collectives, of rows one
part for itself.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import (
    Sample,
    add_processes,
    benchmark_parser,
    parse,
    print_report,
    time_rounds,
    timed,
)
from benchmarks.processes import run
from models.network import PuzzleEmbedding
from optimizers import SparseSignSGD
from optimizers.puzzle_table import sign_sgd_rows_
from parallel.collectives import all_gather_counts
from parallel.launch import keep_freed_memory
from parallel.process_group import is_main, rank, world_size
from parallel.row_owners import RowOwners

LR, WEIGHT_DECAY = 1e-2, 0.1
_TABLE_ROWS = {"1k": 1_000, "10k": 10_000, "100k": 100_000, "1m": 1_000_000}
DUPLICATE_SHARES = (0.0, 0.5, 0.9)
_NDIM, _QUICK_NDIM = 512, 8
_SLOTS = 768  # of the published batch
_BATCHES = 8  # drawn for each table, so that its rows are not always those in the cache


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "sparse_optimizer", description="The sparse optimizer against others.", rounds=30
    )
    add_processes(parser)
    arguments = parse(parser, words, takes_torchrun=True)
    if _SLOTS % arguments.processes:
        parser.error(f"--processes {arguments.processes}: they must divide the {_SLOTS} slots")
    run(measure, arguments)


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    """All ranks call it; rank 0 prints."""
    keep_freed_memory(device)  # as in a run
    ndim = _QUICK_NDIM if arguments.quick else _NDIM
    contenders, bytes_sent = {}, {}
    for table_name, num_rows in _TABLE_ROWS.items():
        # One for all of them: a million rows are 2 GB.
        table = torch.full((num_rows, ndim), 0.01, device=device)
        for share in DUPLICATE_SHARES:
            slots = list(draw_slots(num_rows, share, ndim, device=device))
            for way, build in WAYS.items():
                key = (table_name, share, way)
                contenders[key] = _over(slots, build(table, slots))
                with CountedBytes() as counted:
                    contenders[key]()
                bytes_sent[key] = counted.total
    seconds = time_rounds(
        [timed(str(key), step, device) for key, step in contenders.items()],
        rounds=arguments.rounds,
        warmup_rounds=2,
    )
    if not is_main():
        return

    samples = {key: Sample.of(seconds[str(key)]) for key in contenders}
    rows = []
    for table_name, share, way in contenders:
        key, ours = (table_name, share, way), (table_name, share, "ours")
        ratio = samples[ours].median / samples[key].median
        rows.append(
            [
                f"{table_name} rows, {share:.0%} repeated",
                way,
                *samples[key].cells(digits=2),
                "" if way == "ours" else f"{ratio:.2f}",
                f"{bytes_sent[key] / 1000:.0f}",
            ]
        )

    def over(first: tuple, second: tuple) -> float:
        return samples[first].median / samples[second].median

    print_report(
        "sparse_optimizer",
        header=["table", "way", "median ms", "spread ms", "ours / it", "kB sent"],
        rows=rows,
        notes=[f"{_SLOTS} slots over all processes, rows of {ndim} float32."],
        result={
            "time_1m_over_1k_rows": over(("1m", 0.0, "ours"), ("1k", 0.0, "ours")),
            "ours_over_plain": {
                f"{share:g}": over(("1m", share, "ours"), ("1m", share, "plain"))
                for share in DUPLICATE_SHARES
            },
            "ours_over_torch": {
                f"{share:g}": over(("1m", share, "ours"), ("1m", share, "torch"))
                for share in DUPLICATE_SHARES
            },
            "rows_over_ours": {
                f"{share:g}": over(("1m", share, "rows"), ("1m", share, "ours")) for share in DUPLICATE_SHARES
            },
            "bytes_sent": {" ".join(map(str, key)): count for key, count in bytes_sent.items()},
            "ndim": ndim,
        },
        samples={" ".join(map(str, key)): sample for key, sample in samples.items()},
        arguments=arguments,
    )


# ------------------------------------------------------------------------------------------------ contenders
# Each takes a table that it trains in place, and the batches that it will see, of this rank's identifiers [n]
# and the gradients of their rows [n, ndim]. It returns a step on one of them.
Batches = list[tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor], None]


def build_ours(table: Tensor, batches: Batches) -> Step:
    embedding = PuzzleEmbedding(1, table.shape[1])
    embedding.weights = table
    optimizer = SparseSignSGD(embedding, lr=LR, weight_decay=WEIGHT_DECAY)
    told = {}
    for identifiers, _ in batches:
        embedding(identifiers)
        counts = all_gather_counts(optimizer.num_distinct(), device=table.device)
        told[identifiers.data_ptr()] = torch.tensor(*counts)
        embedding.collect_gradients()

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        rows = embedding(identifiers)
        optimizer.num_distinct()
        rows.backward(gradients)
        optimizer.all_gather_gradients(told[identifiers.data_ptr()])
        optimizer.step()

    return step


def build_rows(table: Tensor, _batches: Batches) -> Step:
    embedding = PuzzleEmbedding(1, table.shape[1])
    embedding.weights = table[rank() :: world_size()]
    owners = RowOwners(embedding, len(table))
    optimizer = SparseSignSGD(embedding, lr=LR, weight_decay=WEIGHT_DECAY, owners=owners)

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        owners.fetch(identifiers)
        embedding(identifiers).backward(gradients)
        optimizer.send_gradients()
        optimizer.step()

    return step


def build_plain(table: Tensor, _batches: Batches) -> Step:
    """Exchanges all slots as they are, without deduplication; the tests compare ours with this."""

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        rows = table[identifiers].requires_grad_()
        rows.backward(gradients)
        identifiers, gradients = _all_gather(identifiers), _all_gather(rows.grad)
        distinct, place = identifiers.unique(return_inverse=True)
        sums = torch.zeros(len(distinct), table.shape[1], dtype=torch.float64, device=table.device)
        sums.index_add_(0, place, gradients.double())
        sign_sgd_rows_(table, distinct, sums, lr=LR, weight_decay=WEIGHT_DECAY)

    return step


def build_torch(table: Tensor, _batches: Batches) -> Step:
    """Does what DDP does with a sparse gradient; on CUDA gathered, as NCCL has no sparse all-reduce."""
    embedding = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=LR)

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        embedding(identifiers).backward(gradients)
        gradient = embedding.weight.grad
        if gradient.is_cuda:
            places, rows = _all_gather(gradient._indices()[0]), _all_gather(gradient._values())
            embedding.weight.grad = torch.sparse_coo_tensor(
                places[None], rows, table.shape, check_invariants=False
            )
        else:
            dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS = {"ours": build_ours, "plain": build_plain, "torch": build_torch, "rows": build_rows}


def _all_gather(rows: Tensor) -> Tensor:
    """Returns the rows of all ranks, of which each has equally many."""
    parts = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------------------ slots
def draw_slots(
    num_rows: int, duplicate_share: float, ndim: int, *, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws batches of this rank's identifiers and gradients; a share of all ranks' slots repeats others."""
    generator = torch.Generator().manual_seed(0)
    num_distinct = round(_SLOTS * (1 - duplicate_share))
    local = _SLOTS // world_size()
    mine = slice(rank() * local, (rank() + 1) * local)
    for _ in range(_BATCHES):
        distinct = torch.randperm(num_rows, generator=generator)[:num_distinct]
        repeated = distinct[torch.randint(num_distinct, (_SLOTS - num_distinct,), generator=generator)]
        identifiers = torch.cat((distinct, repeated))[torch.randperm(_SLOTS, generator=generator)]
        gradients = torch.randn(_SLOTS, ndim, generator=generator)
        yield identifiers[mine].to(device), gradients[mine].to(device)


def _over(slots: Batches, step: Step) -> Callable[[], None]:
    """Returns a call that steps with one batch after the other."""
    batches = cycle(slots)
    return lambda: step(*next(batches))


class CountedBytes(TorchDispatchMode):
    """A mode of torch that counts, while entered, the bytes that this rank hands to collectives."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            for argument, value in zip(function._schema.arguments, args, strict=False):
                if argument.name in ("tensors", "input_tensors", "input_tensor", "input"):
                    for tensor in value if isinstance(value, list | tuple) else [value]:
                        self.total += _num_bytes(tensor)
        return function(*args, **(kwargs or {}))


def _num_bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


if __name__ == "__main__":
    main()
