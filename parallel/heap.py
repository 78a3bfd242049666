"""The memory that a process computes with on a CPU: glibc's heap.

By default glibc returns large blocks to the system as soon as they are freed, so that every training step
asks for their pages again, and the system writes zeros into thousands of them.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LARGEST_KEPT = 2**25  # bytes: the most that every glibc takes
_RESERVED, _RESERVED_BY_GLIBC = 2**30, 2**17  # bytes by which the heap grows at a time
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_MADV_HUGEPAGE = 14  # of Linux's mman.h


def keep_freed_memory(device: torch.device) -> None:
    """Makes glibc keep freed blocks of up to 32 MiB for later tensors, the first GiB in huge pages.

    Only where `device` is a CPU and the C library is glibc. Where the system grants no huge pages, the heap
    works without them. Measured on a training step: kept memory saves 3 to 20 % of the time, huge pages
    another 1 to 9 %, because the processor looks up fewer addresses.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    _reserve_huge_pages(libc)


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    # The heap grows now by what it will be asked for later: pages that nobody writes to cost nothing.
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.sbrk.restype = libc.malloc.restype = pointer
    libc.sbrk.argtypes, libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_ssize_t], [size], [pointer]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]

    begin = libc.sbrk(0)
    libc.mallopt(_M_TOP_PAD, _RESERVED)
    libc.free(libc.malloc(_LARGEST_KEPT - mmap.PAGESIZE))
    libc.mallopt(_M_TOP_PAD, _RESERVED_BY_GLIBC)
    libc.madvise(begin, libc.sbrk(0) - begin, _MADV_HUGEPAGE)
