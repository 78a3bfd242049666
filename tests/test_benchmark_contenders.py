"""What the benchmarks compare: that every contender computes what it says."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import gradient_sync, optimizers, sparse_optimizer
from benchmarks.trainee import METADATA, TINY, build_config
from models import build_model
from parallel.process_group import rank, world_size
from tests.float64 import assert_close
from tests.ranks import run_ranks


# -------------------------------------------------------------------------------------------- gradients' sums
def _summed_gradients() -> dict[str, torch.Tensor]:
    """Returns all gradients, after a step of each contender on a batch of this rank's own."""
    arguments = SimpleNamespace(puzzles=2, processes=world_size(), quick=True)
    summed = {}
    for sync in gradient_sync.SYNCS:
        contender = gradient_sync.Contender(sync, arguments, torch.device("cpu"))
        contender.backward_alone()
        contender.step()
        parameters = contender.trainee.state.model.parameters()
        summed[sync] = torch.cat([parameter.grad.flatten() for parameter in parameters])
    return summed


@pytest.mark.slow
def test_every_contender_sums_the_gradients_of_all_ranks():
    first, second = run_ranks(_summed_gradients, 2)
    for sync in gradient_sync.SYNCS:
        assert torch.equal(first[sync], second[sync]), sync
        torch.testing.assert_close(first[sync], first["flat"], rtol=0, atol=0, msg=sync)


# ------------------------------------------------------------------------------------- the sparse optimizers
_ROWS, _NDIM, _SLOTS = 20, 6, 12


def _sparse_step(way: str) -> tuple[torch.Tensor, int]:
    """The table after one step on this rank's slots, and the bytes that this rank sent."""
    identifiers, gradients = _slots()
    local = _SLOTS // world_size()
    mine = slice(rank() * local, (rank() + 1) * local)
    table = torch.ones(_ROWS, _NDIM)
    batch = identifiers[mine], gradients[mine]
    step = sparse_optimizer.WAYS[way](table, [batch])
    with sparse_optimizer.CountedBytes() as sent:
        step(*batch)
    return table, sent.total


def _slots() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    identifiers = torch.randint(0, 8, (_SLOTS,), generator=generator)
    return identifiers, torch.randn(_SLOTS, _NDIM, generator=generator)


@pytest.mark.parametrize("way", ["ours", "plain", "torch", "rows"])
def test_every_way_sums_the_gradients_of_all_ranks(way):
    identifiers, gradients = _slots()
    sums = torch.zeros(_ROWS, _NDIM).index_add_(0, identifiers, gradients)
    expected = torch.ones(_ROWS, _NDIM)
    if way == "torch":
        expected -= sparse_optimizer.LR * sums
    else:
        used = identifiers.unique()
        expected[used] *= 1 - sparse_optimizer.LR * sparse_optimizer.WEIGHT_DECAY
        expected -= sparse_optimizer.LR * sums.sign()
    for number, (table, _) in enumerate(run_ranks(_sparse_step, 2, way)):
        here = slice(number, None, 2) if way == "rows" else slice(None)
        torch.testing.assert_close(table[here], expected[here])


@pytest.mark.parametrize("way", ["plain", "torch"])
def test_bytes_are_counted_whoever_sends_them(way):
    num_bytes = _SLOTS // 2 * (8 + 4 * _NDIM)  # each slot: an int64 identifier and a float32 row
    assert [sent for _, sent in run_ranks(_sparse_step, 2, way)] == [num_bytes] * 2


@pytest.mark.parametrize("share", sparse_optimizer.DUPLICATE_SHARES)
def test_share_of_repeated_slots(share):
    for identifiers, gradients in sparse_optimizer.draw_slots(1000, share, 2, device=torch.device("cpu")):
        assert gradients.shape == (768, 2)
        assert len(identifiers.unique()) == round(768 * (1 - share))


# --------------------------------------------------------------------------------------- the dense optimizers
@pytest.mark.usefixtures("float64")
def test_the_loop_that_adam_atan2_is_measured_against_does_the_same():
    start, ours, loop = (
        _weights_after_updates(way and ("adam_atan2", way)) for way in (None, "ours, eager", "loop")
    )
    assert (ours - start).abs().median() > 2e-4
    assert_close(ours, loop)


def _weights_after_updates(key: tuple[str, str] | None) -> torch.Tensor:
    torch.manual_seed(0)
    network = build_model(build_config(global_batch_size=1, sizes=TINY).arch, METADATA).network
    if key:
        update = optimizers.WAYS[key](network)
        for _ in range(3):
            update()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
