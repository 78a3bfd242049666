"""The dense parameters side by side in memory, and their gradients, which are summed over all ranks.

`FlatParameters` decides the order once; whatever belongs to a parameter (weight, gradient, moments, average)
is at the same place of a buffer of its own. So one message, or one kernel, takes many parameters at once:
gradients travel in buckets, contiguous ranges of the buffer, while the backward pass still runs. A step, on
all ranks:

    sync.zero()
    with sync.no_sync():                 # every micro-batch but the last: no collective
        loss_of(sync.model(...)).backward()
    loss_of(sync.model(...)).backward()  # the last: gradients travel while it runs
    flat.tell(loss=...)                  # any time before `finish`: numbers that all ranks must know
    told = sync.finish()                 # flat.gradients is the sum over ranks, and so is every p.grad

The loss is scaled by 1 / global batch beforehand: gradients are summed, never averaged, so that the result
does not depend on how the batch was split.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.collectives import all_gather_flat_, all_reduce_sum_, has_group
from parallel.process_group import rank, world_size
from parallel.slices import Slice, spread

_ALIGNMENT = 16  # elements: every parameter starts on a boundary that vectorised kernels like
_SHARE_ALIGNMENT = (
    1024  # elements: kernels that end there round as those that go on (the rest of a vector does not)
)
_FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early
_AUTO_BUCKET_MB = {"nccl": 25, "gloo": 64}


class FlatParameters:
    """The owner of the order of parameters in memory, and of the buffers for weights and gradients.

    The order is the reverse of registration, about the order in which a backward pass completes gradients.
    Every parameter starts at a multiple of 16 and of the number of ranks, so that any range of whole
    parameters can be cut into equal parts, one for each rank. The gaps hold zeros; only kernels that take
    whole ranges write there, and these make zeros of zeros.

    parameters: by name, in the order of the buffers; of one dtype and on one device.
    weights: [size]; each parameter's data is a view of it from here on.
    gradients: [size], zeros at first; [0] where the parameters need no gradient.
    told: [names, ranks], right behind the gradients, with whose last message it travels: what every rank
    tells all others. A rank adds to its own column alone, so that the sum over ranks has all of them.
    message: the memory of gradients and told.
    share: the range of the buffers that is this rank's, where something is spread over ranks (`shares`).
    share_size: the length of each, but that the last ones are cut short where the buffers end.
    padded: [share_size * number of ranks], the memory of the weights.

    names_told: of the numbers in `told`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], names_told: Sequence[str] = ()):
        self.parameters = dict(reversed(list(named_parameters)))
        first = next(iter(self.parameters.values()))
        for parameter in self.parameters.values():
            assert (parameter.dtype, parameter.device) == (first.dtype, first.device)
            assert parameter.requires_grad == first.requires_grad, "all are trained, or none is"
        self._alignment = math.lcm(_ALIGNMENT, world_size())
        self._ranges, self.size = {}, 0
        for name, parameter in self.parameters.items():
            length = -(-parameter.numel() // self._alignment) * self._alignment
            self._ranges[name] = slice(self.size, self.size + length)
            self.size += length
        self.share_size = -(-self.size // (_SHARE_ALIGNMENT * world_size())) * _SHARE_ALIGNMENT
        self.share = self.shares()[rank()]

        self.padded = first.new_zeros(self.share_size * world_size())
        self.weights = self.padded[: self.size]
        for name, view in self.views(self.weights).items():
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view
        num_gradients = self.size if first.requires_grad else 0
        num_told = len(names_told) * world_size()
        behind = -(-max(1, num_told) // self._alignment) * self._alignment
        self.message = first.new_zeros(num_gradients + behind)
        self.gradients, behind_gradients = self.message[:num_gradients], self.message[num_gradients:]
        self.told = behind_gradients[:num_told].view(len(names_told), world_size())
        self._names_told = tuple(names_told)

    def tell(self, **numbers: float | Tensor) -> None:
        """Adds to what this rank tells the others; exact where 8 significant bits are enough (bfloat16)."""
        for name, number in numbers.items():
            self.told[self._names_told.index(name), rank()] += number

    def take_told(self) -> dict[str, Tensor]:
        """Returns by name what each rank has told, [ranks], once it has travelled; all begin anew."""
        told = self.told.clone()
        self.told.zero_()
        return dict(zip(self._names_told, told, strict=True))

    def views(self, buffer: Tensor, *, begin: int = 0) -> dict[str, Tensor]:
        """Returns each parameter's part, by name and in its shape, of a buffer laid out like these.

        begin: where the buffer begins, if it is that of a range only; names outside of it are left out.
        """
        return {
            name: buffer[place.start - begin :][: parameter.numel()].view(parameter.shape)
            for (name, parameter), place in zip(self.parameters.items(), self._ranges.values(), strict=True)
            if begin <= place.start and place.stop <= begin + len(buffer)
        }

    def slices(self, buffer: Tensor, *, begin: int) -> dict[str, Tensor | Slice]:
        """Returns what of each parameter is in a buffer of a range that begins at `begin`, maybe nothing.

        In a world of one the buffer is of everything, and the parts are those of `views`.
        """
        slices = {}
        for (name, parameter), place in zip(self.parameters.items(), self._ranges.values(), strict=True):
            first, end = place.start, place.start + parameter.numel()
            start, stop = (min(max(each, first), end) for each in (begin, begin + len(buffer)))
            part = buffer[max(start - begin, 0) :][: stop - start]
            slices[name] = spread(part, range(start - first, stop - first), tuple(parameter.shape))
        return slices

    def shares(self) -> list[slice]:
        """Returns the range of the buffers that is each rank's; the last ones may be empty."""
        ends = [min(number * self.share_size, self.size) for number in range(world_size() + 1)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def all_gather_shares(self, share: Tensor) -> Tensor:
        """Joins the shares of all ranks, [share_size] each, into a buffer laid out like these.

        All ranks call it.
        """
        if not has_group():
            return share
        whole = share.new_empty(self.share_size * world_size())
        all_gather_flat_(whole, share)
        return whole

    def ranges(self, names: Collection[str], *, joins: bool = True) -> list[slice]:
        """Finds the fewest ranges of the buffers that hold these parameters and no others.

        joins: False is one for each parameter.
        """
        ranges: list[slice] = []
        for name, place in self._ranges.items():
            if name not in names:
                continue
            if joins and ranges and ranges[-1].stop == place.start:
                ranges[-1] = slice(ranges[-1].start, place.stop)
            else:
                ranges.append(place)
        return ranges

    def buckets(self, num_bytes: float) -> list[slice]:
        """Ranges of `message` of about `num_bytes` each; the first is smaller, the last includes `told`."""
        element_bytes = self.message.element_size()
        buckets: list[slice] = []
        begin = 0
        for place in self._ranges.values() if len(self.gradients) else ():
            limit = num_bytes if buckets else min(num_bytes, _FIRST_BUCKET_BYTES)
            if (place.stop - begin) * element_bytes >= limit or place.stop == self.size:
                buckets.append(slice(begin, place.stop))
                begin = place.stop
        last_begin = buckets.pop().start if buckets else 0
        return [*buckets, slice(last_begin, len(self.message))]


class GradientSync:
    """The sum over ranks of the gradients in `flat.gradients`, and what ranks tell each other beside.

    model: what to call in the forward pass.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters):
        self.model, self.flat = model, flat

    def zero(self) -> None:
        """Zeroes the gradients, before the first backward pass of a step."""
        self.flat.gradients.zero_()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds forward and backward pass of a micro-batch that is not the last of its step."""
        raise NotImplementedError

    def finish(self) -> dict[str, Tensor]:
        """Waits until every gradient is the sum over ranks; all ranks call it after the backward passes.

        Returns by name what each rank has told, [ranks].
        """
        raise NotImplementedError


@dataclasses.dataclass
class _Bucket:
    """A range of the gradients that travels in one message.

    wire: what is sent; the same memory, or a copy in another dtype.
    missing: how many gradients are not yet complete in this backward pass.
    """

    gradients: Tensor
    wire: Tensor
    num_parameters: int = 0
    missing: int = 0
    work: dist.Work | None = None


class FlatSync(GradientSync):
    """Flat buckets that travel while the backward pass still runs.

    Every `p.grad` is a view of `flat.gradients`, so that nothing is copied. Bucket k starts once it is
    complete and 0 .. k-1 have started: all ranks issue the same collectives in one order, whatever order
    their gradients come in. A parameter that a rank did not use adds zeros.
    """

    def __init__(
        self, model: nn.Module, flat: FlatParameters, *, bucket_size_mb: float, gradient_dtype: torch.dtype
    ):
        super().__init__(model, flat)
        self._is_accumulating, self._num_started = False, 0
        self._buckets: list[_Bucket] = []
        ends: list[int] = []
        for place in flat.buckets(bucket_size_mb * 2**20):
            gradients = flat.message[place]
            wire = gradients if gradient_dtype == gradients.dtype else gradients.to(gradient_dtype)
            self._buckets.append(_Bucket(gradients, wire))
            ends.append(place.stop)
        self._views = flat.views(flat.gradients)
        for name, view in self._views.items():
            bucket = next(
                b for b, end in zip(self._buckets, ends, strict=True) if view.storage_offset() < end
            )
            bucket.num_parameters += 1
            parameter = flat.parameters[name]
            parameter.grad = view
            hook = functools.partial(self._gradient_is_complete, bucket)
            parameter.register_post_accumulate_grad_hook(hook)
        for bucket in self._buckets:
            bucket.missing = bucket.num_parameters

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def finish(self) -> dict[str, Tensor]:
        assert all(self.flat.parameters[name].grad is view for name, view in self._views.items())
        self._start(until=len(self._buckets))
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if bucket.wire is not bucket.gradients:
                    bucket.gradients.copy_(bucket.wire)
            bucket.missing, bucket.work = bucket.num_parameters, None
        self._num_started = 0
        return self.flat.take_told()

    def _gradient_is_complete(self, bucket: _Bucket, _parameter: Tensor) -> None:
        if self._is_accumulating:
            return
        bucket.missing -= 1
        ready = self._num_started
        while ready < len(self._buckets) and self._buckets[ready].missing == 0:
            ready += 1
        self._start(until=ready)

    def _start(self, *, until: int) -> None:
        for bucket in self._buckets[self._num_started : until]:
            if has_group():
                if bucket.wire is not bucket.gradients:
                    bucket.wire.copy_(bucket.gradients)
                bucket.work = dist.all_reduce(bucket.wire, async_op=True)
        self._num_started = max(self._num_started, until)


class DDPSync(GradientSync):
    """torch's DistributedDataParallel, whose gradients are copied into `flat.gradients` at the end of a step.

    Every rank must use every parameter. Needs a process group.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, *, bucket_size_mb: float):
        from torch.nn.parallel import DistributedDataParallel

        known = inspect.signature(DistributedDataParallel).parameters
        sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_size_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{sync_buffers: False},  # the puzzle table is a buffer; the name changed with torch 2.13
        )
        wrapped.register_comm_hook(None, _sum_bucket)
        super().__init__(wrapped, flat)
        self._views = flat.views(flat.gradients)

    def zero(self) -> None:
        super().zero()
        for parameter in self.flat.parameters.values():
            parameter.grad = None  # DDP hands out views of its own buckets

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()

    def finish(self) -> dict[str, Tensor]:
        all_reduce_sum_(self.flat.told)
        parameters = [self.flat.parameters[name] for name in self._views]
        torch._foreach_copy_(list(self._views.values()), [parameter.grad for parameter in parameters])
        for parameter, view in zip(parameters, self._views.values(), strict=True):
            parameter.grad = view
        return self.flat.take_told()


def _sum_bucket(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums a bucket over ranks, where DDP by itself would take the mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def build_gradient_sync(
    model: nn.Module,
    flat: FlatParameters,
    *,
    sync: str = "flat",
    bucket_size_mb: float | str = "auto",
    gradient_dtype: str = "float32",
) -> GradientSync:
    """Builds what the config's `sync` names: flat or ddp; without a process group it is flat.

    All ranks call it, inside the process group if there is one.
    """
    if bucket_size_mb == "auto":
        is_nccl = has_group() and flat.weights.is_cuda and dist.is_nccl_available()
        bucket_size_mb = _AUTO_BUCKET_MB["nccl" if is_nccl else "gloo"]
    if sync == "ddp" and has_group():
        return DDPSync(model, flat, bucket_size_mb=bucket_size_mb)
    return FlatSync(model, flat, bucket_size_mb=bucket_size_mb, gradient_dtype=getattr(torch, gradient_dtype))
