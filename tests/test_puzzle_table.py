"""The puzzle table against a naive loop, on one rank and on several, and one home against the other."""

import dataclasses

import pytest
import torch

from distributed.collectives import all_ranks
from distributed.world import rank, world_size
from models.puzzle_embedding import PuzzleEmbedding
from optimizers import puzzle_table
from optimizers.puzzle_table import (
    PuzzleTable,
    Replicated,
    RowsByOwner,
    sign_sgd_rows_,
    sum_by_identifier,
    sum_with_repeats,
)
from tests.checkpoints import begin_training, do_step
from tests.ranks import call_each, run_ranks
from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config

_LR, _DECAY, _ROWS, _NDIM, _BATCH = 0.1, 0.5, 12, 5, 24


def _table() -> torch.Tensor:
    return torch.randn(_ROWS, _NDIM, generator=torch.Generator().manual_seed(1))


def _used(num_used: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Identifiers that repeat (row 0 among them, 10 and 11 not), and a weight for each gradient.

    Of row 0 the first and the last cancel out, and swallow the others where sums are not float64.
    """
    generator = torch.Generator().manual_seed(2)
    identifiers = torch.randint(0, num_used, (_BATCH,), generator=generator, dtype=torch.int32)
    identifiers[[*range(_BATCH // 4), -1]] = 0
    weights = torch.randn(_BATCH, _NDIM, generator=generator)
    weights[0], weights[-1] = 1e12, -1e12
    return identifiers, weights


def _naive(table: torch.Tensor, identifiers: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    for identifier in sorted(set(identifiers.tolist())):
        total = sum(gradients[i].double() for i in range(len(identifiers)) if identifiers[i] == identifier)
        table[identifier] *= 1 - _LR * _DECAY
        table[identifier] -= _LR * torch.sign(total).float()
    return table


def _build(embedding: PuzzleEmbedding, num_rows: int, *, is_sharded: bool, counts: list[int]) -> PuzzleTable:
    if is_sharded:
        return RowsByOwner(embedding, num_rows, all_ranks(), weight_decay=_DECAY)
    return Replicated(embedding, num_rows, all_ranks(), weight_decay=_DECAY, slot_counts=counts)


def _optimize(num_used: int, is_sharded: bool, counts: list[int]) -> torch.Tensor:
    """One step on this rank's slots; the gradients come from a real backward pass."""
    embedding = PuzzleEmbedding(*(_table()[rank() :: world_size()] if is_sharded else _table()).shape)
    embedding.weights.copy_(_table()[rank() :: world_size()] if is_sharded else _table())
    table = _build(embedding, _ROWS, is_sharded=is_sharded, counts=counts)
    first, count = sum(counts[: rank()]), counts[rank()]
    identifiers, weights = (part[first : first + count] for part in _used(num_used))
    table.prepare(identifiers)
    half = count // 2
    for part in (slice(None, half), slice(half, None)):  # two uses before the step: accumulation
        (embedding(identifiers[part]) * weights[part]).sum().backward()
    table.reduce(step=1)
    table.update_(_LR)
    return embedding.weights


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[24], [6] * 4, [16, 8, 0]])
def test_step_is_the_naive_loop_over_the_rows_of_all_ranks(counts):
    size, cases = len(counts), [(num, is_sharded, counts) for num in (2, 10) for is_sharded in (False, True)]
    for (num_used, is_sharded, _), *tables in zip(
        cases, *run_ranks(call_each, size, _optimize, cases), strict=True
    ):
        expected = _naive(_table(), *_used(num_used))
        assert torch.equal(expected[10:], _table()[10:]), "rows that nobody used stand still"
        for number, table in enumerate(tables):
            assert torch.equal(table, expected[number::size] if is_sharded else expected), (
                num_used,
                is_sharded,
            )


@pytest.mark.parametrize("num_used", [1, 2, _BATCH])
def test_repeated_identifiers_move_a_row_as_distinct_ones_do(num_used):
    """What CUDA does, on the CPU."""
    used = tuple(part[:num_used] for part in _used())
    tables = []
    for sum_rows in (sum_by_identifier, sum_with_repeats):
        identifiers, sums = sum_rows(*used)
        table = _table()
        sign_sgd_rows_(table, identifiers, sums, lr=_LR, weight_decay=_DECAY)
        tables.append(table)
    assert torch.equal(*tables)
    assert torch.equal(tables[0], _naive(_table(), *used))
    assert len(identifiers) == num_used


