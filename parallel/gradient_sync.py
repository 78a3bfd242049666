"""The gradients of all ranks, summed before the optimizers see them: three ways with one face.

A step, on all ranks:

    sync.zero()
    with sync.no_sync():                # every micro-batch but the last: no collective
        loss_of(sync.model(...)).backward()
    loss_of(sync.model(...)).backward() # the last: gradients travel while it runs
    sync.finish()                       # every p.grad is the sum over ranks

The loss is scaled by 1 / global batch beforehand: gradients are summed, never averaged, so that the result
does not depend on how the batch was split.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.collectives import all_reduce_sum_, has_group
from parallel.flat_buffers import flat_views, joined

_FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early
_AUTO_BUCKET_MB = {"nccl": 25, "gloo": 64}


class GradientSync:
    """What the three ways share. Parameters are of one dtype and on one device, and equal on all ranks; those
    that need no gradient are left alone.

    model: what to call in the forward pass.
    extra: float32 scalar, summed over ranks with the gradients: add to it before the last backward pass what
    all ranks must know alike. Zeroed by `zero`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.extra = torch.zeros((), device=next(model.parameters()).device)

    def zero(self) -> None:
        """Before the first backward pass of a step.

        Gradients are zeroed in place: `p.grad = None` would part them from the memory that travels.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:  # DDP hands them out in the first backward pass
                parameter.grad.zero_()
        self.extra.zero_()

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Around forward and backward pass of a micro-batch that is not the last of its step."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """After the last backward pass, on all ranks: waits until every gradient is the sum over ranks."""
        raise NotImplementedError

    def norm(self) -> Tensor:
        """The norm of all gradients together, float32 scalar; after `finish` the same on all ranks."""
        if not self.parameters:
            return torch.zeros_like(self.extra)
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters])

    def scale_(self, factor: Tensor) -> None:
        """Multiplies all gradients by a scalar."""
        torch._foreach_mul_([p.grad for p in self.parameters], factor)


class PerParameterSync(GradientSync):
    """The textbook loop: one blocking all-reduce for each parameter, after the backward pass."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        for parameter in self.parameters:  # also of one that some rank will not use
            parameter.grad = torch.zeros_like(parameter)

    def finish(self) -> None:
        for parameter in self.parameters:
            all_reduce_sum_(parameter.grad)
        all_reduce_sum_(self.extra)


class DDPSync(GradientSync):
    """torch's DistributedDataParallel: the peer that the flat buckets are measured against.

    Every rank must use every parameter. Needs a process group.
    """

    def __init__(self, model: nn.Module, *, bucket_size_mb: float):
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        known = inspect.signature(DistributedDataParallel).parameters
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self.model = DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_size_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{sync_buffers: False},  # the puzzle table is a buffer; the name changed with torch 2.13
        )
        self.model.register_comm_hook(None, _sum_bucket)

    def no_sync(self) -> contextlib.AbstractContextManager:
        return self.model.no_sync()

    def finish(self) -> None:
        all_reduce_sum_(self.extra)


def _sum_bucket(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """In place of DDP's mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@dataclasses.dataclass
class _Bucket:
    """A piece of the flat buffer that travels in one message.

    wire: what is sent; the same memory, or a copy in another dtype.
    missing: gradients that are not yet complete in this backward pass.
    """

    gradients: Tensor
    wire: Tensor
    num_parameters: int
    missing: int
    work: dist.Work | None = None


class FlatSync(GradientSync):
    """Flat buckets that travel while the backward pass still runs.

    Every `p.grad` is a view of one flat buffer, laid out in the reverse order of registration, which is about
    the order in which gradients are completed; a bucket is a contiguous piece of it, so nothing is copied.
    Bucket k starts once it is complete and 0 .. k-1 have started: all ranks issue the same collectives in
    one order, whatever order their gradients come in. A parameter that a rank did not use adds zeros.
    """

    def __init__(self, model: nn.Module, *, bucket_size_mb: float, gradient_dtype: torch.dtype):
        super().__init__(model)
        self.parameters.reverse()
        first = self.parameters[0]
        self._buffer, (*self._views, self.extra) = flat_views([*self.parameters, self.extra])
        self._gradients = joined(self._views)
        self._buckets: list[_Bucket] = []
        self._is_accumulating, self._num_started = False, 0

        element_bytes = first.element_size()
        begin, members = 0, []
        ends = [view.storage_offset() for view in (*self._views[1:], self.extra)]
        for parameter, view, end in zip(self.parameters, self._views, ends, strict=True):
            parameter.grad = view
            members.append(parameter)
            limit = bucket_size_mb * 2**20 if self._buckets else _FIRST_BUCKET_BYTES
            is_last = parameter is self.parameters[-1]
            if is_last or (end - begin) * element_bytes >= min(limit, bucket_size_mb * 2**20):
                gradients = self._buffer[begin : end + is_last]  # the last takes `extra` along
                wire = gradients if gradient_dtype == first.dtype else gradients.to(gradient_dtype)
                bucket = _Bucket(gradients, wire, len(members), len(members))
                for member in members:
                    member.register_post_accumulate_grad_hook(self._hook(bucket))
                self._buckets.append(bucket)
                begin, members = end, []

    def zero(self) -> None:
        self._buffer.zero_()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def finish(self) -> None:
        assert all(p.grad is view for p, view in zip(self.parameters, self._views, strict=True))
        self._start(until=len(self._buckets))
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if bucket.wire is not bucket.gradients:
                    bucket.gradients.copy_(bucket.wire)
            bucket.missing, bucket.work = bucket.num_parameters, None
        self._num_started = 0

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._gradients)

    def scale_(self, factor: Tensor) -> None:
        self._gradients.mul_(factor)

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def gradient_is_complete(_parameter: Tensor) -> None:
            if self._is_accumulating:
                return
            bucket.missing -= 1
            ready = self._num_started
            while ready < len(self._buckets) and self._buckets[ready].missing == 0:
                ready += 1
            self._start(until=ready)

        return gradient_is_complete

    def _start(self, *, until: int) -> None:
        for bucket in self._buckets[self._num_started : until]:
            if has_group():
                if bucket.wire is not bucket.gradients:
                    bucket.wire.copy_(bucket.gradients)
                bucket.work = dist.all_reduce(bucket.wire, async_op=True)
        self._num_started = max(self._num_started, until)


def build_gradient_sync(
    model: nn.Module,
    *,
    sync: str = "flat",
    bucket_size_mb: float | str = "auto",
    gradient_dtype: str = "float32",
) -> GradientSync:
    """The way that the config's `sync` names. All ranks call it, inside the process group if there is one."""
    if bucket_size_mb == "auto":
        is_nccl = has_group() and next(model.parameters()).is_cuda and dist.is_nccl_available()
        bucket_size_mb = _AUTO_BUCKET_MB["nccl" if is_nccl else "gloo"]
    has_gradients = any(parameter.requires_grad for parameter in model.parameters())
    if sync == "per_parameter" or not has_gradients:
        return PerParameterSync(model)
    if sync == "ddp" and has_group():
        return DDPSync(model, bucket_size_mb=bucket_size_mb)
    return FlatSync(model, bucket_size_mb=bucket_size_mb, gradient_dtype=getattr(torch, gradient_dtype))
