"""Ranks that have drifted apart are noticed, and the first tensor that differs is named."""

import pytest
import torch

from parallel.process_group import rank
from parallel.replicas import Difference, all_gather_difference, checksum
from tests.ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_any_changed_bit_changes_the_checksum(dtype):
    tensor = torch.arange(999).to(dtype).reshape(27, 37)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    assert checksum(tensor.t()) == before, "memory need not be contiguous"
    bits = tensor.view(torch.uint8).flatten()
    for place in (0, 500, len(bits) - 1):
        bits[place] ^= 1
        assert checksum(tensor) != before
        bits[place] ^= 1


def _compare(changed: dict[int, str]) -> Difference | None:
    tensors = {"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.arange(4)}
    if name := changed.get(rank()):
        tensors[name].view(-1)[2] += 1
    return all_gather_difference(tensors)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, None),
        ({1: "b"}, Difference("b", [1])),
        ({0: "c"}, Difference("c", [1, 2])),
        ({1: "c", 2: "a"}, Difference("a", [2])),
    ],
)
def test_the_first_differing_tensor_is_named_on_all_ranks(changed, expected):
    assert run_ranks(_compare, 3, changed) == [expected] * 3


def test_alone_there_is_nothing_to_differ_from():
    assert all_gather_difference({"a": torch.ones(2)}) is None
