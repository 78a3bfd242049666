"""Numbers of each rank, such as the loss, that are summed over ranks, like the gradients."""

from collections.abc import Sequence

from torch import Tensor

from distributed.collectives import Ranks


class Scalars:
    """Numbers of each rank, such as the loss, that are summed over ranks when the gradients are.

    With local_steps > 1, they are summed when the weights are merged.

    Attributes:
        values: Tensor [names, ranks]. Each rank writes only to its own column, and the other columns are 0.
            The sum over ranks then contains the numbers of every rank.
        is_closed: Whether `add` is forbidden, because the numbers may already be sent.
    """

    def __init__(self, names: Sequence[str], values: Tensor, ranks: Ranks):
        self._names, self.values, self._ranks, self.is_closed = tuple(names), values, ranks, False

    def add(self, **numbers: float | Tensor) -> None:
        """Adds values to this rank's named sums. Example: `add(loss=0.5)` adds 0.5 to the sum "loss".

        If gradients are sent as bfloat16 (config key sync_dtype), the sums are rounded to bfloat16 when they
        are sent.
        """
        assert not self.is_closed, f"{', '.join(numbers)}: too late, the scalars may already be sent"
        for name, number in numbers.items():
            self.values[self._names.index(name), self._ranks.index] += number

    def pop(self) -> dict[str, Tensor]:
        """Returns {name: value of every rank, [ranks]}, and resets the values to 0.

        Call it after the sum over ranks. Before that, the values of other ranks are 0.
        """
        values = self.values.clone()
        self.values.zero_()
        return dict(zip(self._names, values, strict=True))
