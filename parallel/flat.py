"""The dense parameters side by side in memory.

`FlatParameters` decides the order once; whatever belongs to a parameter (weight, gradient, moments, average)
is at the same place of a buffer of its own. So one message, or one kernel, takes many parameters at once.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from parallel.collectives import all_gather_flat_, has_group
from parallel.process_group import rank, world_size
from parallel.shards import Slice, spread
from parallel.shared_memory import SharedTensors, open_shared_tensors

_ALIGNMENT = 16  # elements: every parameter starts on a boundary that vectorised kernels like
_SHARE_ALIGNMENT = (
    1024  # elements: kernels that end there round as those that go on (the rest of a vector does not)
)
_FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early


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
    messages_of_ranks, weights_of_ranks: `message` and `padded` of all ranks, in memory that these share; None
    unless `in_shared_memory`, which all ranks give together, and where the system does not let them.
    share: the range of the buffers that is this rank's, where something is spread over ranks (`shares`).
    share_size: the length of each, but that the last ones are cut short where the buffers end.
    padded: [share_size * number of ranks], the memory of the weights.

    names_told: of the numbers in `told`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        names_told: Sequence[str] = (),
        *,
        in_shared_memory: bool = False,
    ):
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

        num_gradients = self.size if first.requires_grad else 0
        num_told = len(names_told) * world_size()
        num_behind = -(-max(1, num_told) // self._alignment) * self._alignment

        def zeros(size: int) -> tuple[SharedTensors | None, Tensor]:
            shared = open_shared_tensors(size, first.dtype) if in_shared_memory else None
            return shared, first.new_zeros(size) if shared is None else shared.mine

        self.messages_of_ranks, self.message = zeros(num_gradients + num_behind)
        self.weights_of_ranks, self.padded = zeros(self.share_size * world_size())
        self.weights = self.padded[: self.size]
        for name, view in self.views(self.weights).items():
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view
        self.gradients, behind_gradients = self.message[:num_gradients], self.message[num_gradients:]
        self.told = behind_gradients[:num_told].view(len(names_told), world_size())
        self._names_told = tuple(names_told)

    def attach_gradients(self) -> dict[str, Tensor]:
        """Makes every parameter's `grad` its part of `gradients`; returns these by name."""
        views = self.views(self.gradients)
        for name, view in views.items():
            self.parameters[name].grad = view
        return views

    def check_gradients(self, views: dict[str, Tensor]) -> None:
        """Asserts that nobody has given a parameter another `grad` than what was attached."""
        assert all(self.parameters[name].grad is view for name, view in views.items())

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
