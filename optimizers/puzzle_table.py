"""The table of puzzle embeddings: update of the rows, and distribution over ranks.

A training step updates only the rows that its slots use. The update is weight decay, then a step against the
sign of the gradient. If a gradient is 0, the row only decays. The gradients are summed over all ranks, except
with local_steps > 1. There are two kinds of tables. `Replicated`: every rank holds all rows. `RowsByOwner`:
the ranks that divide the batch also divide the rows (`distributed.shards.rows_of_rank`). With `RowsByOwner`,
each rank gets the rows that its slots need from the other ranks, before the forward pass.

Invariant: before a row changes, its old value is added to its average (`optimizers.average`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from config.schema import PretrainConfig
from distributed.collectives import AllToAllPlan, Ranks
from distributed.shards import Tensors, rows_of_rank, shard_of_rows, slots_of
from optimizers.average import Average, RowAverage

_PIECE = 2**16  # rows in one message, at most


def sign_sgd_rows_(table: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, weight_decay: float) -> None:
    """Applies sign SGD with weight decay to some rows of a table, in place.

        row = (1 - lr * weight_decay) * row - lr * sign(gradient)

    rows: Row numbers, [n]. gradients: Gradients of these rows, [n, ndim]. If a row number is repeated, all
    repeats must have the same gradient. The row is then updated once.
    """
    moved = table[rows].mul_(1 - lr * weight_decay)
    table[rows] = moved.sub_(gradients.sign().to(table.dtype), alpha=lr)


def sum_by_identifier(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the gradients of each puzzle embedding. Returns (identifiers [m], sums [m, ndim]).

    The returned identifiers are distinct and in ascending order. Sums are float64 (float32 on mps), so that
    the sign of a sum does not depend on the order of the gradients.

    identifiers: For each gradient, the row of its puzzle embedding, integers [n], with repeats. gradients:
    [n, ndim].
    """
    wide = torch.float32 if gradients.device.type == "mps" else torch.float64
    distinct, index = torch.unique(identifiers, return_inverse=True)
    sums = torch.zeros(len(distinct), gradients.shape[1], dtype=wide, device=gradients.device)
    return distinct, sums.index_add_(0, index, gradients.to(wide))


