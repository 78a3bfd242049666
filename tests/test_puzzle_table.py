"""The sparse optimizer against a naive loop, on one rank and on several."""

import pytest
import torch

from models.network import PuzzleEmbedding
from optimizers.puzzle_table import (
    SparseSignSGD,
    sign_sgd_rows_,
    sum_by_identifier,
    sum_with_repeats,
)
from parallel.collectives import all_gather_rows
from parallel.process_group import rank, world_size
from parallel.row_owners import RowOwners
from tests.ranks import run_ranks

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


def _optimize(num_used: int, is_spread: bool) -> torch.Tensor:
    """One step on this rank's slice of the batch; the gradients come from a real backward pass.

    is_spread: whether a row lives on one rank alone.
    """
    table = _table()[rank() :: world_size()] if is_spread else _table()
    embedding = PuzzleEmbedding(*table.shape)
    embedding.weights.copy_(table)
    owners = RowOwners(embedding, _ROWS) if is_spread else None
    local = _BATCH // world_size()
    mine = slice(rank() * local, (rank() + 1) * local)
    identifiers, weights = (part[mine] for part in _used(num_used))
    if is_spread:
        owners.fetch(identifiers)
    half = local // 2
    for part in (slice(None, half), slice(half, None)):  # two uses before the step: accumulation
        (embedding(identifiers[part]) * weights[part]).sum().backward()
    optimizer = SparseSignSGD(embedding, lr=_LR, weight_decay=_DECAY, owners=owners)
    if is_spread:
        optimizer.send_gradients()
    else:
        optimizer.all_gather_gradients(torch.tensor([1, 2, 2, 2]) if num_used == 2 else None)
    optimizer.step()
    return embedding.weights


@pytest.mark.parametrize("is_spread", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_used", [2, 10])
def test_step_is_the_naive_loop_over_the_rows_of_all_ranks(num_ranks, num_used, is_spread):
    """Sums travel where 2 of 6 slots are distinct, on rank 0 only 1 of them; rows where 10 are."""
    expected = _naive(_table(), *_used(num_used))
    assert torch.equal(expected[10:], _table()[10:]), "rows that nobody used stand still"
    for number, table in enumerate(run_ranks(_optimize, num_ranks, num_used, is_spread)):
        assert torch.equal(table, expected[number::num_ranks] if is_spread else expected)


def test_signs_do_not_depend_on_the_order_of_equal_identifiers():
    large = torch.tensor([[1e8], [1.0], [-1e8]])
    for order in ([0, 1, 2], [0, 2, 1], [2, 1, 0]):
        _, sums = sum_by_identifier(torch.zeros(3, dtype=torch.int32), large[order])
        assert sums.item() == 1.0


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


def test_zero_gradient_only_decays():
    table = torch.ones(2, 3)
    sign_sgd_rows_(table, torch.tensor([1]), torch.zeros(1, 3), lr=_LR, weight_decay=_DECAY)
    assert torch.equal(table, torch.tensor([[1.0] * 3, [1 - _LR * _DECAY] * 3]))


def test_nothing_is_remembered_without_gradient_or_in_evaluation():
    embedding = PuzzleEmbedding(_ROWS, _NDIM)
    with torch.no_grad():
        embedding(torch.tensor([1]))
    embedding.eval()
    assert not embedding(torch.tensor([1])).requires_grad
    identifiers, gradients = embedding.collect_gradients()
    assert len(identifiers) == len(gradients) == 0


def _gather() -> torch.Tensor:
    return all_gather_rows(torch.full((rank() * 2 % 3, 2), float(rank())))


def test_gather_of_unequal_numbers_of_rows():
    for gathered in run_ranks(_gather, 3):  # 0, 2 and 1 rows
        assert torch.equal(gathered, torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]))
