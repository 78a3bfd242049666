"""Tensors side by side in one buffer, so that one message, or one kernel, takes them all.

Gradients, weights, their moments and averages are laid out alike: what belongs to one parameter is at the
same place of each buffer. Between two tensors are zeros, up to the next boundary; nobody writes there but
kernels that take the whole buffer, and those make zeros of zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # elements: every tensor starts on a boundary that vectorised kernels like


def flat_views(like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A buffer of zeros, and a view into it in the shape of each tensor, one after the other.

    like: at least one, all of one dtype and on one device.
    """
    first = like[0]
    assert all((tensor.dtype, tensor.device) == (first.dtype, first.device) for tensor in like)
    sizes = [_padded(tensor.numel()) for tensor in like]
    buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    pieces = zip(buffer.split(sizes), like, strict=True)
    return buffer, [piece[: tensor.numel()].view(tensor.shape) for piece, tensor in pieces]


def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The flat tensor of all of them and what is between, if they lie as `flat_views` would lay them.

    It is the same memory. None where they lie otherwise, or one of them is None.
    """
    first = tensors[0]
    if any(tensor is None for tensor in tensors):
        return None
    memory, begin = first.untyped_storage(), first.storage_offset()
    end = begin
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and tensor.untyped_storage().data_ptr() == memory.data_ptr()
        if not is_next or not tensor.is_contiguous():
            return None
        end += _padded(tensor.numel())
    if end * first.element_size() > memory.nbytes():
        return None
    return first.detach().as_strided((end - begin,), (1,))


def _padded(num_elements: int) -> int:
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
