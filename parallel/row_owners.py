"""A table of which a rank has but the rows that it owns (`parallel.shards.owned_rows`).

What it reads of others is fetched from the owners beforehand, by all ranks together; what it has for a row
goes back the same way.
"""

import torch
from torch import Tensor, nn

from parallel.collectives import all_gather_counts, all_to_all_rows, broadcast_tensors_
from parallel.process_group import rank, world_size
from parallel.shards import Slice, owned_rows

_PIECE = 2**16  # rows that travel at once where there are many


class Route:
    """The way between this rank and the owners of some rows; all ranks build theirs together.

    The host learns how many rows go where: on CUDA it waits for the device.

    identifiers: int64 [n], the rows that this rank is concerned with.
    wanted: int64 [m], those of its own rows, as they are numbered here, that all ranks are concerned with:
    rank 0's first.
    """

    def __init__(self, identifiers: Tensor):
        self.num_rows = len(identifiers)
        owners = identifiers % world_size()
        self._order = owners.argsort(stable=True)
        self._there = torch.bincount(owners, minlength=world_size()).tolist()  # of each owner
        self._here = all_gather_counts(*self._there, device=identifiers.device)[rank()]  # for each rank
        places = identifiers[self._order] // world_size()
        self.wanted = all_to_all_rows(places, sent=self._there, received=self._here)

    def fetch(self, own: Tensor) -> Tensor:
        """Returns the rows of `identifiers`, [n, ...]; own: the rows that live on this rank."""
        arrived = all_to_all_rows(own[self.wanted], sent=self._here, received=self._there)
        return torch.empty_like(arrived).index_copy_(0, self._order, arrived)

    def send(self, rows: Tensor) -> Tensor:
        """Sends a row for each of `identifiers`, [n, ...], to its owner; returns what `wanted` gets."""
        return all_to_all_rows(rows[self._order], sent=self._there, received=self._here)


class RowOwners:
    """The exchange of an embedding's rows with their owners. All ranks call its methods together.

    embedding: its `weights` are the rows of this rank; what its next uses read, `read_from` tells it.
    num_rows: of all ranks.
    """

    def __init__(self, embedding: nn.Module, num_rows: int):
        self._embedding, self.num_rows = embedding, num_rows
        nothing = torch.zeros(0, dtype=torch.int64, device=embedding.weights.device)
        embedding.read_from(nothing, embedding.weights[nothing])

    def fetch(self, identifiers: Tensor) -> None:
        """Fetches the rows of a step, int [n] with repeats, which the embedding then reads."""
        distinct = torch.unique(identifiers.long())
        self._route = Route(distinct)
        self._embedding.read_from(distinct, self._route.fetch(self._embedding.weights))

    def send_sums(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Sends a sum [n, ndim] for each row that was fetched last, by rising identifier, to its owner.

        Returns what arrives here, rank 0's first: for which rows of this rank, int64 [m], with repeats, and
        the sums, [m, ndim].
        """
        assert len(sums) == self._route.num_rows
        return self._route.wanted, self._route.send(sums)

    def fetch_many(self, identifiers: Tensor) -> None:
        """Fetches the rows of an evaluation, in pieces: they take little more memory than their own."""
        distinct, own = torch.unique(identifiers.long()), self._embedding.weights
        rows = own.new_empty(len(distinct), own.shape[1])
        (counts,) = all_gather_counts(len(distinct), device=own.device)
        for begin in range(0, max(counts), _PIECE):
            piece = slice(begin, begin + _PIECE)
            rows[piece] = Route(distinct[piece]).fetch(own)
        self._embedding.read_from(distinct, rows)

    def broadcast_table_(self, table: Tensor | None) -> None:
        """Overwrites the rows of all ranks with those of the whole table [num_rows, ndim] that rank 0 has."""
        own = self._embedding.weights
        for begin in range(0, self.num_rows, _PIECE):
            end = min(begin + _PIECE, self.num_rows)
            piece = own.new_empty(end - begin, own.shape[1])
            if table is not None:
                piece.copy_(table[begin:end])
            broadcast_tensors_([piece])
            here = slice(len(owned_rows(begin)), len(owned_rows(end)))
            own[here] = piece[(rank() - begin) % world_size() :: world_size()]

    def identifiers_of(self, rows: Tensor) -> Tensor:
        """Returns the identifiers of rows of this rank, int64 [n]."""
        return rows * world_size() + rank()

    def slice_of(self, tensor: Tensor) -> Slice:
        """Says which part a tensor [n, ...] of this rank's rows is of that of all rows."""
        return Slice(tensor, owned_rows(self.num_rows), (self.num_rows, *tensor.shape[1:]))
