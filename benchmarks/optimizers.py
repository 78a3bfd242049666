"""Times one update: of all dense weights of HRM with 27 M parameters, of their average, of the puzzle table.

    python -m benchmarks.optimizers [dense] [table]

dense: AdamATan2 and the average against the loop over parameters, op by op, that public code has where it has
no kernel; against torch's fused AdamW; and against the traffic: one in-place op that reads and writes as many
bytes, as fast as any update can be. (A copy is slower on a CPU, which first reads what it is about to
overwrite.) On CUDA a turn is 20 updates, whose launch is hidden as in training.
table: look-up, backward pass, exchange and update of 768 slots over --processes, with a share of repeats.
plain: each rank gathers the identifiers and rows of all slots as they are. torch: `nn.Embedding(sparse=True)`
with SGD, as DDP sums it. rows: ours, of a table whose rows live on one rank each. The time must not grow with
the table.

Before they are timed, contenders are held to the same result.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import (
    Load,
    benchmark_parser,
    cells,
    measurement,
    parse,
    positive,
    print_report,
    ratio,
)
from benchmarks.worlds import TINY, Trainer, World, take_turns
from models.network import PuzzleEmbedding
from optimizers.puzzle_table import Replicated, RowsByOwner, sign_sgd_rows_
from parallel.collectives import all_ranks
from parallel.launch import keep_freed_memory
from parallel.process_group import rank, world_size

_LR, _WEIGHT_DECAY, _EMA_RATE = 1e-2, 0.1, 0.999
_UPDATES = {"cpu": 1, "cuda": 20}  # in a turn
_NUMBERS_MOVED = {"adam_atan2": 7, "average": 3}  # read or written, for each weight
_DENSE = (
    *("adam_atan2 ours", "adam_atan2 eager", "adam_atan2 loop", "adam_atan2 traffic", "adam_atan2 adamw"),
    *("average ours", "average loop", "average traffic"),
)
_SLOTS, _NDIM, _BATCHES = 768, 512, 8  # batches, so that the rows are not always those in the cache
_TABLES = {"1k": 1_000, "1m": 1_000_000}
_REPEATED = (0.0, 0.5, 0.9)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "optimizers", description="One update of the weights, or of the table.", rounds=30
    )
    parser.add_argument("what", nargs="*", choices=[[], "dense", "table"], help="dense, table; default: both")
    parser.add_argument("--processes", type=positive, default=2, metavar="N", help="of table; default: 2")
    options = parse(parser, argv)
    if _SLOTS % options.processes:
        parser.error(f"--processes {options.processes}: they must divide the {_SLOTS} slots")
    for what in options.what or ("dense", "table"):
        measure_dense(options) if what == "dense" else measure_table(options)


# ----------------------------------------------------------------------------------------------------- dense
class _Dense:
    """Every way to update the weights, each on a model of its own with the same weights and gradients."""

    def __init__(self, device: torch.device, options: argparse.Namespace):
        words = (*(TINY if options.quick else ()), f"ema={_EMA_RATE}", "lr_warmup_steps=1", "lr=1e-3")
        trainers = [Trainer(device, *words, puzzles=1, compiles=compiles) for compiles in (True, False)]
        parameters = [list(trainer.state.model.parameters()) for trainer in trainers]
        draw = torch.Generator().manual_seed(0)
        for compiled, eager in zip(*parameters, strict=True):
            gradient = torch.randn(compiled.shape, generator=draw).to(device)
            for parameter in (compiled, eager):
                parameter.grad.copy_(gradient)
        self.num_weights, self._config = sum(each.numel() for each in parameters[0]), trainers[0].config
        weights = [parameter.detach().clone() for parameter in parameters[0]]
        gradients = [parameter.grad.clone() for parameter in parameters[0]]
        updates = {
            "adam_atan2 ours": trainers[0].update_weights,
            "adam_atan2 eager": trainers[1].update_weights,
            "adam_atan2 loop": self._loop(weights, gradients),
            "adam_atan2 adamw": self._adamw([each.clone() for each in weights], gradients),
            "average ours": trainers[0].update_average,
            "average loop": self._average_loop(parameters[1]),
        }
        for name, count in _NUMBERS_MOVED.items():
            updates[f"{name} traffic"] = torch.ones(count * self.num_weights // 2, device=device).neg_
        for _ in range(3):
            for way in ("ours", "eager", "loop"):
                updates[f"adam_atan2 {way}"]()
        for looped, *ours in zip(weights, *parameters, strict=True):
            for parameter in ours:
                torch.testing.assert_close(parameter.detach(), looped, rtol=1e-4, atol=1e-5)
        count = _UPDATES[device.type]
        self.turns = {
            name: lambda each=each: [each() for _ in range(count)] for name, each in updates.items()
        }

    def count_weights(self) -> int:
        return self.num_weights

    def _loop(self, weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], None]:
        """Takes the ops of adam-atan2-pytorch with the published formula, nothing fused, tensor by tensor."""
        config, step = self._config, itertools.count(1)
        first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))

        def update() -> None:
            number = next(step)
            for p, g, m, v in zip(weights, gradients, first, second, strict=True):
                p.mul_(1 - config.lr * config.weight_decay)
                m.lerp_(g, 1 - config.beta1)
                v.lerp_(g * g, 1 - config.beta2)
                denominator = v.mul(1 / (1 - config.beta2**number)).sqrt_()
                p.add_(m.clone().atan2_(denominator), alpha=-config.lr / (1 - config.beta1**number))

        return update

    def _adamw(self, weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return torch.optim.AdamW(weights, lr=self._config.lr, fused=True).step

    def _average_loop(self, parameters: list[Tensor]) -> Callable[[], None]:
        """Makes a new average for each parameter."""
        averages = [parameter.detach().clone() for parameter in parameters]

        @torch.no_grad()
        def update() -> None:
            for number, parameter in enumerate(parameters):
                averages[number] = (1 - _EMA_RATE) * parameter + _EMA_RATE * averages[number]

        return update


def measure_dense(options: argparse.Namespace) -> None:
    load = Load()
    with World(options, _Dense, options) as world:
        (num_weights,) = world.call("count_weights")
        times = take_turns({each: (world, each) for each in _DENSE}, rounds=options.rounds, warmup_rounds=3)
    count = _UPDATES[options.device]
    times = {name: measurement(name, found.raw_times, repeats=count) for name, found in times.items()}
    rows, result = [], {}
    for name, found in times.items():
        kind = name.partition(" ")[0]
        over = [ratio(times[f"{kind} loop"], found), ratio(found, times[f"{kind} traffic"])]
        rows.append([name, *cells(found, digits=2), *(f"{each:.2f}" for each in over)])
        if name.endswith("ours"):
            result |= {f"{kind}_speedup_over_loop": over[0], f"{kind}_over_traffic": over[1]}
    print_report(
        "optimizers dense",
        header=["update", "median ms", "spread ms", "loop / it", "it / traffic"],
        rows=rows,
        notes=[f"{num_weights:,} weights."],
        result=result,
        options=options,
        load=load,
    )


# ----------------------------------------------------------------------------------------------------- table
Batches = list[
    tuple[Tensor, Tensor]
]  # this rank's identifiers [n], and the gradients of their rows [n, ndim]
Step = Callable[[Tensor, Tensor], None]


class _Table:
    """Every way to train a table of so many rows, on the same slots."""

    def __init__(self, device: torch.device, num_rows: int, repeated: float, ndim: int):
        keep_freed_memory(device)
        table = torch.full((num_rows, ndim), 0.01, device=device)  # one for all ways: a million rows are 2 GB
        slots = [(ids.to(device), rows.to(device)) for ids, rows in _draw_slots(num_rows, repeated, ndim)]
        steps = {name: build(table, slots) for name, build in _WAYS.items()}
        if num_rows == min(_TABLES.values()):
            before, moved = table.clone(), {}
            for name in ("ours", "plain"):
                steps[name](*slots[0])
                moved[name] = table.clone()
                table.copy_(before)
            torch.testing.assert_close(moved["ours"], moved["plain"])
        self.turns = {name: _over(slots, step) for name, step in steps.items()}


def _over(slots: Batches, step: Step) -> Callable[[], None]:
    """Returns a call that steps with one batch after the other."""
    batches = itertools.cycle(slots)
    return lambda: step(*next(batches))


def _build_ours(table: Tensor, slots: Batches) -> Step:
    ranks, embedding = all_ranks(), PuzzleEmbedding(1, table.shape[1])
    embedding.weights = table
    counts = {"slot_counts": [len(slots[0][0])] * ranks.size}
    ours, found = Replicated(embedding, len(table), ranks, weight_decay=_WEIGHT_DECAY, **counts), {}
    for identifiers, _ in slots:  # travel with the dense gradients in a run
        ours.prefetch(identifiers)
        found[identifiers.data_ptr()] = torch.tensor(
            *ranks.all_gather_counts(ours.num_distinct, device=table.device)
        )

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        ours.prefetch(identifiers)
        embedding(identifiers).backward(gradients)
        ours.reduce(found[identifiers.data_ptr()], step=1)
        ours.update_(_LR)

    return step


def _build_rows(table: Tensor, _slots: Batches) -> Step:
    ranks, embedding = all_ranks(), PuzzleEmbedding(1, table.shape[1])
    embedding.weights = table[rank() :: world_size()].clone()
    ours = RowsByOwner(embedding, len(table), ranks, weight_decay=_WEIGHT_DECAY)

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        ours.prefetch(identifiers)
        embedding(identifiers).backward(gradients)
        ours.reduce(torch.zeros(ranks.size), step=1)
        ours.update_(_LR)

    return step


def _build_plain(table: Tensor, _slots: Batches) -> Step:
    def step(identifiers: Tensor, gradients: Tensor) -> None:
        rows = table[identifiers].requires_grad_()
        rows.backward(gradients)
        gather = all_ranks().all_gather_rows
        identifiers, gradients = gather(identifiers), gather(rows.grad)
        distinct, index = identifiers.unique(return_inverse=True)
        sums = torch.zeros(len(distinct), table.shape[1], dtype=torch.float64, device=table.device)
        sums.index_add_(0, index, gradients.double())
        sign_sgd_rows_(table, distinct, sums, lr=_LR, weight_decay=_WEIGHT_DECAY)

    return step


def _build_torch(table: Tensor, _slots: Batches) -> Step:
    embedding = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=_LR)

    def step(identifiers: Tensor, gradients: Tensor) -> None:
        embedding(identifiers).backward(gradients)
        gradient = embedding.weight.grad
        if gradient.is_cuda:  # NCCL has no sparse all-reduce
            gather = all_ranks().all_gather_rows
            indices, rows = gather(gradient._indices()[0]), gather(gradient._values())
            embedding.weight.grad = torch.sparse_coo_tensor(
                indices[None], rows, table.shape, check_invariants=False
            )
        elif world_size() > 1:
            dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


_WAYS = {"ours": _build_ours, "plain": _build_plain, "torch": _build_torch, "rows": _build_rows}


def _draw_slots(num_rows: int, repeated: float, ndim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws batches of this rank's identifiers and gradients; a share of all ranks' slots repeats others."""
    draw, local = torch.Generator().manual_seed(0), _SLOTS // world_size()
    num_distinct, own = round(_SLOTS * (1 - repeated)), slice(rank() * local, (rank() + 1) * local)
    for _ in range(_BATCHES):
        distinct = torch.randperm(num_rows, generator=draw)[:num_distinct]
        again = distinct[torch.randint(num_distinct, (_SLOTS - num_distinct,), generator=draw)]
        identifiers = torch.cat((distinct, again))[torch.randperm(_SLOTS, generator=draw)]
        yield identifiers[own], torch.randn(_SLOTS, ndim, generator=draw)[own]


