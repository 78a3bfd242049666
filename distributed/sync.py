"""Sums gradients over ranks: in shared memory, by messages, or by torch's DistributedDataParallel.

One step, on all ranks:

    sync.zero()
    for ...:                                          # micro-batches
        with sync.micro_batch(is_last=...):           # only the last one may send messages
            loss = loss_of(sync.model(...))
            flat.scalars.add(loss=loss.detach())      # before the backward pass, which may send scalars
            with flat.gradients_attached():
                loss.backward()
    scalars = sync.finish()                           # flat.gradients are now sums over ranks

Divide the loss by the global batch size before the backward pass. Gradients are summed over ranks, not
averaged, so that the result does not depend on how the batch is divided.
"""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.flat import FlatParameters

_AUTO_BUCKET_MB = {"nccl": 25, "gloo": 64}


class GradientSync:
    """Base class of objects that sum gradients over ranks. The module docstring has an example.

    Attributes:
        name: Name of the method, for logs.
        model: Module to call in the forward pass.
        flat: The dense weights of the model and their gradients, as flat tensors. With pipeline or tensor
            parallelism, only some of them, and another `GradientSync` sums the other gradients.
            `flat.scalars` are numbers, such as the loss, that are summed together with the gradients.
    """

    name: ClassVar[str]

    def __init__(self, model: nn.Module, flat: FlatParameters):
        self.model, self.flat = model, flat

    def zero(self) -> None:
        """Sets the gradients to zero.

        Call it before the first backward pass of a training step. After this call, the step may add numbers
        to send with the gradients (`flat.scalars.add`).
        """
        self.flat.gradients.zero_()
        self.flat.scalars.is_closed = False

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the forward and backward pass of one part of the batch.

        is_last: Whether gradients may be sent to other ranks during this backward pass. Pass True only for
        the last part of a training step. After this part, `flat.scalars` accepts no more numbers. If no part
        has is_last=True, `finish` sends all gradients. DDP needs a part with is_last=True.
        """
        with contextlib.nullcontext() if is_last else self._no_sync():
            yield
        if is_last:
            self.flat.scalars.is_closed = True

    def finish(self) -> dict[str, Tensor]:
        """Completes the sum of `flat.gradients` over `flat.ranks`, in place.

        All ranks call it, after the last backward pass of a training step. With local_steps > 1, ranks call
        it only when they merge their weights. Then `flat.gradients` contains no gradients, but the changes of
        the weights since the previous merge. Returns the numbers that were sent in the same messages: {name:
        values of all ranks, [ranks]}.
        """
        raise NotImplementedError

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        # Prevents messages during the backward pass of a micro-batch that is not the last one.
        return contextlib.nullcontext()


@dataclasses.dataclass
class _Bucket:
    """A part of the gradients that one message sums over ranks.

    Attributes:
        gradients: View of a range of the tensor of all gradients.
        send_buffer: Memory that is sent: `gradients`, or a copy in another dtype.
        num_parameters: Number of parameters whose gradients start in this range.
        missing: Number of these parameters whose gradient the last backward pass has not computed yet.
        work: The message that is being sent. If no message is being sent, None.
    """

    gradients: Tensor
    send_buffer: Tensor
    num_parameters: int = 0
    missing: int = 0
    work: dist.Work | None = None


class FlatSync(GradientSync):
    """Sums gradients by several all-reduces.

    They run during the backward pass of the micro-batch with is_last=True. Without such a micro-batch (local
    steps, pipeline, tensor parallelism), they run in `finish`. So do those of gradients that the backward
    pass did not compute.

    In a backward pass, every `p.grad` is a view of `flat.gradients`. If gradients are sent in their own
    dtype, nothing is copied. If a rank does not use a parameter, this rank's gradient of it is zero.
    """

    name = "flat"

    def __init__(
        self, model: nn.Module, flat: FlatParameters, *, bucket_size_mb: float, sync_dtype: torch.dtype
    ):
        super().__init__(model, flat)
        self._is_accumulating, self._num_started = False, 0
        self._buckets: list[_Bucket] = []
        ends: list[int] = []
        for bucket_range in flat.buckets(bucket_size_mb * 2**20):
            gradients = flat.message[bucket_range]
            send_buffer = gradients if sync_dtype == gradients.dtype else gradients.to(sync_dtype)
            self._buckets.append(_Bucket(gradients, send_buffer))
            ends.append(bucket_range.stop)
        flat.attach_gradients()
        for name, view in flat.gradient_views.items():
            bucket = next(
                candidate
                for candidate, end in zip(self._buckets, ends, strict=True)
                if view.storage_offset() < end
            )
            bucket.num_parameters += 1
            # Python cannot free a cycle of a parameter and its hook, so the hook must not keep `self` alive.
            hook = functools.partial(_call_if_alive, weakref.WeakMethod(self._gradient_is_complete), bucket)
            flat.parameters[name].register_post_accumulate_grad_hook(hook)
        for bucket in self._buckets:
            bucket.missing = bucket.num_parameters

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def finish(self) -> dict[str, Tensor]:
        self.flat.check_gradients()
        self._start(until=len(self._buckets))
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if bucket.send_buffer is not bucket.gradients:
                    bucket.gradients.copy_(bucket.send_buffer)
            bucket.missing, bucket.work = bucket.num_parameters, None
        self._num_started = 0
        return self.flat.scalars.pop()

    def _gradient_is_complete(self, bucket: _Bucket) -> None:
        if self._is_accumulating:
            return
        bucket.missing -= 1
        # Start buckets in order, so that all ranks issue the same collectives in the same order.
        ready = self._num_started
        while ready < len(self._buckets) and self._buckets[ready].missing == 0:
            ready += 1
        self._start(until=ready)

    def _start(self, *, until: int) -> None:
        for bucket in self._buckets[self._num_started : until]:
            if self.flat.ranks.is_distributed:
                if bucket.send_buffer is not bucket.gradients:
                    bucket.send_buffer.copy_(bucket.gradients)
                group = self.flat.ranks.group
                bucket.work = dist.all_reduce(bucket.send_buffer, group=group, async_op=True)
            self.flat.scalars.is_closed |= bucket is self._buckets[-1]
        self._num_started = max(self._num_started, until)


def _call_if_alive(
    method: weakref.WeakMethod[Callable[[_Bucket], None]], bucket: _Bucket, _parameter: Tensor
) -> None:
    if (alive := method()) is not None:
        alive(bucket)


class SharedMemorySync(GradientSync):
    """Sums gradients in memory that all processes of one machine share, for CPUs.

    The sum starts after the backward pass, when the CPUs are free.
    """

    name = "shared memory"

    def __init__(self, model: nn.Module, flat: FlatParameters):
        super().__init__(model, flat)
        flat.attach_gradients()

    def finish(self) -> dict[str, Tensor]:
        self.flat.check_gradients()
        self.flat.messages_of_ranks.all_reduce_sum_()
        return self.flat.scalars.pop()


class DDPSync(GradientSync):
    """Sums gradients by torch's DistributedDataParallel (DDP).

    Every rank must use every parameter. torch.distributed must be initialized.
    """

    name = "ddp"

    def __init__(self, model: nn.Module, flat: FlatParameters, *, bucket_size_mb: float):
        from torch.nn.parallel import DistributedDataParallel

        known = inspect.signature(DistributedDataParallel).parameters
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        wrapped = DistributedDataParallel(
            model,
            process_group=flat.ranks.group,
            bucket_cap_mb=bucket_size_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{sync_buffers: False},  # the puzzle table is a buffer; torch 2.13 renamed the option
        )
        wrapped.register_comm_hook(flat.ranks.group, _sum_bucket)
        super().__init__(wrapped, flat)

    def zero(self) -> None:
        super().zero()
        for parameter in self.flat.parameters.values():
            parameter.grad = None  # DDP will set it to a view of a DDP bucket

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()

    def finish(self) -> dict[str, Tensor]:
        self.flat.ranks.all_reduce_sum_(self.flat.scalars.values)
        views = list(self.flat.gradient_views.values())
        parameters = [self.flat.parameters[name] for name in self.flat.gradient_views]
        torch._foreach_copy_(views, [parameter.grad for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        return self.flat.scalars.pop()


def _sum_bucket(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # Without a hook, DDP computes the mean.
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def build_gradient_sync(
    model: nn.Module,
    flat: FlatParameters,
    *,
    sync: str = "auto",
    bucket_size_mb: float | str = "auto",
    sync_dtype: str = "float32",
) -> GradientSync:
    """Returns the `GradientSync` that the config selects. All ranks call it.

    If `flat` is in shared memory, returns a `SharedMemorySync`. If sync="ddp" and torch.distributed is
    initialized, returns a `DDPSync`. In all other cases, returns a `FlatSync`.

    flat: The dense weights of `model` (with pipeline or tensor parallelism, some of them) and their
    gradients, as flat tensors. sync, bucket_size_mb, sync_dtype: Values of the config keys of the same names.
    """
    if flat.messages_of_ranks is not None:
        assert (sync, sync_dtype) == ("auto", "float32")
        return SharedMemorySync(model, flat)
    if bucket_size_mb == "auto":
        is_nccl = dist.is_initialized() and flat.weights.is_cuda and dist.is_nccl_available()
        bucket_size_mb = _AUTO_BUCKET_MB["nccl" if is_nccl else "gloo"]
    if sync == "ddp" and dist.is_initialized():
        return DDPSync(model, flat, bucket_size_mb=bucket_size_mb)
    return FlatSync(model, flat, bucket_size_mb=bucket_size_mb, sync_dtype=getattr(torch, sync_dtype))