def sum_with_repeats(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the gradients of each puzzle embedding. The result repeats identifiers as often as the input.

    Returns (identifiers [n], sums [n, ndim]), with the identifiers in ascending order. Each repeat of an
    identifier has the same sum. Sums are float64. The shapes of the result do not depend on the values of the
    input, so the host does not wait for the GPU.

    identifiers: For each gradient, the row of its puzzle embedding, integers [n]. gradients: [n, ndim].
    """
    rising, order = identifiers.sort(stable=True)
    index = (rising.diff(prepend=rising[:1]) != 0).cumsum(0)  # index among the distinct identifiers
    sums = torch.zeros(len(rising), gradients.shape[1], dtype=torch.float64, device=gradients.device)
    return rising, sums.index_add_(0, index, gradients[order].double())[index]


def _sum_rows(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    return (sum_with_repeats if gradients.is_cuda else sum_by_identifier)(identifiers, gradients)


class PuzzleTable:
    """Interface of the table of puzzle embeddings and its optimizer.

    Row i of the table is the puzzle embedding (learned vector) of the puzzles with the puzzle identifier i.
    The methods of this base class do nothing, for models without puzzle embeddings.
    """

    average = Average()  # moving average (EMA) of the embeddings

    def prepare(self, identifiers: Tensor) -> None:
        """Makes the puzzle embeddings that a training step will read available on this rank.

        All ranks call it before the forward pass.

        identifiers: Puzzle identifiers of this rank's slots, int [n], with repeats.
        """

    def reduce(self, *, step: int) -> None:
        """Sums the gradients of training step `step` over ranks, for `update_`. All ranks call it."""

    def keep_own(self, *, step: int) -> None:
        """Stores this rank's gradients for `update_`. Does not communicate.

        With local_steps > 1, call `keep_own` instead of `reduce`.

        step: Number of the first training step after the last call of `merge`.
        """

    def update_(self, lr: float) -> None:
        """Updates the puzzle embeddings that this training step used. Does not communicate.

        Uses the gradients of the last call of `reduce`, or of `keep_own` with local_steps > 1.
        """

    def merge(self, *, step: int) -> None:
        """Makes the puzzle embeddings equal on all ranks, with local_steps > 1. All ranks call it.

        If some ranks have changed an embedding since the last call of `merge`, it becomes the mean of the
        values on these ranks.

        step: Number of the first training step after the last call of `merge`.
        """

    def fetch(self, identifiers: Tensor) -> None:
        """Makes the puzzle embeddings that an evaluation will read available on this rank. All ranks call it.

        identifiers: Puzzle identifiers of all examples that this rank will read, int [n], may repeat.
        """

    def fill_(self, weights: dict[str, Tensor]) -> None:
        """If ranks divide the puzzle embeddings, overwrites them with those in `weights`. All ranks call it.

        If every rank holds all embeddings, nothing changes: the caller broadcasts the embeddings itself.

        weights: On rank 0, {name: full weight}, with all puzzle embeddings. On other ranks, {}. Rank 0 sends
        the embeddings.
        """

    def tensors(self) -> Tensors:
        """Returns the puzzle embeddings on this rank for a checkpoint, as {name: tensor or shard}."""
        return {}


class _Table(PuzzleTable):
    """The base class of `Replicated` and `RowsByOwner`, two tables of puzzle embeddings.

    A row of a table is a puzzle embedding. Each rank owns some rows, and computes their moving averages. A
    subclass implements:

    - `_identifiers_of(rows)`: converts row numbers on this rank to row numbers in the full table.
    - `owned_weights()`: returns a view of the rows that this rank owns.
    - `all_gather_owned(owned)`: `owned` is a tensor with one row for each row that this rank owns, such as
      the moving averages. Returns a tensor with one row for each row in the memory of this rank: in
      `Replicated` all rows, in `RowsByOwner` only the owned rows. All ranks call it.

    embedding: Module with the rows on this rank, [rows, ndim]. num_rows: Number of rows of the full table.
    ranks: Group of the ranks that divide the batch.
    """

    def __init__(self, embedding: nn.Module, num_rows: int, ranks: Ranks, *, weight_decay: float):
        self.embedding, self.num_rows, self.ranks = embedding, num_rows, ranks
        self.name = embedding.weights_name
        self._weight_decay, self._step = weight_decay, 1

    @torch.no_grad()
    def update_(self, lr: float) -> None:
        rows, gradients = self._gradients
        self.average.before_change(self._identifiers_of(rows), step=self._step)
        sign_sgd_rows_(self.embedding.weights, rows, gradients, lr=lr, weight_decay=self._weight_decay)


class Replicated(_Table):
    """A table of puzzle embeddings with all rows on every rank.

    With local_steps=1, the rows are equal on all ranks after each training step. With local_steps > 1, ranks
    train separately, and the rows are equal only after each `merge`.

    embedding: Module with the rows, [num_rows, ndim]. slot_counts: Number of slots of each rank, one entry
    for each of `ranks`.
    """

    def __init__(
        self,
        embedding: nn.Module,
        num_rows: int,
        ranks: Ranks,
        *,
        weight_decay: float,
        slot_counts: Sequence[int],
    ):
        super().__init__(embedding, num_rows, ranks, weight_decay=weight_decay)
        self._slot_counts = slot_counts
        self._moved: list[Tensor] = []  # identifiers of the rows that local steps of this rank updated

    @torch.no_grad()
    def reduce(self, *, step: int) -> None:
        self._step = step
        identifiers, rows = self.embedding.pop_gradients()
        assert len(rows) == self._slot_counts[self.ranks.index], (
            "expected one gradient row for each slot. A model must call `embed` once in a thinking step, and "
            "compute the answer from a state that is not detached."
        )
        gathered = self.ranks.all_gather_numbered_rows(identifiers.long(), rows, self._slot_counts)
        self._gradients = _sum_rows(*gathered)

    @torch.no_grad()
    def keep_own(self, *, step: int) -> None:
        self._step = step
        identifiers, rows = self.embedding.pop_gradients()
        self._gradients = _sum_rows(identifiers.long(), rows)
        self._moved.append(self._gradients[0])

    @torch.no_grad()
    def merge(self, *, step: int) -> None:
        # A row that some ranks have changed becomes the mean of its values on these ranks.
        weights, moved = self.embedding.weights, torch.cat(self._moved).unique()
        self._moved.clear()
        counts = self.ranks.all_gather_counts(len(moved), device=weights.device)
        identifiers, rows = self.ranks.all_gather_numbered_rows(moved, weights[moved], counts)
        distinct, sums = sum_by_identifier(identifiers, rows)
        num_movers = identifiers.unique(return_counts=True)[1]
        self.average.before_change(distinct, step=step)
        weights[distinct] = (sums / num_movers[:, None]).to(weights.dtype)

    def tensors(self) -> Tensors:
        return {self.name: self.embedding.weights}

    def _identifiers_of(self, rows: Tensor) -> Tensor:
        return rows

    def owned_weights(self) -> Tensor:
        return self.embedding.weights[self.ranks.index :: self.ranks.size]

    def all_gather_owned(self, owned: Tensor) -> Tensor:
        if not self.ranks.is_distributed:
            return owned
        # One broadcast for each rank needs little extra memory.
        full = owned.new_empty(self.num_rows, *owned.shape[1:])
        for index in range(self.ranks.size):
            num_owned = len(rows_of_rank(self.num_rows, index, self.ranks.size))
            rows = owned if index == self.ranks.index else owned.new_empty(num_owned, *owned.shape[1:])
            if num_owned:
                self.ranks.broadcast_([rows], source=index)
                full[index :: self.ranks.size] = rows
        return full


class RowsByOwner(_Table):
    """A table of puzzle embeddings with each row on only one of `ranks`, its owner.

    In each training step, a rank gets the rows that it needs from their owners, and sends the gradients of
    these rows back to the owners.
    """

    def __init__(self, embedding: nn.Module, num_rows: int, ranks: Ranks, *, weight_decay: float):
        super().__init__(embedding, num_rows, ranks, weight_decay=weight_decay)
        nothing = torch.zeros(0, dtype=torch.int64, device=embedding.weights.device)
        embedding.read_from(nothing, embedding.weights[nothing])

    def prepare(self, identifiers: Tensor) -> None:
        distinct = torch.unique(identifiers.long())
        self._plan = AllToAllPlan(distinct, self.ranks)
        self.embedding.read_from(distinct, self._plan.fetch(self.embedding.weights))

    @torch.no_grad()
    def reduce(self, *, step: int) -> None:
        self._step = step
        identifiers, rows = self.embedding.pop_gradients()
        distinct, sums = sum_by_identifier(identifiers, rows)
        assert len(distinct) == self._plan.num_rows
        self._gradients = _sum_rows(self._plan.local_rows, self._plan.send(sums))

    def fetch(self, identifiers: Tensor) -> None:
        distinct, weights = torch.unique(identifiers.long()), self.embedding.weights
        rows = weights.new_empty(len(distinct), weights.shape[1])
        counts = self.ranks.all_gather_counts(len(distinct), device=weights.device)
        for begin in range(0, max(counts), _PIECE):  # several messages keep the extra memory small
            piece = slice(begin, begin + _PIECE)
            rows[piece] = AllToAllPlan(distinct[piece], self.ranks).fetch(weights)
        self.embedding.read_from(distinct, rows)

    def fill_(self, weights: dict[str, Tensor]) -> None:
        table, local_rows = weights.get(self.name), self.embedding.weights
        index, size = self.ranks.index, self.ranks.size
        for begin in range(0, self.num_rows, _PIECE):
            end = min(begin + _PIECE, self.num_rows)
            piece = local_rows.new_empty(end - begin, local_rows.shape[1])
            if table is not None:
                piece.copy_(table[begin:end])
            self.ranks.broadcast_([piece])
            owned = slice(*(len(rows_of_rank(edge, index, size)) for edge in (begin, end)))
            local_rows[owned] = piece[(index - begin) % size :: size]

    def tensors(self) -> Tensors:
        owned = rows_of_rank(self.num_rows, self.ranks.index, self.ranks.size)
        return {self.name: shard_of_rows(self.embedding.weights, owned, self.num_rows, self.ranks)}

    def _identifiers_of(self, rows: Tensor) -> Tensor:
        return rows * self.ranks.size + self.ranks.index

    def owned_weights(self) -> Tensor:
        return self.embedding.weights

    def all_gather_owned(self, owned: Tensor) -> Tensor:
        return owned


def build_table(
    config: PretrainConfig, embedding: nn.Module | None, num_rows: int, ranks: Ranks
) -> PuzzleTable:
    """Creates the table of puzzle embeddings that the config selects.

    embedding: Module with the embeddings on this rank. If None, the methods of the result do nothing.
    num_rows: Number of puzzle identifiers. Each identifier has one row. ranks: Group of the ranks that divide
    the batch.
    """
    if embedding is None:
        return PuzzleTable()
    decay = config.puzzle_emb_weight_decay
    if _is_sharded(config, ranks):
        table = RowsByOwner(embedding, num_rows, ranks, weight_decay=decay)
    else:
        members = (Ranks(index, ranks.size) for index in range(ranks.size))
        counts = [len(slots_of(member, config.global_batch_size)) for member in members]
        table = Replicated(embedding, num_rows, ranks, weight_decay=decay, slot_counts=counts)
    if config.ema is not None:
        table.average = RowAverage(table, rate=config.ema, corrects_bias=config.ema_bias_correction)
    return table


def num_local_rows(config: PretrainConfig, num_rows: int, ranks: Ranks) -> int:
    """Returns how many of the `num_rows` puzzle embeddings this rank must hold.

    With puzzle_emb_sharding=rows and several ranks, each rank holds only a part of the embeddings. Otherwise,
    each rank holds all.
    """
    return len(rows_of_rank(num_rows, ranks.index, ranks.size)) if _is_sharded(config, ranks) else num_rows


def _is_sharded(config: PretrainConfig, ranks: Ranks) -> bool:
    return config.puzzle_emb_sharding == "rows" and ranks.size > 1
