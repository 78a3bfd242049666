"""Tensors side by side: found to be so where they are, and nowhere else."""

import pytest
import torch

from parallel.flat_buffers import flat_views, joined

_LIKE = [torch.ones(3, 5), torch.ones(32), torch.ones(())]


def test_views_are_apart_and_make_up_the_buffer():
    buffer, views = flat_views(_LIKE)
    assert [view.shape for view in views] == [tensor.shape for tensor in _LIKE]
    for number, view in enumerate(views, 1):
        view += number
    assert [int((buffer == number).sum()) for number in range(4)] == [16, 15, 32, 1]
    assert joined(views).data_ptr() == buffer.data_ptr()
    assert torch.equal(joined(views), buffer)
    assert torch.equal(joined(views[1:]), buffer[16:])


@pytest.mark.parametrize(
    "change",
    [
        lambda views: views[::-1],
        lambda views: [views[0], None, views[2]],
        lambda views: [None, *views[1:]],
        lambda views: [views[0], views[1].clone(), views[2]],
        lambda views: [views[0], views[2]],
        lambda views: [views[0].t(), *views[1:]],
        lambda views: [torch.ones(3)],  # the memory ends before the next boundary
    ],
)
def test_what_does_not_lie_so_is_not_joined(change):
    assert joined(change(flat_views(_LIKE)[1])) is None
