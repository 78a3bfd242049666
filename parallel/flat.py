"""The dense parameters side by side in memory.

`FlatParameters` decides the order once; whatever belongs to a parameter (weight, gradient, moments, average)
is in the same range of a buffer of its own. So one message, or one kernel, takes many parameters at once.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from parallel.collectives import Ranks, has_group
from parallel.shards import Run, Tensors, as_shard
from parallel.shared_memory import SharedTensors, open_shared_tensors

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


class FlatParameters:
    """The owner of the order of parameters in memory, and of the buffers for weights and gradients.

    The order is the reverse of registration, about the order in which a backward pass completes gradients,
    but what has no weight decay is behind all others, from a multiple of 1024 on.
    Every parameter starts at a multiple of 16 and of the number of ranks, so that any range of whole
    parameters can be cut into equal parts, one for each rank. The gaps hold zeros; only kernels that take
    whole ranges write there, and these make zeros of zeros.

    parameters: by name, in the order of the buffers; of one dtype and on one device.
    weights: [size]; each parameter's data is a view of it from here on.
    gradients: [size], zeros at first; [0] where the parameters need no gradient.
    scalars: right behind the gradients, in the last message of these.
    message: the memory of gradients and scalars.
    messages_of_ranks, weights_of_ranks: `message` and `padded` of all ranks, in memory that the ranks share
    (`message` also where those of each node share it);
    None without `in_shared_memory`, which is equal on all ranks, or where the system has no such memory.
    share: the range of the buffers that is this rank's, where something is sharded (`shares`).
    share_size: the length of each share; the last ones are cut short where the buffers end.
    padded: [share_size * number of ranks], the memory of the weights.

    ranks: that hold these parameters. scalar_names: of `scalars`.
    undecayed: names of parameters without weight decay; not all need be here.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        scalar_names: Sequence[str] = (),
        *,
        ranks: Ranks,
        in_shared_memory: bool = False,
        undecayed: Collection[str] = (),
    ):
        self.ranks, self.undecayed = ranks, undecayed
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
        self.share_size = -(-self.size // (_SHARE_ALIGNMENT * ranks.size)) * _SHARE_ALIGNMENT
        self.share = self.shares()[ranks.index]

        num_gradients = self.size if first.requires_grad else 0
        num_scalars = len(scalar_names) * ranks.size
        num_behind = -(-max(1, num_scalars) // self._alignment) * self._alignment

        def zeros(size: int, **where: bool) -> tuple[SharedTensors | None, Tensor]:
            shared = open_shared_tensors(size, first.dtype, ranks, **where) if in_shared_memory else None
            return shared, first.new_zeros(size) if shared is None else shared.own

        self.messages_of_ranks, self.message = zeros(num_gradients + num_behind, spans_nodes=True)
        self.weights_of_ranks, self.padded = zeros(self.share_size * ranks.size)
        self.weights = self.padded[: self.size]
        for name, view in self.views(self.weights).items():
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view
        self.gradients, behind_gradients = self.message[:num_gradients], self.message[num_gradients:]
        values = behind_gradients[:num_scalars].view(len(scalar_names), ranks.size)
        self.scalars = Scalars(scalar_names, values, ranks)

    def attach_gradients(self) -> dict[str, Tensor]:
        """Makes every parameter's `grad` its part of `gradients`; returns these by name."""
        views = self.views(self.gradients)
        for name, view in views.items():
            self.parameters[name].grad = view
        return views

    def check_gradients(self, views: dict[str, Tensor]) -> None:
        """Asserts that nobody has given a parameter another `grad` than what was attached."""
        assert all(self.parameters[name].grad is view for name, view in views.items())

    def views(self, buffer: Tensor, *, begin: int = 0) -> dict[str, Tensor]:
        """Returns each parameter's part, by name and in its shape, of a buffer laid out like these.

        begin: where a buffer of only a range begins; names outside of the range are left out.
        """
        return {
            name: buffer[own.start - begin :][: parameter.numel()].view(parameter.shape)
            for (name, parameter), own in zip(self.parameters.items(), self._ranges.values(), strict=True)
            if begin <= own.start and own.stop <= begin + len(buffer)
        }

    def shards(self, buffer: Tensor, *, begin: int) -> Tensors:
        """Returns what a buffer of a range that begins at `begin` has of each parameter, maybe nothing.

        In a world of one the buffer is of everything, and the result is `views`.
        """
        shards = {}
        for (name, parameter), own in zip(self.parameters.items(), self._ranges.values(), strict=True):
            first, end = own.start, own.start + parameter.numel()
            start, stop = (min(max(each, first), end) for each in (begin, begin + len(buffer)))
            part = buffer[max(start - begin, 0) :][: stop - start]
            runs = (Run(start - first, stop - start),) if start < stop else ()
            shards[name] = as_shard(part, runs, tuple(parameter.shape), self.ranks)
        return shards

    def shares(self) -> list[slice]:
        """Returns the range of the buffers that is each rank's; the last ones may be empty."""
        ends = [min(number * self.share_size, self.size) for number in range(self.ranks.size + 1)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def all_gather_shares(self, share: Tensor) -> Tensor:
        """Joins the shares of all ranks, [share_size] each, into a buffer laid out like these.

        All ranks call it.
        """
        if not has_group():
            return share
        whole = share.new_empty(self.share_size * self.ranks.size)
        self.ranks.all_gather_flat_(whole, share)
        return whole

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
