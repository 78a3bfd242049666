"""The order of parameters in memory; gradients summed over ranks against torch's own of the whole batch."""

import gc
import itertools
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.collectives import all_ranks
from distributed.flat import FlatParameters
from distributed.sync import GradientSync, build_gradient_sync
from distributed.world import rank, world_size
from tests.float64 import relative_difference
from tests.ranks import call_each, run_ranks

_BATCH, _WIDTH = 12, 8
# At worst: a gradient is a sum of 12 x 37 products, each rounded; the shares of 3 ranks and their sum are.
_TOLERANCE = {"float32": 12 * 37 * 2**-24, "bfloat16": 4 * 2**-9}


class _Model(nn.Module):
    """Layers of several sizes: one is used twice, one bias is odd in length, one layer may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(_WIDTH, 37)
        self.twice = nn.Linear(37, 37)
        self.sometimes = nn.Linear(37, 37, bias=False)
        self.last = nn.Linear(37, 3)

    def forward(self, x: torch.Tensor, *, uses_all: bool) -> torch.Tensor:
        h = self.twice(self.twice(self.first(x)).tanh()).tanh()
        return self.last(self.sometimes(h) if uses_all else h)


def _data() -> torch.Tensor:
    return torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(5))


def _share() -> slice:
    local = _BATCH // world_size()
    return slice(rank() * local, (rank() + 1) * local)


def _build_sync(model: nn.Module, *, in_shared_memory: bool = False, **options) -> GradientSync:
    flat_options = {"ranks": all_ranks(), "in_shared_memory": in_shared_memory}
    flat = FlatParameters(model.named_parameters(), ("nothing", "loss", "count"), **flat_options)
    can_share = world_size() > 1 and sys.platform == "linux"
    assert (flat.messages_of_ranks is not None) == (in_shared_memory and can_share)
    return build_gradient_sync(model, flat, **options)


def _backward(sync: GradientSync, share: slice, *, uses_all: bool) -> None:
    loss = sync.model(_data()[share], uses_all=uses_all).square().sum() / _BATCH
    sync.flat.scalars.add(loss=loss.detach(), count=100 * rank() + 1)
    loss.backward()


def _gradients(options: dict, num_parts: int = 1, skips: bool = False) -> dict:
    """What a rank holds after two steps, of which the second counts."""
    torch.manual_seed(rank())
    model = _Model()
    sync = _build_sync(model, **options)
    share = _share()
    size = (share.stop - share.start) // num_parts
    for _ in range(2):
        sync.zero()
        for first in range(share.start, share.stop, size):
            part = slice(first, first + size)
            uses_all = not skips or rank() == 0
            with sync.micro_batch(is_last=part.stop == share.stop):
                _backward(sync, part, uses_all=uses_all)
        scalars = sync.finish()
    assert scalars["count"].tolist() == [num_parts * (100 * each + 1) for each in range(world_size())]
    return {
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
        "loss": float(scalars["loss"].sum()),
        "norm": float(sync.flat.gradients.norm()),
    }


def _oracle(*, num_ranks: int, skips: bool = False) -> dict[str, torch.Tensor]:
    """torch's own gradients of the whole batch; with `skips`, rank 0 alone uses `sometimes`."""
    model, local = _Model(), _BATCH // num_ranks
    for first in range(0, _BATCH, local):
        uses_all = not skips or first == 0
        (model(_data()[first : first + local], uses_all=uses_all).square().sum() / _BATCH).backward()
    return {name: p.grad for name, p in model.named_parameters()}


_OPTIONS = {
    "flat": {},
    "one gradient a bucket": {"bucket_size_mb": 1e-6},
    "some gradients a bucket": {"bucket_size_mb": 0.004},
    "bfloat16": {"sync_dtype": "bfloat16"},
    "bfloat16 in buckets": {"sync_dtype": "bfloat16", "bucket_size_mb": 0.004},
    "ddp": {"sync": "ddp", "bucket_size_mb": 0.004},
    "shared memory": {"in_shared_memory": True},
}


