"""The types that all models share: the carry of the slots, the settings and the result of a thinking step.

A slot is one position of the batch, and works on one puzzle at a time. `HaltingModel.forward` runs one
thinking step: it takes the `Carry` of all slots, and returns a `StepOutput`. The `StepOutput` contains the
carry after the step, and a `Prediction`.
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
    """Settings of thinking steps: number of steps and cycles, halting, and noise.

    Training and an evaluation may use different settings.
    """

    max_steps: int  # number of thinking steps after which a puzzle halts in any case
    # "max": No puzzle halts before max_steps. "act": Puzzles may halt before (models/halting.py).
    halting: Literal["max", "act"]
    H_cycles: int = 0  # H cycles (outer loops) in a thinking step. 0 if the model has none
    L_cycles: int = 0  # L cycles (inner loops) in an H cycle. 0 if the model has none
    loops: int = 0  # loops in a thinking step of LDT. 0 for other models
    # Noise and damping (models/noise.py). The three kinds of noise have these standard deviations.
    init_noise: float = 0.0  # of a random initial state. 0: The initial state is fixed
    state_noise: float = 0.0  # of the noise on the result of every call of a level
    step_noise: float = 0.0  # of the noise on the state before every thinking step
    damping: float = 1.0  # a call of a level moves the state by this fraction of the way to the result
    # Fraction of the run's training steps that are done, in [0, 1]. LDT and Flow use it in training.
    progress: float = 0.0
    # In evaluation, how much noise a step of Flow puts back, for each unit of time (g in the paper).
    sde_noise: float = 0.0
    # Cell in which LDT guesses. "uniform": any open cell. "fewest": one with the fewest candidates.
    decision_cell: str = "uniform"
    decision_value: str = "drawn"  # value that LDT guesses. "drawn": sampled. "best": the most likely one
    # In evaluation, LDT calls a board contradictory if its predicted probability of having lost the solution
    # is higher.
    eval_conflict_threshold: float = 0.5

    @classmethod
    def of_arch(cls, arch: Any, *, max_steps: int, halting: Literal["max", "act"]) -> Reasoning:
        """Creates the settings from the config of a model.

        `max_steps` and `halting` set the fields of these names. If `arch` has a key with the name of another
        field, the key sets this field. Example: arch.H_cycles sets H_cycles. All remaining fields have their
        default values.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        keys = {key: value for key, value in arch.model_dump().items() if key in names}
        return cls(max_steps, halting, **keys)

    @property
    def is_noisy(self) -> bool:  # noise of models/noise.py, which does not include sde_noise
        return any((self.init_noise, self.step_noise, self.state_noise))


class Prediction(NamedTuple):
    """The answer of a network after one thinking step. Some networks return more fields.

    Attributes:
        logits: Logits of the answer, for each cell over all tokens, [batch, seq_len, vocab] in the dtype of
            the activations.
        q_halt: Logit of the predicted probability that the answer is right, float32 [batch]. SE-RRM has no Q
            head: it predicts the softmax probability of its least certain cell. LDT: 5 if the board is
            solved, else -5.
        q_continue: Logit of the probability that the answer will be right after more thinking steps, float32
            [batch]. Only with arch.no_ACT_continue=false, this output is trained, and decides when a slot
            halts. None if the network has no such output.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor | None


class Carry(NamedTuple):
    """What the slots of a batch store between two thinking steps: puzzles, hidden states and counters.

    In training, a slot of LDT stores several puzzles if boards_per_slot > 1. Every tensor is then [batch,
    boards, ...].

    Attributes:
        state: Tensors of the network, such as hidden states, {name: tensor [batch, ...]}.
        steps: Number of thinking steps that each puzzle has had, int32 [batch].
        halted: Which puzzles have halted, bool [batch]. `HaltingModel.refill` replaces these puzzles.
        data: The puzzles and their labels. Its field `answers` is None.
    """

    state: State
    steps: Tensor
    halted: Tensor
    data: Batch

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors as {name: tensor [batch, ...]}, such as "z_H", "steps" and "data.inputs"."""
        fields = self.data._asdict().items()
        data = {f"data.{name}": tensor for name, tensor in fields if tensor is not None}
        return {**self.state, "steps": self.steps, "halted": self.halted, **data}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Carry:
        """Creates a carry from the dict that `tensors` returns."""
        state = dict(tensors)
        return cls(
            steps=state.pop("steps"),
            halted=state.pop("halted"),
            data=Batch(*(state.pop(f"data.{name}") for name in Batch._fields if name != "answers")),
            state=state,
        )

    def select(self, slots: slice | Tensor) -> Carry:
        """Returns a carry with only some slots. slots: A slice, or indices (int64 [n])."""
        return Carry.from_tensors({name: tensor[slots] for name, tensor in self.tensors().items()})

    def boards(self, picked: Tensor | None) -> Carry:
        """Returns a carry with one of the puzzles of each slot, without the axis of boards.

        picked: Index of the puzzle in each slot, int64 [batch]. If None, each slot stores only one puzzle,
        and this carry itself is returned.
        """
        if picked is None:
            return self
        slots = torch.arange(len(picked), device=picked.device)
        return Carry.from_tensors({name: tensor[slots, picked] for name, tensor in self.tensors().items()})

    def with_boards_(self, picked: Tensor | None, boards: Carry) -> Carry:
        """Overwrites one of the puzzles of each slot, in place. Returns this carry.

        picked: Index of the puzzle to overwrite in each slot, int64 [batch]. If None, each slot stores only
        one puzzle. Then `boards` is returned, and this carry does not change. boards: New puzzles and their
        states, one for each slot.
        """
        if picked is None:
            return boards
        slots, tensors = torch.arange(len(picked), device=picked.device), self.tensors()
        for name, tensor in boards.tensors().items():
            tensors[name][slots, picked] = tensor
        return self

    @staticmethod
    def join(parts: list[Carry]) -> Carry:
        if len(parts) == 1:
            return parts[0]
        tensors = [part.tensors() for part in parts]
        return Carry.from_tensors(
            {name: torch.cat([part_tensors[name] for part_tensors in tensors]) for name in tensors[0]}
        )


class StepOutput(NamedTuple):
    """The result of one thinking step: the carry after the step, and the prediction."""

    carry: Carry
    prediction: Prediction

    def select(self, slots: slice | Tensor) -> StepOutput:
        return StepOutput(self.carry.select(slots), select_columns(self.prediction, slots))

    @staticmethod
    def join(parts: list[StepOutput]) -> StepOutput:
        columns = zip(*(part.prediction for part in parts), strict=True)
        joined = (None if column[0] is None else torch.cat(column) for column in columns)
        return StepOutput(Carry.join([part.carry for part in parts]), type(parts[0].prediction)(*joined))


def select_columns(prediction: Prediction, slots: slice | Tensor) -> Prediction:
    return type(prediction)(*(None if column is None else column[slots] for column in prediction))


def where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Returns a tensor [batch, ...] with the entries of `new` in some slots, and of `old` in all others.

    mask: bool [batch], True in slots with the entry of `new`. new, old: Tensors [batch, ...].
    """
    return torch.where(mask.view(-1, *[1] * (new.ndim - 1)), new, old)
