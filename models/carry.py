"""The types that all models share: carry of the slots, settings of a thinking step, prediction."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dataset.loader import Batch

# Tensors by name, [batch, ...] each; z_X are [batch, ..., hidden] in the forward dtype.
State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The settings of thinking steps: number of steps and cycles, noise, and how a search guesses.

    max_steps     number of thinking steps after which a slot halts in any case
    halting       "max": no slot halts before; "act": slots may halt before (`models.halting`)
    H_cycles, L_cycles, loops  in a thinking step; 0 if the model has none
    init_noise    standard deviation of the initial state; 0: X_init, without noise
    state_noise   standard deviation of noise on the result of every call of a level
    step_noise    standard deviation of noise on the state before every thinking step
    damping       fraction of a state that a call of a level replaces
    progress      fraction of the run's training steps that are done, from 0 to 1, for scheduled settings
    decision_cell, decision_value  of a search: guess at a random open cell ("uniform") or at one with the
                  "fewest" candidates; a value that is "drawn", or the most likely one
    eval_conflict_threshold  of a search: a board with a higher probability of a contradiction is reset
    """

    max_steps: int
    halting: Literal["max", "act"]
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
    def of_arch(cls, arch: Any, *, max_steps: int, halting: Literal["max", "act"]) -> Reasoning:
        """Takes over the keys of an architecture's config that this class has; others keep their defaults."""
        names = {field.name for field in dataclasses.fields(cls)}
        keys = {key: value for key, value in arch.model_dump().items() if key in names}
        return cls(max_steps, halting, **keys)

    @property
    def is_noisy(self) -> bool:
        """Returns whether the initial state or a thinking step has noise."""
        return any((self.init_noise, self.step_noise, self.state_noise))


class Prediction(NamedTuple):
    """The output of a thinking step; a network may use a class of its own with more fields.

    logits: [batch, seq_len, vocab] in the forward dtype. q_halt: float32 [batch], logit of "the answer is
    right". q_continue: float32 [batch], value of another step; None if the network has none.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor | None


class Carry(NamedTuple):
    """The memory of the slots between steps.

    state: of the network. steps: number of thinking steps on the present puzzle, int32 [batch]. halted: bool
    [batch]. data: the puzzles. If slots hold several boards (puzzles), every tensor is [batch, boards, ...].
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
        """Makes a carry from the result of `tensors`. Names that no field explains belong to the state."""
        state = dict(tensors)
        return cls(
            steps=state.pop("steps"),
            halted=state.pop("halted"),
            data=Batch(*(state.pop(f"data.{name}") for name in Batch._fields)),
            state=state,
        )

    def select(self, slots: slice | Tensor) -> Carry:
        """Returns the carry of some slots. slots: slice or int64 [n]."""
        return Carry.from_tensors({name: tensor[slots] for name, tensor in self.tensors().items()})

    def boards(self, picked: Tensor | None) -> Carry:
        """Returns a carry with one board of each slot. picked: int64 [batch]; None: slots have one board."""
        if picked is None:
            return self
        slots = torch.arange(len(picked), device=picked.device)
        return Carry.from_tensors({name: tensor[slots, picked] for name, tensor in self.tensors().items()})

    def with_boards_(self, picked: Tensor | None, boards: Carry) -> Carry:
        """Puts `boards` back as number `picked`, int64 [batch], of each slot; None: as the only board."""
        if picked is None:
            return boards
        slots, tensors = torch.arange(len(picked), device=picked.device), self.tensors()
        for name, tensor in boards.tensors().items():
            tensors[name][slots, picked] = tensor
        return self

    @staticmethod
    def join(parts: list[Carry]) -> Carry:
        """Returns several carries concatenated along the slots."""
        if len(parts) == 1:
            return parts[0]
        tensors = [part.tensors() for part in parts]
        return Carry.from_tensors({name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})


class StepOutput(NamedTuple):
    """The result of one thinking step: the new carry, and the prediction."""

    carry: Carry
    prediction: Prediction

    def select(self, slots: slice | Tensor) -> StepOutput:
        """Returns the result of some slots. slots: slice or int64 [n]."""
        return StepOutput(self.carry.select(slots), select_columns(self.prediction, slots))

    @staticmethod
    def join(parts: list[StepOutput]) -> StepOutput:
        """Returns several results concatenated along the slots."""
        columns = zip(*(part.prediction for part in parts), strict=True)
        joined = (None if column[0] is None else torch.cat(column) for column in columns)
        return StepOutput(Carry.join([part.carry for part in parts]), type(parts[0].prediction)(*joined))


def select_columns(prediction: Prediction, slots: slice | Tensor) -> Prediction:
    """Returns a prediction of some slots: every field at `slots`, a slice or int64 [n]."""
    return type(prediction)(*(None if column is None else column[slots] for column in prediction))


def where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Selects row by row: the row of `new` where `mask`, bool [batch], is true, else the row of `old`."""
    return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)
