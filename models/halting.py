"""Adaptive computation around a network: slots that work on their puzzle over several steps, until they halt.

The same wrapper serves every network. It never draws random numbers: what is random comes in from outside,
drawn for the global batch, so that a run does not depend on the number of processes (`draw_exploration`).
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dataset.loader import Batch
from models.compilation import eager_blocks
from models.network import Network, Prediction, State
from models.random import Draws, draw_uniform


class Carry(NamedTuple):
    """The memory of every slot between steps.

    state: what the network keeps. steps: int32 [batch]; halted: bool [batch]; data: what the slot
    works on.
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
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Carry":
        """Makes the carry of what `tensors` returned: the network's state is what is nothing else."""
        state = dict(tensors)
        return cls(
            steps=state.pop("steps"),
            halted=state.pop("halted"),
            data=Batch(*(state.pop(f"data.{name}") for name in Batch._fields)),
            state=state,
        )

    def refill(self, batch: Batch) -> Batch:
        """Returns what every slot works on next: its row of `batch` where it had halted."""
        return Batch(*(_where(self.halted, new, old) for new, old in zip(batch, self.data, strict=True)))

    def select(self, slots: slice | Tensor) -> "Carry":
        """Returns the carry of some of the slots, a slice or int64 [n]."""
        return Carry.from_tensors({name: tensor[slots] for name, tensor in self.tensors().items()})

    @staticmethod
    def join(parts: "list[Carry]") -> "Carry":
        """Returns the carry of the slots of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        tensors = [part.tensors() for part in parts]
        return Carry.from_tensors({name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})


class ContinueTarget(NamedTuple):
    """Targets of q_continue, for the slots where they count.

    logits, targets: float32 [batch]; counts: bool [batch].
    """

    logits: Tensor
    targets: Tensor
    counts: Tensor


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """The result of one step of all slots. continue_targets: none where q_continue is not trained."""

    carry: Carry
    prediction: Prediction
    continue_targets: tuple[ContinueTarget, ...] = ()


class HaltingModel(nn.Module):
    """A network that is called once per step on every slot, and the rule by which slots halt.

    Section 2 of the HRM paper, with Q-learning: a slot halts where q_halt exceeds q_continue. With
    `no_ACT_continue`, TRM's simplification, it halts where q_halt says that the answer is rather right than
    wrong, and no second network call is needed for a target of q_continue. Slots of a network that
    `halts_at_random` do so in training, in a step where chance has it, or after the last.

    halt_max_steps: after which a slot halts in any case; eval_halt_max_steps: the same in evaluation.
    q_target: where that target comes from. `exact`: a call more for all slots, as published. `deferred`: for
    slots that go on it is read from the next step's call, which is made anyway, and trains the Q head alone,
    as the step's graph is gone by then; a call more is made for the slots that stop. How many these are, the
    host waits for on CUDA, once a step.
    """

    def __init__(
        self,
        network: Network,
        *,
        halt_max_steps: int,
        eval_halt_max_steps: int | None = None,
        no_ACT_continue: bool,
        q_target: str,
    ):
        super().__init__()
        self.network = network
        self.halt_max_steps, self.no_ACT_continue = halt_max_steps, no_ACT_continue
        self.eval_halt_max_steps = eval_halt_max_steps or halt_max_steps
        self.q_target = q_target

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the carry of halted slots: the first step puts `batch` into every one of them."""
        batch_size, seq_len = batch.inputs.shape
        device = batch.inputs.device
        return Carry(
            state=self.network.initial_state(batch_size, seq_len=seq_len),
            steps=torch.zeros(batch_size, dtype=torch.int32, device=device),
            halted=torch.ones(batch_size, dtype=torch.bool, device=device),
            data=batch,
        )

    def forward(
        self,
        carry: Carry,
        batch: Batch,
        *,
        min_steps: Tensor | None = None,
        stops: Tensor | None = None,
        keys: Tensor | None = None,
        draws: Draws | None = None,
        halts_early: bool = False,
    ) -> StepOutput:
        """Runs one step. Slots that had halted start on their row of `batch`; its other rows are not used.

        min_steps: int32 [batch], steps below which a slot may not halt before the last. stops: bool [batch],
        slots that chance halts here, of a network that `halts_at_random`. keys: int64 [batch], for what else
        is random in the network in training; draws: the noise of one that `is_noisy`. In evaluation every
        slot runs `eval_halt_max_steps` steps, unless it `halts_early`, where q_halt says so; and there is no
        target for q_continue.
        """
        batch_size, seq_len = batch.inputs.shape
        fresh = self.network.initial_state(batch_size, seq_len=seq_len)
        if draws is not None:
            fresh = self.network.random_start(fresh, draws, slots=carry.halted.nonzero().flatten())
        state = {name: _where(carry.halted, fresh[name], old) for name, old in carry.state.items()}
        data = carry.refill(batch)
        steps = torch.where(carry.halted, 0, carry.steps) + 1

        before = state
        drawn = {name: each for name, each in (("keys", keys), ("draws", draws)) if each is not None}
        state, prediction = self.network(state, data.inputs, data.puzzle_identifiers, **drawn)

        with torch.no_grad():
            max_steps = self.halt_max_steps if self.training else self.eval_halt_max_steps
            is_last_step = steps >= max_steps
            halted = is_last_step
            if self.training and self.network.halts_at_random:
                halted = is_last_step if stops is None else is_last_step | stops
            elif (self.training or halts_early) and max_steps > 1:
                halted = is_last_step | self.wants_to_halt(prediction)
                if min_steps is not None:
                    halted = halted & (steps >= min_steps)
        after = Carry(state, steps, halted, data)
        if not self.training or self.halt_max_steps == 1 or self.no_ACT_continue:
            return StepOutput(after, prediction)
        if self.q_target == "exact":
            targets = self._targets_by_a_call(after, is_last_step, draws)
            exact = ContinueTarget(prediction.q_continue, targets, counts=torch.ones_like(halted))
            return StepOutput(after, prediction, (exact,))
        deferred = self._deferred_targets(carry, before, after, prediction, is_last_step, draws)
        return StepOutput(after, prediction, deferred)

    def wants_to_halt(self, prediction: Prediction) -> Tensor:
        """Returns where the Q head would rather stop than go on: bool [batch]."""
        return prediction.q_halt > (0 if self.no_ACT_continue else prediction.q_continue)

    @torch.no_grad()
    def _targets_by_a_call(self, carry: Carry, is_last_step: Tensor, draws: Draws | None) -> Tensor:
        """Computes the value of going on: the better Q of one more call (arXiv 2407.04811).

        After the last step it is the halting one. The call has the noise of the step's own.
        """
        data, drawn = carry.data, {} if draws is None else {"draws": draws}
        _, following = self.network(carry.state, data.inputs, data.puzzle_identifiers, **drawn)
        best = torch.maximum(following.q_halt, following.q_continue)
        return torch.sigmoid(torch.where(is_last_step, following.q_halt, best))

    def _deferred_targets(
        self,
        carry: Carry,
        before: State,
        after: Carry,
        prediction: Prediction,
        is_last_step: Tensor,
        draws: Draws | None,
    ) -> tuple[ContinueTarget, ...]:
        """Computes the targets of the slots that went on, of their step before, and of those that stop here.

        carry: as the step found it; before: the state that the network was called with.
        """
        went_on, stops = ~carry.halted, after.halted.nonzero().flatten()
        best = torch.maximum(prediction.q_halt, prediction.q_continue).detach()
        earlier = self.network.q_values(before["z_H"])[:, 1]
        targets = [ContinueTarget(earlier, torch.sigmoid(best), went_on)]
        if len(stops):
            values = torch.zeros_like(best)
            its_draws = None if draws is None else draws[stops]
            with eager_blocks():
                values[stops] = self._targets_by_a_call(after.select(stops), is_last_step[stops], its_draws)
            targets.append(ContinueTarget(prediction.q_continue, values, after.halted))
        return tuple(targets)


