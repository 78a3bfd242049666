"""Sign-SGD for the puzzle embeddings of all ranks.

Only the rows used in a step move, each by the sign of its gradient, summed over all ranks.
"""

import torch
from torch import Tensor

from parallel.collectives import all_gather_counts, all_gather_numbered_rows
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


def _sum_rows(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    return (sum_with_repeats if gradients.is_cuda else sum_by_identifier)(identifiers, gradients)


def sign_sgd_rows_(
    table: Tensor, identifiers: Tensor, gradients: Tensor, *, lr: float, weight_decay: float
) -> None:
    """Updates rows of `table` in place: row *= 1 - lr wd; row -= lr sign(gradient).

    identifiers: [n], where equal ones have equal gradients; gradients: [n, ndim].
    """
    rows = table[identifiers].mul_(1 - lr * weight_decay)
    table[identifiers] = rows.sub_(gradients.sign().to(table.dtype), alpha=lr)


def _round_up(count: int) -> int:
    """Returns the next number of at most 8 significant bits, less than 1 % above."""
    unit = 2 ** max(0, count.bit_length() - 8)
    return -(-count // unit) * unit


def _pad(identifiers: Tensor, sums: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
    """Repeats the first identifier, with sums of 0, up to a length that is the same on all ranks."""
    missing = length - len(identifiers)
    padding = identifiers[:1].expand(missing), sums.new_zeros(missing, sums.shape[1])
    return torch.cat([identifiers, padding[0]]), torch.cat([sums, padding[1]])


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
        self._moved: list[Tensor] = []  # identifiers of the rows that this rank alone has moved

    def num_distinct(self) -> int:
        """Counts the rows that the forward passes of this rank have used, each once.

        Rounded up to 8 significant bits, which a message of any dtype holds. 0 on CUDA, where the host would
        have to wait for the number, and does without.
        """
        identifiers = self._embedding.identifiers_used()
        return 0 if identifiers.device.type == "cuda" else _round_up(len(torch.unique(identifiers)))

    @torch.no_grad()
    def all_gather_gradients(self, nums_distinct: Tensor | None = None) -> None:
        """After the backward pass, on all ranks: collects what all of them have for the next `step`.

        All have as many slots, and send one message. Where identifiers repeat on the ranks, each travels
        once, with its sum; but a sum is float64, twice as long as a row, so that rows travel as they are
        where that is less, and always on CUDA. The result is the same.

        nums_distinct: `num_distinct` of all ranks before the backward pass, [ranks], where they know it.
        """
        on_cuda = self._embedding.weights.is_cuda
        if nums_distinct is None and not on_cuda:
            nums_distinct = torch.tensor(all_gather_counts(self.num_distinct(), device=torch.device("cpu")))
        identifiers, rows = self._embedding.collect_gradients()
        if not on_cuda and 0 < _SUM_LENGTH * (length := int(nums_distinct.max())) < len(rows):
            identifiers, rows = _pad(*sum_by_identifier(identifiers, rows), length=length)
        self._gradients = _sum_rows(*all_gather_numbered_rows(identifiers.long(), rows))

    @torch.no_grad()
    def take_own_gradients(self) -> None:
        """Collects what this rank alone has for the next `step`: its table is its own until `join_rows`."""
        identifiers, rows = self._embedding.collect_gradients()
        self._gradients = _sum_rows(identifiers.long(), rows)
        self._moved.append(self._gradients[0])

    @torch.no_grad()
    def all_gather_own_rows(self) -> None:
        """Collects for `join_rows` what each rank has made of its rows; all ranks call it, of equal tables.

        A row that several have moved becomes the mean of theirs, in float64.
        """
        table, mine = self._embedding.weights, torch.cat(self._moved).unique()
        self._moved.clear()
        (counts,) = all_gather_counts(len(mine), device=table.device)
        identifiers, rows = all_gather_numbered_rows(mine, table[mine], counts)
        distinct, sums = sum_by_identifier(identifiers, rows)
        movers = identifiers.unique(return_counts=True)[1]
        self._gradients = distinct, sums / movers[:, None]

    @torch.no_grad()
    def join_rows(self) -> None:
        """Makes the tables of all ranks equal again."""
        identifiers, rows = self._gradients
        self._embedding.weights[identifiers] = rows.to(self._embedding.weights.dtype)

    @torch.no_grad()
    def send_gradients(self) -> None:
        """After the backward pass, on all ranks: sends the sum of each row that was fetched to its owner.

        The owner has what all ranks sent for the next `step`, added up in their order.
        """
        identifiers, rows = self._embedding.collect_gradients()
        _, sums = sum_by_identifier(identifiers, rows)
        self._gradients = _sum_rows(*self._owners.send_sums(sums))

    @property
    def changing_rows(self) -> Tensor:
        """The identifiers of the rows here that are about to move: int64 [n]; on CUDA with repeats.

        The same on all ranks, unless gradients are this rank's own, or rows live on one rank alone.
        """
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