def _gradients_of_each(names: list[str], numbers: list[int], skips: bool) -> dict[tuple[str, int], dict]:
    cases = itertools.product(names, numbers)
    return {(name, num_parts): _gradients(_OPTIONS[name], num_parts, skips) for name, num_parts in cases}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_are_those_of_the_whole_batch(num_ranks):
    expected = _oracle(num_ranks=num_ranks)
    norm = float(torch.cat([value.flatten() for value in expected.values()]).norm())
    loss = float(_Model()(_data(), uses_all=True).detach().square().sum() / _BATCH)
    ranks = run_ranks(_gradients_of_each, num_ranks, list(_OPTIONS), [1, 2], False)
    for name in ranks[0]:
        tolerance = _TOLERANCE[_OPTIONS[name[0]].get("sync_dtype", "float32")]
        for results in ranks:
            result = results[name]
            assert relative_difference(result["gradients"], expected) < tolerance, name
            assert result["loss"] == pytest.approx(loss, rel=tolerance), name
            assert result["norm"] == pytest.approx(norm, rel=tolerance), name
            for key, gradient in result["gradients"].items():
                assert torch.equal(gradient, ranks[0][name]["gradients"][key]), f"{name}: other bits in {key}"


def test_a_parameter_that_some_rank_did_not_use():
    """No rank waits for the gradient that does not come; the sum is that of those that have one."""
    expected = _oracle(num_ranks=3, skips=True)
    names = [name for name in _OPTIONS if name != "ddp"]
    for results in run_ranks(_gradients_of_each, 3, names, [1], True):
        for (name, _), result in results.items():
            tolerance = _TOLERANCE[_OPTIONS[name].get("sync_dtype", "float32")]
            assert relative_difference(result["gradients"], expected) < tolerance, name


def _order_of_starts(num_ranks_used: int) -> list:
    """Sizes of the messages in the order in which this rank sends them, and how many before `finish`."""
    sync = _build_sync(_Model(), bucket_size_mb=0.002)
    sent, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **options: sent.append(len(tensor)) or all_reduce(tensor, **options)
    try:
        sync.zero()
        with sync.micro_batch(is_last=False):
            _backward(sync, _share(), uses_all=True)
        assert not sent, "a micro-batch that is not the last sends nothing"
        _backward(sync, _share(), uses_all=rank() < num_ranks_used)
        before = len(sent)
        sync.finish()
    finally:
        dist.all_reduce = all_reduce
    return [sent, before]


def test_buckets_start_during_the_backward_pass_in_one_order():
    starts, starts_of_other = run_ranks(call_each, 2, _order_of_starts, [(2,), (1,)])
    (sizes, before), (others, _) = starts[0], starts_of_other[0]
    assert sizes == others
    assert len(sizes) > 2
    assert before == len(sizes), "every message has left when the backward pass ends"
    (sizes, before), (others, before_of_other) = starts[1], starts_of_other[1]
    assert sizes == others, "also where rank 1 has not used everything"
    assert before_of_other < before, "then the rest leaves in finish"


def test_parameters_are_apart_and_in_the_reverse_order_of_registration():
    model = _Model()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    flat = FlatParameters(model.named_parameters(), ranks=all_ranks())
    assert list(flat.parameters) == list(reversed(values))
    buffer = torch.zeros_like(flat.weights)
    for number, view in enumerate(flat.views(buffer).values(), 1):
        view += number
    sizes = [values[name].numel() for name in flat.parameters]
    assert [int((buffer == number).sum()) for number in range(1, 8)] == sizes
    assert int((buffer == 0).sum()) == sum(-size % 16 for size in sizes)
    for name, parameter in model.named_parameters():
        assert parameter is flat.parameters[name]
        assert torch.equal(parameter, values[name]), name
        assert parameter.data_ptr() == flat.views(flat.weights)[name].data_ptr(), name


def test_without_gradients_the_scalars_alone_travel():
    model = _Model().requires_grad_(False)
    sync = _build_sync(model)
    assert len(sync.flat.gradients) == 0
    sync.flat.scalars.add(loss=3)
    assert sync.finish()["loss"].tolist() == [3]
    assert sync.finish()["loss"].tolist() == [0], "sent once"


def test_a_model_is_freed_together_with_its_sync():
    model = _Model()
    sync = _build_sync(model)
    sync.zero()
    with sync.micro_batch(is_last=True):
        _backward(sync, _share(), uses_all=True)
    sync.finish()
    references = [weakref.ref(each) for each in (model, sync, sync.flat)]
    del model, sync
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
