"""The dense parameters side by side in memory.

`FlatParameters` decides the order once; whatever belongs to a parameter (weight, gradient, moments, average)
is in the same range of a buffer of its own. So one message, or one kernel, takes many parameters at once.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel.collectives import ALONE, Ranks
from parallel.shards import Shard, Span, Tensors, tensor_of
from parallel.shared_memory import SharedTensors, open_shared_tensors
from parallel.tensor import Cut

_ALIGNMENT = 16  # elements: every parameter starts on a boundary that vectorised kernels like
# Elements: kernels that end there round as if they went on (the rest of a vector does not).
_SHARE_ALIGNMENT = 1024
_FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early


class Scalars:
    """Named numbers of each rank that all ranks come to know: [names, ranks], in the memory of a message.

    A rank adds to its own column alone, so that the sum over ranks has the numbers of all. is_closed: whether
    it is too late to add, as the message may have left.
    """

    def __init__(self, names: Sequence[str], values: Tensor, ranks: Ranks):
        self._names, self.values, self._ranks, self.is_closed = tuple(names), values, ranks, False

    def add(self, **numbers: float | Tensor) -> None:
        """Adds to the numbers of this rank; exact where 8 significant bits are enough (bfloat16)."""
        assert not self.is_closed, f"{', '.join(numbers)}: the message that carries the scalars may have left"
        for name, number in numbers.items():
            self.values[self._names.index(name), self._ranks.index] += number

    def pop(self) -> dict[str, Tensor]:
        """Returns the numbers of all ranks by name, [ranks] each, after the message; all begin anew."""
        values = self.values.clone()
        self.values.zero_()
        return dict(zip(self._names, values, strict=True))


class Pieces:
    """Memory for some ranges of the flat buffers alone.

    ranges: rising, apart from each other. buffers: [length of the range] each.
    """

    def __init__(self, ranges: Sequence[slice], buffers: Sequence[Tensor]):
        self.ranges, self.buffers = tuple(ranges), tuple(buffers)

    def at(self, part: slice) -> Tensor:
        """Returns the memory of a part of one of the ranges."""
        for each, buffer in zip(self.ranges, self.buffers, strict=True):
            if each.start <= part.start and part.stop <= each.stop:
                return buffer[part.start - each.start : part.stop - each.start]
        raise AssertionError(f"{part} is not within one of {self.ranges}")


class FlatParameters:
    """The owner of the order of parameters in memory, and of the buffers for weights and gradients.

    The order is the reverse of registration, about the order in which a backward pass completes gradients,
    but what has no weight decay is behind all others, from a multiple of 1024 on.
    Every parameter starts at a multiple of 16 and of the number of ranks. The gaps hold zeros; only kernels
    that take whole ranges write there, and these make zeros of zeros.

    The update may be shared (ZeRO-1, arXiv 1910.02054): each sharer updates a range, and gets the other
    weights from the others. And what is updated may be wider than what the forward pass reads (mixed
    precision, arXiv 1710.03740): float32 masters exist for this rank's share alone, and 2 bytes of each
    weight travel. Weights outside of `spread` then stay float32, and every rank updates all of them.

    parameters: by name, in the order of the buffers; of one dtype and on one device.
    weights: [size] in `compute_dtype`; the data of each spread parameter is a view of it from here on.
    masters: what this rank updates; a view of `weights` where the dtypes are equal.
    gradients: [size], zeros at first; [0] where the parameters need no gradient.
    scalars: right behind the gradients, in the last message of these.
    message: the memory of gradients and scalars.
    messages_of_ranks, weights_of_ranks: `message` and `weights` of all ranks, in memory that the ranks share
    (`message` also where those of each node share it);
    None without `in_shared_memory`, which is equal on all ranks, or where the system has no such memory.
    shares: the range of each sharer; the last ones may be short or empty. share: this rank's.
    kept: the ranges that this rank updates: its share, and all that is not spread.

    ranks: that sum the gradients of these parameters. sharers: those among them that share the update; None:
    all, if there is memory that the ranks share, else every rank updates everything. scalar_names: of
    `scalars`. undecayed: names of parameters without weight decay; not all need be here. unsplit: names of
    matrices that one rank updates as a whole. spread: names of parameters that are kept in compute_dtype,
    where that is another one; all, where it is not. is_part: whether other ranks have other parameters of the
    model, so that these are shards of its state. cuts: of parameters that are parts of weights of the model.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        scalar_names: Sequence[str] = (),
        *,
        ranks: Ranks,
        sharers: Ranks | None = ALONE,
        in_shared_memory: bool = False,
        undecayed: Collection[str] = (),
        unsplit: Collection[str] = (),
        spread: Collection[str] = (),
        compute_dtype: torch.dtype | None = None,
        is_part: bool = False,
        cuts: Mapping[str, Cut] | None = None,
    ):
        self.ranks, self.undecayed, self.unsplit, self.is_part = ranks, undecayed, unsplit, is_part
        self.cuts = cuts or {}
        in_reverse = dict(reversed(list(named_parameters)))
        self.parameters = dict(sorted(in_reverse.items(), key=lambda each: each[0] in undecayed))
        first = next(iter(self.parameters.values()))
        for parameter in self.parameters.values():
            assert (parameter.dtype, parameter.device) == (first.dtype, first.device)
            assert parameter.requires_grad == first.requires_grad, "all are trained, or none is"
        self._alignment = math.lcm(_ALIGNMENT, ranks.size)
        self._ranges, self.size = {}, 0
        for name, parameter in self.parameters.items():
            if name in undecayed and not self._ranges.keys() & undecayed:
                edge = math.lcm(_SHARE_ALIGNMENT, ranks.size)
                self.size = -(-self.size // edge) * edge
            length = -(-parameter.numel() // self._alignment) * self._alignment
            self._ranges[name] = slice(self.size, self.size + length)
            self.size += length

        num_gradients = self.size if first.requires_grad else 0
        num_scalars = len(scalar_names) * ranks.size
        num_behind = -(-max(1, num_scalars) // self._alignment) * self._alignment

        def zeros(size: int, dtype: torch.dtype, **where: bool) -> tuple[SharedTensors | None, Tensor]:
            shared = open_shared_tensors(size, dtype, ranks, **where) if in_shared_memory else None
            return shared, first.new_zeros(size, dtype=dtype) if shared is None else shared.own

        dtype = compute_dtype or first.dtype
        self.messages_of_ranks, self.message = zeros(
            num_gradients + num_behind, first.dtype, spans_nodes=True
        )
        length = -(-self.size // (_SHARE_ALIGNMENT * ranks.size)) * _SHARE_ALIGNMENT * ranks.size
        self.weights_of_ranks, self._padded = zeros(length, dtype)
        self.weights = self._padded[: self.size]
        self.gradients, behind_gradients = self.message[:num_gradients], self.message[num_gradients:]
        values = behind_gradients[:num_scalars].view(len(scalar_names), ranks.size)
        self.scalars = Scalars(scalar_names, values, ranks)

        if sharers is None:
            sharers = ALONE if self.weights_of_ranks is None else ranks
        self.sharers, self.is_mixed = sharers, dtype != first.dtype
        self.shares = self._cut()
        self.share = self.shares[sharers.index]
        self._spread = {*spread} & self._ranges.keys() if self.is_mixed else {*self._ranges}
        self.kept = self.around(self.share)
        if self.is_mixed:
            self.masters = self.zeros(self.kept)
        else:
            self.masters = Pieces([slice(0, self.size)], [self.weights])
        self.owned = self._take_over()

    def _take_over(self) -> Tensors:
        """Moves the parameters into the buffers; returns by name what this rank updates, as `owned`."""
        for name, parameter in self.parameters.items():
            value, start = parameter.detach(), self._ranges[name].start
            for each, master in zip(self.masters.ranges, self.masters.buffers, strict=True):
                begin, end = max(start, each.start), min(start + value.numel(), each.stop)
                if begin < end:
                    master[begin - each.start : end - each.start] = value.flatten()[
                        begin - start : end - start
                    ]
            memory = self.weights[start:] if name in self._spread else self.masters.at(self._ranges[name])
            parameter.data = memory[: value.numel()].view(value.shape).copy_(value)
        owned = self.shards(self.masters, self.share)
        for name, part in owned.items():
            parameter, tensor = self.parameters[name], tensor_of(part)
            if self.is_mixed and name in self._spread:
                parameter.grad_dtype = self.message.dtype
            elif isinstance(part, Tensor):
                owned[name] = parameter
                continue
            if isinstance(part, Shard):
                if name in self.unsplit:
                    tensor = tensor.view(parameter.shape[0] if part.spans else 0, *parameter.shape[1:])
                owned[name] = part._replace(tensor=tensor)
            if len(self.gradients):
                tensor.grad = self.gradients[self._part(name, self.share)].view_as(tensor)
        return owned

    def attach_gradients(self) -> dict[str, Tensor]:
        """Makes every parameter's `grad` its part of `gradients`; returns these by name.

        Where the dtypes differ it is so in `gradients_attached` alone.
        """
        views = self.views(self.gradients)
        for name in views.keys() - self._cast:
            self.parameters[name].grad = views[name]
        return views

    @contextlib.contextmanager
    def gradients_attached(self, views: dict[str, Tensor]) -> Iterator[None]:
        """Surrounds a backward pass. At other times torch's compiler would meet gradients of another dtype.

        views: of `attach_gradients`.
        """
        cast = views.keys() & self._cast
        for name in cast:
            self.parameters[name].grad = views[name]
        yield
        assert all(self.parameters[name].grad is views[name] for name in cast)
        for name in cast:
            self.parameters[name].grad = None

    def check_gradients(self, views: dict[str, Tensor]) -> None:
        """Asserts that nobody has given a parameter another `grad` than what was attached."""
        for name, view in views.items():
            assert self.parameters[name].grad is (None if name in self._cast else view)

    @property
    def _cast(self) -> set[str]:
        """Returns the names of the parameters that are in another dtype than their gradients."""
        return self._spread if self.is_mixed else set()

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns each parameter's part, by name and in its shape, of a buffer like these, if not empty."""
        return {
            name: buffer[own.start :][: parameter.numel()].view(parameter.shape)
            for (name, parameter), own in zip(self.parameters.items(), self._ranges.values(), strict=True)
            if own.stop <= len(buffer)
        }

    def shards(self, pieces: Pieces, share: slice, names: Collection[str] | None = None) -> Tensors:
        """Returns what memory that is laid out `around` a share has of the parameters, or of `names` alone.

        Of a spread parameter it is what the share has, maybe nothing; any other is there as a whole.
        """
        shards: Tensors = {}
        # In a small buffer a share may be all of it: what a part is called has to be the same on all ranks.
        is_whole = (self.sharers if share is self.share else self.ranks).size == 1 and not self.is_part
        for name in self.parameters if names is None else names:
            part, begin = self._part(name, share), self._ranges[name].start
            shape, length = tuple(self.parameters[name].shape), part.stop - part.start
            if name not in self._spread or is_whole:
                shards[name] = pieces.at(part).view(shape)
                continue
            spans = (Span(part.start - begin, length),) if length else ()
            if cut := self.cuts.get(name):
                spans, shape = cut.spans(slice(part.start - begin, part.stop - begin)), cut.shape
            is_copy = share is self.share and self.ranks.index >= len(self.shares)
            tensor = pieces.at(part) if length else self.message[:0]
            shards[name] = Shard(tensor, spans, shape, is_copy=is_copy)
        return shards

    def _part(self, name: str, share: slice) -> slice:
        """Returns the range of a parameter without the gap behind it, or of its part in a share."""
        begin = self._ranges[name].start
        end = begin + self.parameters[name].numel()
        if name not in self._spread:
            return slice(begin, end)
        return slice(*(min(max(each, begin), end) for each in (share.start, share.stop)))

    def around(self, share: slice) -> list[slice]:
        """Returns the fewest ranges, rising, that hold a share and all that is not spread.

        These begin and end at multiples of 1024, as kernels round by where in a range a number is.
        """
        rest, unit = self.ranges(self.parameters.keys() - self._spread), _SHARE_ALIGNMENT
        rest = [
            slice(each.start // unit * unit, min(-(-each.stop // unit) * unit, self.size)) for each in rest
        ]
        merged: list[slice] = []
        for each in sorted([share, *rest], key=lambda each: each.start):
            if merged and each.start <= merged[-1].stop:
                merged[-1] = slice(merged[-1].start, max(each.stop, merged[-1].stop))
            elif each.start < each.stop:
                merged.append(each)
        return merged

    def zeros(self, ranges: Sequence[slice]) -> Pieces:
        """Returns memory for these ranges in the gradients' dtype."""
        return Pieces(ranges, [self.message.new_zeros(each.stop - each.start) for each in ranges])

    def kept_of(self, names: Collection[str]) -> list[slice]:
        """Returns the ranges of these parameters that this rank updates."""
        pairs = itertools.product(self.ranges(names), self.kept)
        common = (slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
        return [each for each in common if each.start < each.stop]

    def gather_(self) -> None:
        """Makes of the masters of all sharers the weights that the forward pass reads.

        All ranks call it, after every update.
        """
        if self.is_mixed and self.share.start < self.share.stop:
            self.weights[self.share] = self.masters.at(self.share)
        if self.sharers.size == 1:
            return
        if self.weights_of_ranks is not None:
            self.weights_of_ranks.all_gather_(self.share)
        else:
            self.sharers.all_gather_ranges_(self._padded, self.shares)

    def average_shares(self) -> list[slice]:
        """Returns a range for each rank, all of them apart, that it has the newest weights of."""
        shares = self.shares if self.is_mixed else [slice(0, self.size)]
        number = self.ranks.size // len(shares)
        return [_cut_evenly(share, number)[copy] for copy in range(number) for share in shares]

    def all_gather_views(self, pieces: Pieces, shares: Sequence[slice]) -> dict[str, Tensor]:
        """Joins what each rank has `around` its own of some shares, as the forward pass reads it, by name.

        All ranks call it.
        """
        whole, own = torch.zeros_like(self._padded), shares[self.ranks.index]
        if own.start < own.stop:
            whole[own] = pieces.at(own)
        self.ranks.all_gather_ranges_(whole, shares)
        rest = self.shards(pieces, own, self.parameters.keys() - self._spread)
        return self.views(whole) | rest

    def _cut(self) -> list[slice]:
        """Cuts the buffers into a range for each sharer, as even as `unsplit` parameters allow.

        Parameters between two of these are not cut either, and are rounded as without ranges.
        """
        if not self.unsplit or self.sharers.size == 1:
            return _cut_evenly(slice(0, self.size), self.sharers.size)
        ranges = self.ranges(self.unsplit, joins=False)
        edges = sorted({0, self.size, *(edge for each in ranges for edge in (each.start, each.stop))})
        goals = (self.size * number / self.sharers.size for number in range(self.sharers.size + 1))
        ends = [min(edges, key=lambda edge: abs(edge - goal)) for goal in goals]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def ranges(self, names: Collection[str], *, joins: bool = True) -> list[slice]:
        """Finds the fewest ranges of the buffers that hold these parameters and no others.

        joins: False is one for each parameter.
        """
        ranges: list[slice] = []
        for name, own in self._ranges.items():
            if name not in names:
                continue
            if joins and ranges and ranges[-1].stop == own.start:
                ranges[-1] = slice(ranges[-1].start, own.stop)
            else:
                ranges.append(own)
        return ranges

    def buckets(self, num_bytes: float) -> list[slice]:
        """Cuts `message` into ranges of about `num_bytes`; the first is smaller, the last has the scalars."""
        element_bytes = self.message.element_size()
        buckets: list[slice] = []
        begin = 0
        for own in self._ranges.values() if len(self.gradients) else ():
            limit = num_bytes if buckets else min(num_bytes, _FIRST_BUCKET_BYTES)
            if (own.stop - begin) * element_bytes >= limit or own.stop == self.size:
                buckets.append(slice(begin, own.stop))
                begin = own.stop
        last_begin = buckets.pop().start if buckets else 0
        return [*buckets, slice(last_begin, len(self.message))]


def _cut_evenly(whole: slice, number: int) -> list[slice]:
    """Cuts a range into ranges of equal lengths, multiples of 1024; the last ones may be short or empty."""
    length = -(-(whole.stop - whole.start) // (_SHARE_ALIGNMENT * number)) * _SHARE_ALIGNMENT
    ends = [min(whole.start + each * length, whole.stop) for each in range(number + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
