"""Memory that ranks share: sums in it against those in messages, and what the system forbids."""

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.collectives import ALONE, all_ranks, barrier
from distributed.shared_memory import open_shared_tensors
from distributed.world import rank, world_size
from tests.ranks import call_each, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone")

_SIZES = (1, 1000, 5000, 3 * 2**16 + 7)


def _drawn(size: int, *, rank: int) -> torch.Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(rank))


def _sums(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rounds of sums in shared memory, and in messages; each begins with what the last one left."""
    shared = open_shared_tensors(size, torch.float32, all_ranks())
    assert not shared.local.any()
    message = torch.zeros(size)
    for mine in _drawn(size, rank=rank()):
        for each in (shared.local, message):
            each.mul_(0.5 + rank()).add_(mine)
        shared.all_reduce_sum_()
        dist.all_reduce(message)
    return shared.local.clone(), message


def _each_size(function: Callable, num_ranks: int) -> Iterator[tuple]:
    """Yields a size, and what the function has returned of it on each rank."""
    return zip(_SIZES, *run_ranks(call_each, num_ranks, function, [(size,) for size in _SIZES]), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_is_that_of_messages_and_has_the_same_bits_on_all_ranks(num_ranks):
    for size, *ranks in _each_size(_sums, num_ranks):
        rounds = [_drawn(size, rank=each) for each in range(num_ranks)]
        expected = [torch.zeros(size)] * num_ranks
        for number in range(3):
            parts = [each * (0.5 + of) + rounds[of][number] for of, each in enumerate(expected)]
            expected = [functools.reduce(torch.add, parts)] * num_ranks
        for ours, theirs in ranks:
            assert torch.equal(ours, expected[0]), "added up in the order of ranks"
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            assert num_ranks > 2 or torch.equal(ours, theirs), "two numbers have one sum"


def _nobody_reads_too_early(late: int) -> list[float]:
    """What rank `late` writes before it calls; the others call long before."""
    shared = open_shared_tensors(5000, torch.float64, all_ranks())
    if rank() == late:
        time.sleep(0.3)
    shared.local.fill_(10.0 ** rank())
    shared.all_reduce_sum_()
    found = shared.local.unique().tolist()
    shared.local.fill_(-1)  # in memory of this rank, which nobody reads any more
    return found


@pytest.mark.slow
def test_a_sum_waits_for_every_rank():
    found = run_ranks(call_each, 3, _nobody_reads_too_early, [(late,) for late in range(3)])
    assert found == [[[111.0]] * 3] * 3


def _is_refused(how: str) -> list[bool]:
    """Whether there is no shared memory where the last rank cannot map that of the others."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == world_size() - 1:
            if how == "no memfd":
                patch.delattr(os, "memfd_create")
            elif how == "too large":
                patch.setattr(os, "truncate", _too_large)
            elif how == "another name":  # as where a number is that of another process, on another machine
                patch.setattr(os, "readlink", lambda _: "/memfd:ranks_0 (deleted)")
        refused = open_shared_tensors(100, torch.float32, all_ranks()) is None
    barrier()
    return [refused, any("ranks_" in os.readlink(each) for each in _open_files())]


def _too_large(_file: int, _size: int) -> None:
    raise OSError("too large")


def _open_files() -> list[Path]:
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def test_where_one_rank_cannot_map_none_shares():
    cases = [("no memfd",), ("too large",), ("another name",)]
    assert run_ranks(call_each, 2, _is_refused, cases) == [[[True, False]] * 3] * 2


def _is_shared(num_nodes: int) -> bool:
    os.environ["GROUP_WORLD_SIZE"] = str(num_nodes)
    return open_shared_tensors(100, torch.float32, all_ranks()) is not None


def test_only_several_ranks_of_one_node_share():
    assert run_ranks(call_each, 2, _is_shared, [(1,), (2,)]) == [[True, False]] * 2
    assert open_shared_tensors(100, torch.float32, ALONE) is None


def _files_and_maps() -> list[int]:
    """How many files are open and mapped: with shared memory, and without."""
    shared = open_shared_tensors(100, torch.float32, all_ranks())
    found = [_count_maps()]
    assert not any("ranks_" in os.readlink(each) for each in _open_files())
    barrier()
    del shared
    gc.collect()
    return [*found, _count_maps()]


def _count_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ranks_")


def test_no_file_stays_open_and_the_memory_goes_with_its_tensors():
    assert run_ranks(_files_and_maps, 2) == [[2, 0]] * 2


def _joined() -> list[float]:
    shared = open_shared_tensors(3000, torch.float32, all_ranks())
    shared.local.fill_(-1)
    barrier()
    place = slice(1000 * rank(), 1000 * (rank() + 1))
    shared.local[place] = rank()
    if rank() == 1:
        time.sleep(0.2)
    shared.all_gather_(place)
    return shared.local[::500].tolist()


def test_what_each_rank_has_changed_is_joined():
    assert run_ranks(_joined, 3) == [[0, 0, 1, 1, 2, 2]] * 3
