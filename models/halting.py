"""When a slot halts: the rules, and the model that applies them.

A slot is one position of the batch, and works on one puzzle at a time. Each call of `HaltingModel` is one
thinking step of every slot. If a slot halts, its answer counts in the metrics, and the slot starts on another
puzzle (`HaltingModel.refill`). In training, the new puzzle starts in the next training step. In an evaluation
with halting=act, it starts before the next call of the model (evaluation/loop.py).

Every slot halts when its puzzle has had the maximum number of thinking steps. It may halt earlier:

    thinking step of          maximum number of steps    halts earlier
    ------------------------  -------------------------  ----------------------------------------------------
    training                  arch.halt_max_steps        if the Q head wants to, and exploration allows it
    training, FPRM            arch.halt_max_steps        if the residual is small, and exploration allows it
    training, SE-RRM          arch.halt_max_steps        at random, with probability halt_exploration_prob
    training, LDT             arch.halt_max_steps        if the board leaves (table in models/lattice.py)
    evaluation, halting=max   arch.eval_halt_max_steps   never
    evaluation, halting=act   arch.eval_halt_max_steps   if the Q head wants to (FPRM: if the residual is
                                                         small, SE-RRM: if all cells have p > 1/2)
    evaluation, Flow          arch.eval_halt_max_steps   never. `halting` has no effect
    evaluation, LDT           arch.eval_halt_max_steps   if the board is solved, or another sample of the
                                                         puzzle was solved first. `halting` has no effect
    trace of an answer        arch.eval_halt_max_steps   never

eval_halt_max_steps  If this key is null, arch.halt_max_steps applies. `evaluate.py halt_max_steps=8` and
                     `solve.py steps=8` replace the number for one evaluation. evaluate.py also takes a list.
                     Example: With halt_max_steps=[4,8], it runs 8 steps, and reports the metrics after step 4
                     and after step 8.
halting              A key of pretrain.py (for the evaluations in a run), evaluate.py and solve.py. The
                     default is max. An evaluation with max also reports the accuracy that act would give
                     (act_exact_accuracy), except with lists of steps or several samples.
trace of an answer   The answers after all thinking steps, for the report of a run (evaluation/trace.py).
residual (FPRM)      It is small if it is below arch.fp_thresh. A slot of FPRM halts in the same way if its
                     step size is below 0.001 (models/fprm.py).
p (SE-RRM)           The probability of the most likely symbol of a cell.
Q head               It wants to halt if q_halt > 0. This means that the answer is more likely right than
                     wrong. With arch.no_ACT_continue=false (HRM), it wants to halt if q_halt > q_continue.
exploration          In every training step, each slot explores with probability arch.halt_exploration_prob.
                     An exploring slot samples a minimum number of steps, uniform from 2 to the maximum
                     number. If the slot has made fewer steps on its puzzle, it does not halt in this training
                     step. The minimum counts only in this training step. The next one samples again for every
                     slot.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from config.architecture import ArchConfig
from dataset.loader import Batch
from models.carry import Carry, Prediction, Reasoning, StepOutput, where
from models.noise import with_step_noise
from models.random import SlotRng, sample_uniform

if TYPE_CHECKING:
    from models.network import Network


def sample_exploration(
    arch: ArchConfig, *, seed: int, step: int, batch_size: int, reasoning: Reasoning
) -> dict[str, np.ndarray]:
    """Samples how many thinking steps each slot must have made before it may halt, in one training step.

    Returns {"min_steps": int32 [batch_size]}. A slot explores with probability arch.halt_exploration_prob.
    The entry of an exploring slot is from 2 to reasoning.max_steps. All other entries are 0. If the
    probability is 0, or reasoning.max_steps is 1, returns {}. Runs on the host.

    step: The training step, from 1. batch_size: Size of the global batch. With another size, the same
    slots explore, but with other minimum numbers.
    """
    if not arch.halt_exploration_prob or reasoning.max_steps == 1:
        return {}
    explores, amount = sample_uniform(seed=seed, step=step, count=2 * batch_size).reshape(2, batch_size)
    num_steps = 2 + np.floor(amount * (reasoning.max_steps - 1))
    min_steps = np.where(explores < arch.halt_exploration_prob, num_steps, 0)
    return {"min_steps": min_steps.astype(np.int32)}


class HaltingModel(nn.Module):
    """A network, and the rule that decides how many thinking steps each puzzle gets.

    A slot is one position of the batch. Each slot works on one puzzle. A call of the model is one thinking
    step: it calls the network once on all slots. Then the rule decides which slots halt. Before the next
    thinking step, `refill` puts another puzzle into each halted slot.

    Attributes:
        network: The network, such as `models.trm.TRM`.
        reasoning: Settings of thinking steps in training, such as `max_steps`, after which every puzzle
            halts. `eval_reasoning` returns the settings for an evaluation.
    """

    def __init__(self, network: Network):
        super().__init__()
        self.network, arch = network, network.arch
        # Training always halts slots by the rule, whatever the key `halting` says about evaluations.
        self.reasoning = Reasoning.of_arch(arch, max_steps=arch.halt_max_steps, halting="act")

    def eval_reasoning(self, halting: Literal["max", "act"]) -> Reasoning:
        """Returns the settings for an evaluation, to pass to `refill` and to calls of the model.

        The field `max_steps` is arch.eval_halt_max_steps, or arch.halt_max_steps if that key is null.

        halting: If "max", every puzzle gets `max_steps` thinking steps. If "act", a puzzle may halt earlier.
        For LDT, the result always has "act".
        """
        arch = self.network.arch
        max_steps = arch.eval_halt_max_steps or arch.halt_max_steps
        halting = "act" if self.network.is_search else halting
        reasoning = Reasoning.of_arch(arch, max_steps=max_steps, halting=halting)
        return dataclasses.replace(reasoning, **arch.eval_changes)  # other cycles in evaluation (FPRM)

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns a carry in which every slot has halted.

        Pass the carry to `refill`, which then starts every slot on a new puzzle.

        batch: Puzzles, one for each slot.
        """
        steps = torch.zeros(len(batch.rows), dtype=torch.int32, device=batch.inputs.device)
        all_slots = torch.ones_like(steps, dtype=torch.bool)
        state = self.network.start(batch, self.reasoning, None, all_slots)
        return Carry(state, steps, all_slots, batch._replace(answers=None))

    @torch.no_grad()
    def refill(self, carry: Carry, batch: Batch, reasoning: Reasoning, rng: SlotRng | None = None) -> Carry:
        """Starts every halted slot on a new puzzle: slot i gets puzzle i of `batch`.

        If slot i has not halted, it keeps its puzzle and its state, and puzzle i of `batch` is not used.

        Args:
            carry: Carry after a thinking step. It does not change. Its field `halted` selects the slots.
            batch: New puzzles, one for each slot.
            reasoning: Settings of thinking steps. The field init_noise is the standard deviation of random
                initial hidden states. If init_noise is 0, the initial hidden states are not random.
            rng: Random numbers of the slots. If None, nothing in the initial states is random.

        Returns:
            The carry before the next thinking step. No slot in it has halted.
        """
        halted = carry.halted
        puzzles = zip(batch._replace(answers=None), carry.data, strict=True)
        data = Batch(*(where(halted, new, old) for new, old in puzzles if new is not None))
        # A network that needs the answers copies them to its state.
        fresh = self.network.start(data._replace(answers=batch.answers), reasoning, rng, halted)
        state = {name: where(halted, fresh[name], old) for name, old in carry.state.items()}
        return Carry(state, torch.where(halted, 0, carry.steps), torch.zeros_like(halted), data)

    def forward(self, carry: Carry, reasoning: Reasoning, rng: SlotRng | None = None) -> StepOutput:
        """Runs one thinking step of every slot, and decides which slots halt.

        Args:
            carry: Carry before the step: the puzzles, hidden states and step counts of all slots. `refill`
                returns it for new puzzles. For the next step on the same puzzles, pass the returned carry.
            reasoning: Settings, such as `max_steps` (the thinking steps after which a puzzle halts in any
                case), the number of cycles in a step, and the noise. `eval_reasoning` returns them for an
                evaluation, and training/schedule.py for a training step.
            rng: Random numbers of the slots. They are needed for noise, dropout and exploration
                (`sample_exploration`). LDT and Flow always need them.

        Returns:
            (carry, prediction). `carry` is the carry after the step. Its field `halted` is True for slots
                that halt. `prediction` contains the logits of the answers.
        """
        data, state = carry.data, with_step_noise(carry.state, reasoning, rng)
        state, prediction = self.network(
            state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, rng=rng
        )
        after = carry._replace(state=state, steps=carry.steps + 1)
        with torch.no_grad():
            halted = self.halts(after, prediction, reasoning, rng)
        return StepOutput(after._replace(halted=halted), prediction)

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, rng: SlotRng | None
    ) -> Tensor:
        """Returns which slots halt after a thinking step: bool [batch].

        The table in the docstring of this file lists the rules of each model.

        carry: Carry after the step. Its field `halted` is not read. rng: Random numbers of this step. In
        training, its field `arrays` contains the arrays from `Network.sample_randomness`, such as
        "min_steps".
        """
        is_last = carry.steps >= reasoning.max_steps
        if reasoning.halting == "max":
            return is_last
        wants_to_halt = self.network.wants_to_halt(carry.state, prediction, rng)
        # Only a training step has `min_steps` (`sample_exploration`).
        if rng is not None and "min_steps" in rng.arrays:
            wants_to_halt = wants_to_halt & (carry.steps >= rng.arrays["min_steps"])
        return is_last | wants_to_halt

    def blank_carry(self, num_slots: int, *, seq_len: int, device: torch.device) -> Carry:
        """Returns the carry at the start of a run. All its puzzles are empty, and all its slots have halted.

        So `refill` starts every slot on a new puzzle. The tensors share no memory, so a checkpoint can be
        loaded into them. If a slot stores several puzzles in training (LDT), the tensors are [num_slots,
        boards, ...].

        num_slots: Number of slots of this rank. seq_len: Number of cells (tokens) of a puzzle.
        """
        tokens = torch.zeros(num_slots, seq_len, dtype=torch.int32, device=device)
        rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
        boards = self.network.boards_per_slot
        tensors = self.initial_carry(Batch(tokens, tokens, rows.int(), rows)).tensors()
        if boards > 1:
            tensors = {
                name: tensor[:, None].expand(-1, boards, *tensor.shape[1:])
                for name, tensor in tensors.items()
            }
        # In an expanded tensor, several slots share memory. Copy it.
        return Carry.from_tensors({name: tensor.contiguous().clone() for name, tensor in tensors.items()})
