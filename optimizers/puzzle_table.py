"""The puzzle table: how its rows move, where they live on ranks, and their average.

Only the rows used in a step move, each by the sign of its gradient, summed over all ranks. `Replicated`:
every rank has all rows. `RowsByOwner`: each rank has its own (`rows_of_rank`), and fetches before a step what
it reads of others. `NoTable` stands where the model has none.

Invariant: the average takes in the old value of a row before the row moves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from config.schema import PretrainConfig
from optimizers.average import NoAverage
from parallel.collectives import AllToAllPlan, Ranks, has_group
from parallel.shards import Shard, Tensors, shard_of_rows, slots_of

_SUM_LENGTH = 2  # of a float64 sum, in float32 rows
_PIECE = 2**16  # rows that travel at once where there are many


def sign_sgd_rows_(table: Tensor, rows: Tensor, gradients: Tensor, *, lr: float, weight_decay: float) -> None:
    """Updates rows of `table` in place: row *= 1 - lr wd; row -= lr sign(gradient).

    rows: their numbers, [n], where equal ones have equal gradients; gradients: [n, ndim].
    """
    moved = table[rows].mul_(1 - lr * weight_decay)
    table[rows] = moved.sub_(gradients.sign().to(table.dtype), alpha=lr)


def sum_by_identifier(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct identifiers [n], rising, and for each the sum of its rows, [n, ndim].

    Sums are float64, so that their sign does not depend on the order of the rows (float32 on mps, which has
    no other).
    """
    wide = torch.float32 if gradients.device.type == "mps" else torch.float64
    distinct, index = torch.unique(identifiers, return_inverse=True)
    sums = torch.zeros(len(distinct), gradients.shape[1], dtype=wide, device=gradients.device)
    return distinct, sums.index_add_(0, index, gradients.to(wide))


