"""The types that all models share: the carry of the slots, the settings and the result of a thinking step.

A slot is one position of the batch, and works on one puzzle at a time. `HaltingModel.forward` runs one
thinking step: it takes the `Carry` of all slots, and returns a `StepOutput`. This contains the carry for the
next thinking step, and a `Prediction`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dataset.loader import Batch

# The state of a network between thinking steps: {name: tensor [batch, ...]}. Rules for names and dtypes:
# - A name that starts with z_, such as z_H, is a latent state, [batch, ..., hidden] in the forward dtype. The
#   noise of models/noise.py changes only latent states.
# - Any other name is free, but without a dot, and not steps or halted: `Carry.tensors` uses such names.
# - Its dtype is float32, because a web page passes every state as float32 (share/onnx.py). Example: the step
#   size of FPRM. LDT, which has another kind of web page, and Flow, which has none, have other dtypes.
State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The settings of thinking steps: number of steps and cycles, noise, and how a search guesses.

    Attributes:
        max_steps: Number of thinking steps (calls of the model) after which a puzzle halts in any case.
        halting: "max": No puzzle halts before max_steps. "act": Puzzles may halt before (`models.halting`).
        H_cycles: Number of H cycles (outer loops) in a thinking step. 0 if the model has none.
        L_cycles: Number of L cycles (inner loops) in an H cycle. 0 if the model has none.
        loops: Number of loops in a thinking step of LDT. 0 for other models.
        init_noise: Standard deviation of a random initial state. 0: The initial state is fixed.
        state_noise: Standard deviation of the noise on the result of every call of a level.
        step_noise: Standard deviation of the noise on the state before every thinking step.
        damping: A call of a level moves the state by this fraction of the way to the result. 1: All the way.
        progress: Fraction of the run's training steps that are done, in [0, 1]. LDT and Flow use it in
            training.
        sde_noise: In evaluation, how much noise a step of Flow puts back, for each unit of time (g in the
            paper). 0: none.
        decision_cell: Cell in which LDT guesses. "uniform": any open cell. "fewest": one with the fewest
            candidates.
        decision_value: Value that LDT guesses. "drawn": sampled. "best": the most likely one.
        eval_conflict_threshold: In evaluation, LDT calls a board contradictory if its predicted probability
            of having lost the solution is higher.
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
    sde_noise: float = 0.0
    decision_cell: str = "uniform"
    decision_value: str = "drawn"
    eval_conflict_threshold: float = 0.5

    @classmethod
    def of_arch(cls, arch: Any, *, max_steps: int, halting: Literal["max", "act"]) -> Reasoning:
        """Returns the settings with the values of the config section `arch`, max_steps and halting.

        Every key with the name of a field sets this field. Example: arch.H_cycles sets H_cycles. All other
        fields have their defaults.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        keys = {key: value for key, value in arch.model_dump().items() if key in names}
        return cls(max_steps, halting, **keys)

    @property
    def is_noisy(self) -> bool:
        """Whether any of the three kinds of noise is on."""
        return any((self.init_noise, self.step_noise, self.state_noise))


class Prediction(NamedTuple):
    """The output of a thinking step. A network may use another class that has more fields.

    Attributes:
        logits: Logits of the token in each cell, [batch, seq_len, vocab] in the forward dtype.
        q_halt: Logit of "the answer is right", float32 [batch].
        q_continue: Logit of the value of another thinking step, float32 [batch]. None if there is none.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor | None


class Carry(NamedTuple):
    """What the slots (positions of the batch) store between thinking steps.

    If a slot holds several puzzles (LDT's boards_per_slot), every tensor is [batch, boards, ...].

    Attributes:
        state: State of the network.
        steps: Number of thinking steps that the slot has made on its puzzle, int32 [batch].
        halted: Whether the slot has halted, bool [batch]. `HaltingModel.refill` starts it on a new puzzle.
        data: The puzzles, with their labels, without `Batch.answers`.
    """

    state: State
    steps: Tensor
    halted: Tensor
    data: Batch

    def tensors(self) -> dict[str, Tensor]:
        """Returns {name: tensor [batch, ...]}, with names such as z_H, steps, halted and data.inputs."""
        fields = self.data._asdict().items()
        data = {f"data.{name}": tensor for name, tensor in fields if tensor is not None}
        return {**self.state, "steps": self.steps, "halted": self.halted, **data}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Carry:
        """Returns the carry with these tensors. It is the inverse of the method `tensors`."""
        state = dict(tensors)
        return cls(
            steps=state.pop("steps"),
            halted=state.pop("halted"),
            data=Batch(*(state.pop(f"data.{name}") for name in Batch._fields if name != "answers")),
            state=state,
        )

    def select(self, slots: slice | Tensor) -> Carry:
        """Returns the carry of some slots (positions of the batch). slots: Slice, or indices int64 [n]."""
        return Carry.from_tensors({name: tensor[slots] for name, tensor in self.tensors().items()})

    def boards(self, picked: Tensor | None) -> Carry:
        """Returns a copy of one of the puzzles ("boards") in each batch position: tensors [batch, ...].

        picked: Index of the board in each batch position, int64 [batch]. If None, each has only one board,
        and the carry itself is returned.
        """
        if picked is None:
            return self
        slots = torch.arange(len(picked), device=picked.device)
        return Carry.from_tensors({name: tensor[slots, picked] for name, tensor in self.tensors().items()})

    def with_boards_(self, picked: Tensor | None, boards: Carry) -> Carry:
        """Overwrites one of the puzzles ("boards") in each batch position, in place. Returns this carry.

        If `picked` is None, each has only one board. Then `boards` is returned, and nothing is changed.

        picked: Index of the board in each batch position, int64 [batch]. boards: The new puzzles.
        """
        if picked is None:
            return boards
        slots, tensors = torch.arange(len(picked), device=picked.device), self.tensors()
        for name, tensor in boards.tensors().items():
            tensors[name][slots, picked] = tensor
        return self

    @staticmethod
    def join(parts: list[Carry]) -> Carry:
        """Returns several carries concatenated along the batch axis. A single one is not copied."""
        if len(parts) == 1:
            return parts[0]
        tensors = [part.tensors() for part in parts]
        return Carry.from_tensors(
            {name: torch.cat([part_tensors[name] for part_tensors in tensors]) for name in tensors[0]}
        )


class StepOutput(NamedTuple):
    """The result of one thinking step: the new carry and the prediction."""

    carry: Carry
    prediction: Prediction

    def select(self, slots: slice | Tensor) -> StepOutput:
        """Returns the result of some slots (positions of the batch). slots: Slice, or indices int64 [n]."""
        return StepOutput(self.carry.select(slots), select_columns(self.prediction, slots))

    @staticmethod
    def join(parts: list[StepOutput]) -> StepOutput:
        """Returns several results concatenated along the batch axis."""
        columns = zip(*(part.prediction for part in parts), strict=True)
        joined = (None if column[0] is None else torch.cat(column) for column in columns)
        return StepOutput(Carry.join([part.carry for part in parts]), type(parts[0].prediction)(*joined))


def select_columns(prediction: Prediction, slots: slice | Tensor) -> Prediction:
    """Returns the prediction of some slots (positions of the batch). slots: Slice, or indices int64 [n]."""
    return type(prediction)(*(None if column is None else column[slots] for column in prediction))


def where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Returns torch.where for a mask of the batch axis. mask: bool [batch]. new, old: [batch, ...]."""
    return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)