def _where(halted: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Chooses row by row: `new` where halted."""
    return torch.where(halted.view(-1, *[1] * (new.ndim - 1)), new, old)


def draw_exploration(
    *, seed: int, step: int, batch_size: int, halt_max_steps: int, probability: float, halts_at_random: bool
) -> dict[str, np.ndarray]:
    """Draws what `HaltingModel` is called with in `step`, for the *global* batch; pure in (seed, step).

    Nothing where there is nothing to explore. halts_at_random: of the network.
    """
    if not probability or halt_max_steps < 2:
        return {}
    drawn = {"seed": seed, "step": step, "batch_size": batch_size, "probability": probability}
    if halts_at_random:
        return {"stops": draw_stops(**drawn)}
    return {"min_steps": draw_min_steps(**drawn, halt_max_steps=halt_max_steps)}


def draw_min_steps(
    *, seed: int, step: int, batch_size: int, halt_max_steps: int, probability: float
) -> np.ndarray:
    """Draws the exploration of a Q head: int32 [batch_size].

    With `probability`, a slot must run a number of steps drawn uniformly from 2..halt_max_steps, else 0.
    """
    explores, amount = draw_uniform(seed=seed, step=step, count=2 * batch_size).reshape(2, batch_size)
    drawn = 2 + np.floor(amount * (halt_max_steps - 1))
    return np.where(explores < probability, drawn, 0).astype(np.int32)


def draw_stops(*, seed: int, step: int, batch_size: int, probability: float) -> np.ndarray:
    """Draws which slots halt whatever their answer, each with `probability`: bool [batch_size]."""
    return draw_uniform(seed=seed, step=step, count=batch_size) < probability