def sum_with_repeats(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all identifiers [n], rising, and for each the sum of the rows of its equals: [n, ndim].

    How many are distinct does not matter to any shape, so that a GPU is not waited for.
    """
    rising, order = identifiers.sort(stable=True)
    index = (rising.diff(prepend=rising[:1]) != 0).cumsum(0)  # which of the distinct ones it is
    sums = torch.zeros(len(rising), gradients.shape[1], dtype=torch.float64, device=gradients.device)
    return rising, sums.index_add_(0, index, gradients[order].double())[index]


def _sum_rows(identifiers: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    return (sum_with_repeats if gradients.is_cuda else sum_by_identifier)(identifiers, gradients)


def rows_of_rank(num_rows: int, index: int, size: int) -> range:
    """Returns the rows that rank `index` of `size` owns: identifiers equal to it modulo the number of ranks.

    Row i of the whole is row i // size of its owner's.
    """
    return range(index, num_rows, size)


class NoTable:
    """The absence of a puzzle table; and the interface of the homes that a table may have.

    is_spread: whether a rank has but a part of the rows. num_distinct: how many rows the slots of this rank
    use in a step, each counted once; 0: not counted. average: of the rows.
    """

    is_spread = False
    num_distinct = 0
    average = NoAverage()

    def prefetch(self, identifiers: Tensor) -> None:
        """Gets the rows that the slots of a step read, int [n] with repeats; all ranks call it."""

    def reduce(self, nums_distinct: Tensor, *, step: int) -> None:
        """Sums over ranks, for `update_`, what the backward passes of `step` left; all ranks call it.

        nums_distinct: `num_distinct` of all ranks, [ranks].
        """

    def keep_own(self, *, step: int) -> None:
        """Takes for `update_` what this rank alone has; step: the first since the tables were equal."""

    def update_(self, lr: float) -> None:
        """Moves the rows, after their average has caught up; no rank waits for another."""

    def merge(self, *, step: int) -> None:
        """Makes the tables equal again after steps of each rank's own since `step`; all ranks call it."""

    def fetch(self, identifiers: Tensor) -> None:
        """Gets the rows of an evaluation, int [n], instead of the step's; all ranks call it."""

    def fill_(self, weights: dict[str, Tensor]) -> None:
        """Overwrites sharded rows. weights: on rank 0 full copies, the whole table among them; else empty."""

    def rows(self) -> Tensors:
        """Returns the rows of this rank, by the table's name among the weights."""
        return {}


class _Table(NoTable):
    """What both homes share.

    A home says what the identifiers of rows are (`_identifiers_of`), which rows this rank owns
    (`owned_weights`, a view), and what the embedding reads of something [owned rows, ndim] of all ranks
    (`all_gather_owned`).

    embedding: the model's, with weights [rows of this rank, ndim]. num_rows: of the whole table.
    """

    def __init__(self, embedding: nn.Module, num_rows: int, ranks: Ranks, *, weight_decay: float):
        self.embedding, self.num_rows, self.ranks = embedding, num_rows, ranks
        self.name = embedding.weights_name
        self._weight_decay, self._step = weight_decay, 1

    @torch.no_grad()
    def update_(self, lr: float) -> None:
        rows, gradients = self._gradients
        self.average.before_change(self._identifiers_of(rows), step=self._step)
        weights = self.embedding.weights
        sign_sgd_rows_(weights, rows, gradients, lr=lr, weight_decay=self._weight_decay)


class Replicated(_Table):
    """The whole table on every rank, equal after each step, or each `merge`.

    slot_counts: how many slots each rank has.
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
        self._moved: list[Tensor] = []  # identifiers of the rows that this rank alone has moved

    def prefetch(self, identifiers: Tensor) -> None:
        """Counts the rows, rounded up to 8 significant bits, which a message of any dtype holds.

        On CUDA they are not counted: the host would have to wait for the number, and does without.
        """
        on_cuda = identifiers.device.type == "cuda"
        self.num_distinct = 0 if on_cuda else _round_up(len(torch.unique(identifiers)))

    @torch.no_grad()
    def reduce(self, nums_distinct: Tensor, *, step: int) -> None:
        """Sends one message: on each rank a row for each of its slots, or as many sums.

        Where identifiers repeat on the ranks, each travels once, with its sum; but a sum is float64, twice as
        long as a row, so that rows travel as they are where that is less, and always on CUDA. The result is
        the same.
        """
        self._step, counts = step, list(self._slot_counts)
        identifiers, rows = self.embedding.pop_gradients()
        assert len(rows) == counts[self.ranks.index], "each slot reads one row"
        if not rows.is_cuda and 0 < _SUM_LENGTH * (length := int(nums_distinct.max())) < max(counts):
            counts = [length if count else 0 for count in counts]
            sums = sum_by_identifier(identifiers, rows)
            identifiers, rows = _pad(*sums, length=counts[self.ranks.index])
        gathered = self.ranks.all_gather_numbered_rows(identifiers.long(), rows, counts)
        self._gradients = _sum_rows(*gathered)

    @torch.no_grad()
    def keep_own(self, *, step: int) -> None:
        self._step = step
        identifiers, rows = self.embedding.pop_gradients()
        self._gradients = _sum_rows(identifiers.long(), rows)
        self._moved.append(self._gradients[0])

    @torch.no_grad()
    def merge(self, *, step: int) -> None:
        """Makes a row that several ranks have moved the mean of their rows, in float64."""
        weights, own = self.embedding.weights, torch.cat(self._moved).unique()
        self._moved.clear()
        (counts,) = self.ranks.all_gather_counts(len(own), device=weights.device)
        identifiers, rows = self.ranks.all_gather_numbered_rows(own, weights[own], counts)
        distinct, sums = sum_by_identifier(identifiers, rows)
        num_movers = identifiers.unique(return_counts=True)[1]
        self.average.before_change(distinct, step=step)
        weights[distinct] = (sums / num_movers[:, None]).to(weights.dtype)

    def rows(self) -> Tensors:
        return {self.name: self.embedding.weights}

    def _identifiers_of(self, rows: Tensor) -> Tensor:
        return rows

    def owned_weights(self) -> Tensor:
        return self.embedding.weights[self.ranks.index :: self.ranks.size]

    def all_gather_owned(self, own: Tensor) -> Tensor:
        """Joins the rows of one rank after the other: it takes little more memory than the result."""
        if not has_group():
            return own
        whole = own.new_empty(self.num_rows, *own.shape[1:])
        for index in range(self.ranks.size):
            num_owned = len(rows_of_rank(self.num_rows, index, self.ranks.size))
            rows = own if index == self.ranks.index else own.new_empty(num_owned, *own.shape[1:])
            if num_owned:
                self.ranks.broadcast_([rows], source=index)
                whole[index :: self.ranks.size] = rows
        return whole


class RowsByOwner(_Table):
    """The rows of each rank on that rank alone; others fetch what they read, and send back its gradients."""

    is_spread = True

    def __init__(self, embedding: nn.Module, num_rows: int, ranks: Ranks, *, weight_decay: float):
        super().__init__(embedding, num_rows, ranks, weight_decay=weight_decay)
        nothing = torch.zeros(0, dtype=torch.int64, device=embedding.weights.device)
        embedding.read_from(nothing, embedding.weights[nothing])

    def prefetch(self, identifiers: Tensor) -> None:
        distinct = torch.unique(identifiers.long())
        self._plan = AllToAllPlan(distinct, self.ranks)
        self.embedding.read_from(distinct, self._plan.fetch(self.embedding.weights))

    @torch.no_grad()
    def reduce(self, nums_distinct: Tensor, *, step: int) -> None:
        """Sends the sum of each fetched row to its owner, which adds up the sums of all ranks."""
        self._step = step
        identifiers, rows = self.embedding.pop_gradients()
        distinct, sums = sum_by_identifier(identifiers, rows)
        assert len(distinct) == self._plan.num_rows
        self._gradients = _sum_rows(self._plan.own_rows, self._plan.send(sums))

    def fetch(self, identifiers: Tensor) -> None:
        """Gets the rows in pieces: they take little more memory than their own."""
        distinct, own = torch.unique(identifiers.long()), self.embedding.weights
        rows = own.new_empty(len(distinct), own.shape[1])
        (counts,) = self.ranks.all_gather_counts(len(distinct), device=own.device)
        for begin in range(0, max(counts), _PIECE):
            piece = slice(begin, begin + _PIECE)
            rows[piece] = AllToAllPlan(distinct[piece], self.ranks).fetch(own)
        self.embedding.read_from(distinct, rows)

    def fill_(self, weights: dict[str, Tensor]) -> None:
        table, own = weights.get(self.name), self.embedding.weights
        index, size = self.ranks.index, self.ranks.size
        for begin in range(0, self.num_rows, _PIECE):
            end = min(begin + _PIECE, self.num_rows)
            piece = own.new_empty(end - begin, own.shape[1])
            if table is not None:
                piece.copy_(table[begin:end])
            self.ranks.broadcast_([piece])
            owned = slice(*(len(rows_of_rank(each, index, size)) for each in (begin, end)))
            own[owned] = piece[(index - begin) % size :: size]

    def rows(self) -> Tensors:
        owned = rows_of_rank(self.num_rows, self.ranks.index, self.ranks.size)
        return {self.name: shard_of_rows(self.embedding.weights, owned, self.num_rows, self.ranks)}

    def _identifiers_of(self, rows: Tensor) -> Tensor:
        return rows * self.ranks.size + self.ranks.index

    def owned_weights(self) -> Tensor:
        return self.embedding.weights

    def all_gather_owned(self, own: Tensor) -> Tensor:
        return own


PuzzleTable = NoTable | Replicated | RowsByOwner


class RowAverage(NoAverage):
    """The moving average of the rows that this rank owns, each as of a step of its own.

    While a row stands still for n steps its average closes in on it by rate^n, at once, when the row next
    moves or the average is read. Reading changes nothing, so that a run has the same bits however often it
    was saved or evaluated.

    rate: below 1, close to it. corrects_bias: whether the initial rows are left out.
    """

    def __init__(self, table: Replicated | RowsByOwner, *, rate: float, corrects_bias: bool):
        self._table, self._weights, self._ranks = table, table.owned_weights(), table.ranks
        self._rate, self._corrects_bias = rate, corrects_bias
        self._owned = rows_of_rank(table.num_rows, self._ranks.index, self._ranks.size)
        # One more is for rows of other ranks: to leave these out, the host would have to wait for a GPU.
        num_kept = len(self._owned) + 1
        self._rows = self._weights.new_zeros(num_kept, self._weights.shape[1])  # row i after step _steps[i]
        self._steps = torch.zeros(num_kept, dtype=torch.int32, device=self._weights.device)
        self.restart()

    def restart(self) -> None:
        self._rows[:-1].copy_(self._weights)
        self._steps.zero_()

    @torch.no_grad()
    def before_change(self, identifiers: Tensor, *, step: int) -> None:
        """Catches up on the rows that step `step` (from 1) is about to change: int64 [n], repeats allowed.

        A second call for the same step changes nothing.
        """
        if not self._owned:
            return
        is_owned, rows = identifiers % self._ranks.size == self._ranks.index, identifiers // self._ranks.size
        caught_up = self._caught_up(torch.where(is_owned, rows, 0), step=step - 1)
        rows = torch.where(is_owned, rows, len(self._owned))
        self._rows[rows] = caught_up
        self._steps[rows] = step - 1

    @contextlib.contextmanager
    def averaged(self, *, step: int) -> Iterator[None]:
        embedding = self._table.embedding
        raw, averages = embedding.weights.data, self._caught_up(slice(len(self._owned)), step=step)
        try:
            embedding.weights.data = self._table.all_gather_owned(averages)
            yield
        finally:
            embedding.weights.data = raw

    def values(self, *, step: int) -> Tensors:
        return {self._table.name: self._shard(self._caught_up(slice(len(self._owned)), step=step))}

    def tensors(self) -> Tensors:
        kept = {"table.rows": self._rows[:-1], "table.steps": self._steps[:-1]}
        return {name: self._shard(tensor) for name, tensor in kept.items()}

    def _shard(self, tensor: Tensor) -> Tensor | Shard:
        """Returns a tensor [owned rows, ...] as what this rank keeps of one of all rows."""
        return shard_of_rows(tensor, self._owned, self._table.num_rows, self._ranks)

    @torch.no_grad()
    def _caught_up(self, rows: Tensor | slice, *, step: int) -> Tensor:
        """Returns the average of owned rows after `step`; none has moved since its step in `_steps`."""
        since = self._steps[rows].unsqueeze(1)
        now, remaining = self._weights[rows], self._rate ** (step - since)
        if self._corrects_bias and step:
            decay = math.log(self._rate)
            remaining *= torch.expm1(since * decay) / math.expm1(step * decay)
        caught_up = now + (self._rows[rows] - now) * remaining
        return torch.where(since == step, self._rows[rows], caught_up)  # exact, however often it is asked


def build_table(
    config: PretrainConfig, embedding: nn.Module | None, num_rows: int, ranks: Ranks
) -> PuzzleTable:
    """Builds the home of a model's puzzle embedding, which has `num_local_rows` of `num_rows` rows."""
    if embedding is None:
        return NoTable()
    decay = config.puzzle_emb_weight_decay
    if _is_spread(config, ranks):
        table = RowsByOwner(embedding, num_rows, ranks, weight_decay=decay)
    else:
        members = (Ranks(index, ranks.size) for index in range(ranks.size))
        counts = [len(slots_of(each, config.global_batch_size)) for each in members]
        table = Replicated(embedding, num_rows, ranks, weight_decay=decay, slot_counts=counts)
    if config.ema is not None:
        table.average = RowAverage(table, rate=config.ema, corrects_bias=config.ema_bias_correction)
    return table


def num_local_rows(config: PretrainConfig, num_rows: int, ranks: Ranks) -> int:
    """Returns how many rows of the table the model of this rank has."""
    return len(rows_of_rank(num_rows, ranks.index, ranks.size)) if _is_spread(config, ranks) else num_rows


def _is_spread(config: PretrainConfig, ranks: Ranks) -> bool:
    return config.puzzle_emb_sharding == "rows" and ranks.size > 1


def _round_up(count: int) -> int:
    """Returns the next number of at most 8 significant bits, less than 1 % above."""
    unit = 2 ** max(0, count.bit_length() - 8)
    return -(-count // unit) * unit


def _pad(identifiers: Tensor, sums: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
    """Repeats the first identifier, with sums of 0, up to a length."""
    missing = length - len(identifiers)
    padding = identifiers[:1].expand(missing), sums.new_zeros(missing, sums.shape[1])
    return torch.cat([identifiers, padding[0]]), torch.cat([sums, padding[1]])
