"""The values of all models: what slots remember, how a step reasons, what it returns."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataset.loader import Batch

# Tensors by name, [batch, ...] each; z_X end in [..., hidden], in the forward dtype.
State = dict[str, Tensor]
# Detached scalars by name, summed over slots; counts over the global batch, with `slots` among them.
Sums = dict[str, Tensor]
Counts = dict[str, "float | Tensor"]
# Of each sum the name of the sum that divides it, or "slots": all slots of all steps, in evaluation the
# puzzles with a label; None: it is logged as it is.
Metrics = dict[str, "str | None"]


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """How long and how noisily slots work on their puzzle: one value, given to every call of a model.

    max_steps     after which a slot halts in any case
    halts_early   whether it may halt before
    H_cycles, L_cycles, loops  of a step; 0 for a model that has none
    init_noise    standard deviation of the state that a slot starts from; 0: X_init
    state_noise   standard deviation of the noise on every call of a level
    step_noise    standard deviation of the noise on the state before every step
    damping       share of a state that a call of a level replaces
    progress      share of the run that is done, from 0 to 1: for what changes along it
    decision_cell, decision_value  how a search guesses: at any open cell or one of the fewest candidates, and
                  a value that is drawn or the best one
    eval_conflict_threshold  of a search: a board that is more likely contradictory starts anew
    """

    max_steps: int
    halts_early: bool
    H_cycles: int = 0
    L_cycles: int = 0
    loops: int = 0
    init_noise: float = 0.0
    state_noise: float = 0.0
    step_noise: float = 0.0
    damping: float = 1.0
    progress: float = 0.0
    decision_cell: str = "uniform"
    decision_value: str = "drawn"
    eval_conflict_threshold: float = 0.5

    @classmethod
    def of_arch(cls, arch: Any, *, max_steps: int, halts_early: bool) -> Reasoning:
        """Reads the keys of a config that has them."""
        names = ("H_cycles", "L_cycles", "loops", "init_noise", "state_noise", "damping")
        names += ("decision_cell", "decision_value", "eval_conflict_threshold")
        values = {name: getattr(arch, name) for name in names if hasattr(arch, name)}
        return cls(max_steps, halts_early, **values)

    @property
    def is_noisy(self) -> bool:
        """Returns whether a step adds noise, in training and evaluation."""
        return any((self.init_noise, self.step_noise, self.state_noise))


class Prediction(NamedTuple):
    """The output of a step; a network may have one of its own, with these columns and others.

    logits: [batch, seq_len, vocab] in the forward dtype. q_halt: float32 [batch], the logit of being right.
    q_continue: float32 [batch], or None where the network has none.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor | None


class Board(NamedTuple):
    """What a search knows of a puzzle, for those who watch it.

    candidates: bool [batch, seq_len, vocab], the tokens that a cell may still be. guess: int16 [batch], the
    cell that the last step gave a guessed value, NO_GUESS, or ANEW where it found a contradiction and began
    anew.
    """

    candidates: Tensor
    guess: Tensor


NO_GUESS, ANEW = -1, -2


class Carry(NamedTuple):
    """The memory of every slot between steps.

    state: what the network keeps. steps: int32 [batch]; halted: bool [batch]; data: what the slot works on.
    Where a slot holds several boards, every tensor is [batch, boards, ...].
    """

    state: State
    steps: Tensor
    halted: Tensor
    data: Batch

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor by its name: z_H, z_L, steps, halted, data.inputs, ..., each [batch, ...]."""
        data = {f"data.{name}": tensor for name, tensor in self.data._asdict().items()}
        return {**self.state, "steps": self.steps, "halted": self.halted, **data}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Carry:
        """Makes the carry of what `tensors` returned: the network's state is what is nothing else."""
        state = dict(tensors)
        return cls(
            steps=state.pop("steps"),
            halted=state.pop("halted"),
            data=Batch(*(state.pop(f"data.{name}") for name in Batch._fields)),
            state=state,
        )

    def select(self, slots: slice | Tensor) -> Carry:
        """Returns the carry of some of the slots, a slice or int64 [n]."""
        return Carry.from_tensors({name: tensor[slots] for name, tensor in self.tensors().items()})

    def boards(self, picked: Tensor | None) -> Carry:
        """Returns the carry of one board of each slot, int64 [batch]; None: a slot has but one."""
        if picked is None:
            return self
        slots = torch.arange(len(picked), device=picked.device)
        return Carry.from_tensors({name: tensor[slots, picked] for name, tensor in self.tensors().items()})

    def with_boards_(self, picked: Tensor | None, boards: Carry) -> Carry:
        """Returns the carry with the picked boards replaced by `boards`; several a slot change in place."""
        if picked is None:
            return boards
        slots, tensors = torch.arange(len(picked), device=picked.device), self.tensors()
        for name, tensor in boards.tensors().items():
            tensors[name][slots, picked] = tensor
        return self

    @staticmethod
    def join(parts: list[Carry]) -> Carry:
        """Returns the carry of the slots of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        tensors = [part.tensors() for part in parts]
        return Carry.from_tensors({name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})


class StepOutput(NamedTuple):
    """The result of one step of all slots."""

    carry: Carry
    prediction: Prediction

    def select(self, slots: slice | Tensor) -> StepOutput:
        """Returns the result of some of the slots, a slice or int64 [n]."""
        return StepOutput(self.carry.select(slots), select_columns(self.prediction, slots))

    @staticmethod
    def join(parts: list[StepOutput]) -> StepOutput:
        """Returns the result of the slots of all parts, one after the other."""
        columns = zip(*(part.prediction for part in parts), strict=True)
        joined = (None if column[0] is None else torch.cat(column) for column in columns)
        return StepOutput(Carry.join([part.carry for part in parts]), type(parts[0].prediction)(*joined))


def select_columns(prediction: Prediction, slots: slice | Tensor) -> Prediction:
    """Returns the prediction of some of the slots, a slice or int64 [n]."""
    return type(prediction)(*(None if column is None else column[slots] for column in prediction))


def where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Chooses row by row: `new` where mask, bool [batch]."""
    return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)


def sum_names(metrics: Metrics) -> tuple[str, ...]:
    """Returns the names of all sums that the metrics are made of."""
    divisors = {name for name in metrics.values() if name not in (None, "slots")}
    return (*metrics, *sorted(divisors - metrics.keys()))


def divide(sums: dict[str, float], metrics: Metrics, *, slots: float) -> dict[str, float]:
    """Makes the metrics of sums over all ranks and steps, counts last. A metric without data is left out."""
    divisors = {**sums, "slots": slots}
    means = {name: by for name, by in metrics.items() if by is not None and divisors.get(by) and name in sums}
    counts = [name for name, by in metrics.items() if by is None and sums.get(name)]
    return {name: sums[name] / divisors[by] for name, by in means.items()} | {n: sums[n] for n in counts}