def test_nothing_is_remembered_without_gradient_or_in_evaluation():
    embedding = PuzzleEmbedding(_ROWS, _NDIM)
    with torch.no_grad():
        embedding(torch.tensor([1]))
    embedding.eval()
    assert not embedding(torch.tensor([1])).requires_grad
    identifiers, gradients = embedding.pop_gradients()
    assert len(identifiers) == len(gradients) == 0


_STEPS, _GLOBAL_BATCH = 5, 24  # slots halt after 4 steps at most
_NUM_ROWS = 21  # that no number of ranks but 3 divides
_NAME = "puzzle_emb.weights"
# By number of ranks.
_WAYS = {
    2: {
        "exact target": {"arch": tiny_arch(q_target="exact").model_dump()},
        "serrm": {
            "arch": tiny_arch("serrm", puzzle_emb_ndim=1).model_dump(),
            "data_parallel_shard_degree": -1,
        },
    },
    3: {"accumulation": {"gradient_accumulation_steps": 2}},
    4: {"ddp": {"sync": "ddp", "gradient_accumulation_steps": 3}},
}


def _whole(rows: torch.Tensor) -> torch.Tensor:
    """Joins what the ranks have of the table, in the order of identifiers."""
    whole = torch.empty(_NUM_ROWS, rows.shape[1])
    counts = [len(range(n, _NUM_ROWS, world_size())) for n in range(world_size())]
    for owner, part in enumerate(all_ranks().all_gather_rows(rows.detach(), counts).split(counts)):
        whole[owner :: world_size()] = part
    return whole


def _train(**options) -> dict[str, torch.Tensor]:
    """Trains with EMA; returns weights, gradients and averages, of the whole table too."""
    config = tiny_config(ema=0.9, **options)
    state = begin_training(config, dataclasses.replace(FACTS, num_puzzle_identifiers=_NUM_ROWS))
    for step in range(_STEPS):
        batch = random_batch(_GLOBAL_BATCH, seed=step)
        batch.puzzle_identifiers[: _GLOBAL_BATCH // 2] %= 3  # on several ranks, and often
        result = do_step(state, config, batch)
    with state.averaged():
        averages = {name: tensor.clone() for name, tensor in state.model.network.state_dict().items()}
    found = {f"ema {name}": tensor for name, tensor in averages.items()}
    found |= {name: tensor.clone() for name, tensor in state.model.network.state_dict().items()}
    found["gradients"], found["loss"] = state.weights.flats[0].gradients.clone(), result.loss
    for name in (_NAME, f"ema {_NAME}"):
        found["rows here of " + name] = torch.tensor(len(found[name]))
        found[name] = _whole(found[name]) if isinstance(state.table, RowsByOwner) else found[name]
    return found


def _train_both_ways(ways: dict[str, dict]) -> dict[str, tuple[dict, dict]]:
    return {
        name: tuple(_train(puzzle_emb_sharding=each, **options) for each in ("replicated", "rows"))
        for name, options in ways.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", _WAYS)
def test_training_is_the_same_to_the_bit(num_ranks):
    for number, found in enumerate(run_ranks(_train_both_ways, num_ranks, _WAYS[num_ranks])):
        for name, (replicated, rows) in found.items():
            assert (replicated[_NAME] != 0).any(dim=1).sum() > _NUM_ROWS / 2
            for tensor, value in replicated.items():
                if tensor.startswith("rows here"):
                    assert rows[tensor] == len(range(number, _NUM_ROWS, num_ranks)), (name, tensor)
                else:
                    assert torch.equal(rows[tensor], value), f"{name}, rank {number}: {tensor}"


def _read_in_pieces() -> None:
    puzzle_table._PIECE = 4
    whole = torch.randn(_NUM_ROWS, 3, generator=torch.Generator().manual_seed(0))
    embedding = PuzzleEmbedding(len(whole[rank() :: world_size()]), 3).eval()
    table = _build(embedding, _NUM_ROWS, is_sharded=True, counts=[])
    table.fill_({_NAME: whole} if rank() == 0 else {})
    assert torch.equal(embedding.weights, whole[rank() :: world_size()])
    wanted = torch.arange(_NUM_ROWS, dtype=torch.int32).flip(0)[: 20 * (2 - rank())]  # rank 2 wants nothing
    table.fetch(wanted.repeat(2))
    assert torch.equal(embedding(wanted), whole[wanted])


def test_many_rows_travel_in_pieces():
    run_ranks(_read_in_pieces, 3)