def measure_table(options: argparse.Namespace) -> None:
    load, ndim = Load(), 8 if options.quick else _NDIM
    settings = [("1k", 0.0), *(("1m", repeated) for repeated in _REPEATED)]
    with contextlib.ExitStack() as opened:
        turns = {}
        for name, repeated in settings:
            arguments = (options, _Table, _TABLES[name], repeated, ndim)
            world = opened.enter_context(World(*arguments, processes=options.processes))
            turns |= {(name, repeated, way): (world, way) for way in _WAYS}
        times = take_turns(turns, rounds=options.rounds, warmup_rounds=2)
    result = {"time_1m_over_1k_rows": ratio(times["1m", 0.0, "ours"], times["1k", 0.0, "ours"])}
    rows = []
    for (name, repeated, way), found in times.items():
        over = ratio(times[name, repeated, "ours"], found)
        rows.append([f"{name} rows, {repeated:.0%} repeated", way, *cells(found, digits=2), f"{over:.2f}"])
        if name == "1m" and way != "ours":
            result[f"ours_over_{way}_{repeated:g}"] = over
    print_report(
        "optimizers table",
        header=["table", "way", "median ms", "spread ms", "ours / it"],
        rows=rows,
        notes=[f"{_SLOTS} slots over {options.processes} processes, rows of {ndim} float32."],
        result=result,
        options=options,
        load=load,
    )


if __name__ == "__main__":
    main()
