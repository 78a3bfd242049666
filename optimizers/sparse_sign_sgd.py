"""Sign-SGD for the puzzle embeddings of all ranks.

Only the rows used in a step move, each by the sign of its gradient, summed over all ranks.
"""

import torch
from torch import Tensor

from parallel.collectives import all_gather_counts, all_gather_rows
from parallel.process_group import world_size
from parallel.row_owners import RowOwners

_SUM_LENGTH = 2  # of a float64 sum, in float32 rows


def sum_by_identifier(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct identifiers [n], rising, and for each the sum of its rows, [n, ndim].

    Sums are float64, so that their sign does not depend on the order of the rows (float32 on mps, which has
    no other).
    """
    wide = torch.float32 if gradients.device.type == "mps" else torch.float64
    distinct, place = torch.unique(identifiers, return_inverse=True)
    sums = torch.zeros(len(distinct), gradients.shape[1], dtype=wide, device=gradients.device)
    return distinct, sums.index_add_(0, place, gradients.to(wide))


def sum_with_repeats(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """All identifiers [n], rising, and for each the sum of the rows of its equals: [n, ndim].

    How many are distinct does not matter to any shape, so that a GPU is not waited for.
    """
    rising, order = identifiers.sort(stable=True)
    place = (rising.diff(prepend=rising[:1]) != 0).cumsum(0)  # which of the distinct ones it is
    sums = torch.zeros(len(rising), gradients.shape[1], dtype=torch.float64, device=gradients.device)
    return rising, sums.index_add_(0, place, gradients[order].double())[place]


def sign_sgd_rows_(
    table: Tensor, identifiers: Tensor, gradients: Tensor, *, lr: float, weight_decay: float
) -> None:
    """Updates rows of `table` in place: row *= 1 - lr wd; row -= lr sign(gradient).

    identifiers: [n], where equal ones have equal gradients; gradients: [n, ndim].
    """
    rows = table[identifiers] * (1 - lr * weight_decay)
    table[identifiers] = rows - lr * gradients.sign().to(table.dtype)


class SparseSignSGD(torch.optim.Optimizer):
    """Trains a `PuzzleEmbedding`.

    Every rank ends up with the same table, or with its own rows of it; a step costs by the rows used, not by
    the table.

    owners: of the rows, where each lives on one rank alone.
    """

    def __init__(
        self,
        embedding: torch.nn.Module,
        *,
        lr: float,
        weight_decay: float,
        owners: RowOwners | None = None,
    ):
        super().__init__([embedding.weights], {"lr": lr, "weight_decay": weight_decay})
        self._embedding, self._owners = embedding, owners

    @torch.no_grad()
    def all_gather_gradients(self) -> None:
        """After the backward pass, on all ranks: collects what all of them have for the next `step`.

        All have as many slots. Where identifiers repeat on the ranks, each travels once, with its sum; but a
        sum is float64, twice as long as a row, so that rows travel as they are where that is less. On CUDA
        they always do: to know how many are distinct, the host would have to wait. The result is the same.
        """
        identifiers, rows = self._embedding.collect_gradients()
        on_cuda, counts = rows.device.type == "cuda", [len(rows)] * world_size()
        if not on_cuda:
            num_distinct = len(torch.unique(identifiers))
            (distinct_counts,) = all_gather_counts(num_distinct, device=rows.device)
            if _SUM_LENGTH * max(distinct_counts) < len(rows):
                counts = distinct_counts
                identifiers, rows = sum_by_identifier(identifiers, rows)
        sum_rows = sum_with_repeats if on_cuda else sum_by_identifier
        self._gradients = sum_rows(all_gather_rows(identifiers.long(), counts), all_gather_rows(rows, counts))

    @torch.no_grad()
    def send_gradients(self) -> None:
        """After the backward pass, on all ranks: sends the sum of each row that was fetched to its owner.

        The owner has what all ranks sent for the next `step`, added up in their order.
        """
        identifiers, rows = self._embedding.collect_gradients()
        _, sums = sum_by_identifier(identifiers, rows)
        sum_rows = sum_with_repeats if rows.device.type == "cuda" else sum_by_identifier
        self._gradients = sum_rows(*self._owners.send_sums(sums))

    @property
    def changing_rows(self) -> Tensor:
        """The identifiers of the rows here that the next `step` moves: int64 [n]; on CUDA with repeats."""
        rows, _ = self._gradients
        return rows if self._owners is None else self._owners.identifiers_of(rows)

    @torch.no_grad()
    def step(self) -> None:
        """Moves the rows whose gradients were collected; no rank waits for another."""
        identifiers, gradients = self._gradients
        (group,) = self.param_groups
        sign_sgd_rows_(
            self._embedding.weights,
            identifiers,
            gradients,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )
