"""Looped Flows (arXiv 2609.11801): TRM whose thinking steps turn noise into an answer.

A slot starts from noise x0, normal numbers of shape [cells, vocab]. The interpolant (1 - t) x0 + t x1 leads
from x0 at time t = 0 to the right answer x1 (one-hot) at t = 1. A thinking step reads a point x of this path
and its time t, and predicts x1. All thinking steps on a puzzle have the same x0. The hidden states z_H and
z_L continue from one thinking step to the next, as in TRM.

Thinking step      `Flow.forward` below: the H cycles of TRM. By default, only the calls of the last H cycle
                   have gradient.
Training           Step i reads the interpolant at a random time t_i. The times of a puzzle's steps increase
                   (`Flow._interpolate`). With arch.own_predictions, a step after the first one may read a
                   path that ends in the prediction of the step before, in place of x1.
Evaluation         n thinking steps at the times i / n. Each step moves x towards the predicted answer
                   (`Flow._renoise` and `Flow._move`). With sde_noise > 0 (the default), each step first adds
                   noise to x (the paper's SDE). With sde_noise=0, only x0 is random (the ODE).
Halting            Training: A slot halts if q_halt > 0, or after 16 thinking steps, with the exploration of
                   TRM. Evaluation: A slot never halts before step n. If a puzzle has several samples, the one
                   with the largest q_halt gives the answer (select=q_head).
Loss               The stablemax cross-entropy of the answer, plus 0.5 times the binary cross-entropy of
                   q_halt, as in TRM (models/objective.py). The target of the answer is the label, also in a
                   step that reads the prediction of the step before.

The paper leaves the embedded puzzle out if the answer contains it, as in Sudoku: given cells of x are then
always right. Here every puzzle is embedded, as the paper does for ARC and graph coloring, and x covers all
cells. So the model needs no rule that says which cells are given.

The state of a slot:

    z_H, z_L  [batch, positions, hidden]     in the forward dtype, as in TRM
    x         float32 [batch, cells, vocab]  in training always x0. In evaluation the point of the path
    guess     float32 [batch, cells, vocab]  in training the prediction of the step before. In evaluation 0
    target    int32 [batch, cells]           in training the right answer. In a cell without a label, it is
                                             the input. In evaluation always the input, so no label is read
    time      float32 [batch]                in training the time of the step before. In evaluation 0
    step      int32 [batch]                  number of steps so far
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import FlowConfig
from dataset.loader import Batch
from dataset.metadata import IGNORE_LABEL_ID, Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State, where
from models.layers import Linear, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.objective import PROBABILITIES
from models.random import SlotRng


class Flow(TokenNetwork):
    """The network of Looped Flows (arXiv 2609.11801). It turns noise into an answer.

    Each thinking step reads a point x on a path from noise x0 (time t = 0) to an answer (t = 1), and predicts
    the right answer:

        e = embedded puzzle + sqrt(hidden_size) x @ W_x (at the cells) + time_mlp(t)
        H_cycles times:
            L_cycles times:  z_L = L(z_L, z_H + e)
            once:            z_H = L(z_H, z_L)
        logits = lm_head(z_H at the cells)
        q_halt = q_head(z_H at position 0; with arch.conv=instead, the mean of z_H over positions)

    The positions are those of the puzzle embedding, if the model has one, and then the cells. x is [batch,
    cells, vocab]. In training, x is by default (1 - t) x0 + t * (right answer, one-hot) at a random time t.
    In an evaluation, x starts as x0, and each thinking step moves x towards the predicted answer. If
    sde_noise > 0, each thinking step of an evaluation first moves x back in time with new noise.

    W_x is a learned matrix, and time_mlp a small MLP. z_H and z_L are hidden states, [batch, positions,
    hidden]. L(z, y) applies a stack of transformer blocks to z + y. All calls of L in the last
    `gradient_cycles` H cycles have gradient. If gradient_cycles is 0, only the last call for each state has
    gradient. q_halt is the logit of the probability that the answer is right. The Q head also has the output
    q_continue, which has no effect.
    """

    is_random = True

    def __init__(self, arch: FlowConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        width, self.vocab_size = arch.hidden_size, metadata.vocab_size
        self.noise_std = self.vocab_size**-0.5 if arch.x0_std is None else arch.x0_std
        self.register_buffer("H_init", truncated_normal(width, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(width, std=1).to(self.dtype))
        self.W_x = nn.Parameter(truncated_normal(self.vocab_size, width, std=width**-0.5))
        self.time_mlp = nn.Sequential(Linear(1, width, bias=True), nn.SiLU(), Linear(width, width, bias=True))
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = Linear(width, self.vocab_size), build_q_head(width)

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.num_puzzle_positions + seq_len, self.arch.hidden_size
        device = self.H_init.device
        x = torch.zeros(batch_size, seq_len, self.vocab_size, device=device)
        target = torch.zeros(batch_size, seq_len, dtype=torch.int32, device=device)
        numbers = torch.zeros(batch_size, device=device)
        state = {"z_H": self.H_init.expand(shape), "z_L": self.L_init.expand(shape), "target": target}
        return state | {"x": x, "guess": x.clone(), "time": numbers, "step": numbers.int()}

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        state = super().start(data, reasoning, rng, fresh)
        if rng is not None:  # otherwise, x0 is 0
            slots = fresh.nonzero().flatten()
            noise = self.noise_std * rng[slots].normal(state["x"].shape[1:], use="flow x0")
            state["x"] = state["x"].index_copy(0, slots, noise)
        has_target = (data.labels != IGNORE_LABEL_ID) & self.training
        return state | {"target": torch.where(has_target, data.labels, data.inputs).int()}

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, Prediction]:
        assert rng is not None, "a flow needs rng"
        x, t = (self._interpolate if self.training else self._renoise)(state, reasoning, rng)
        of_x = math.sqrt(self.arch.hidden_size) * (x.to(self.dtype) @ self.W_x.to(self.dtype))
        e = self.embed(inputs, puzzle_identifiers) + F.pad(of_x, (0, 0, self.num_puzzle_positions, 0))
        e = e + self.time_mlp(t[:, None]).to(e.dtype)[:, None]  # the same vector at all positions
        # Up to the prediction, the code below is that of models/trm.py.
        L = perturbed(self.L_level, reasoning, rng, self.rotary)
        z_H, z_L = state["z_H"], state["z_L"]
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles
        for cycle in range(reasoning.H_cycles):
            has_gradient = cycle >= first_with_gradient
            is_last_cycle = cycle == reasoning.H_cycles - 1
            z_H_and_e = z_H + e
            for call in range(reasoning.L_cycles):
                is_last_call = is_last_cycle and call == reasoning.L_cycles - 1
                with gradient_if(has_gradient or is_last_call):
                    z_L = L(z_L, z_H_and_e)
            with gradient_if(has_gradient or is_last_cycle):
                z_H = L(z_H, z_L)
        prediction = self.answer(z_H)
        # The paper does not say how logits become the predicted answer. Here, the loss decides: stablemax or
        # softmax.
        guess = PROBABILITIES[self.arch.loss.loss_type](prediction.logits.detach().float())
        if self.training:
            after = {"guess": guess, "time": t}
        else:
            after = {"x": self._move(x, t, guess, state["step"], reasoning)}
        after |= {"z_H": z_H.detach(), "z_L": z_L.detach(), "step": state["step"] + 1}
        return state | after, prediction

    def wants_to_halt(self, state: State, prediction: Prediction, rng: SlotRng | None = None) -> Tensor:
        # In evaluation, the path always has all of its steps.
        return super().wants_to_halt(state, prediction, rng) & self.training

    def _interpolate(self, state: State, reasoning: Reasoning, rng: SlotRng) -> tuple[Tensor, Tensor]:
        # Returns the input x of a training step, [batch, cells, vocab], and its time t, [batch].
        #
        # times=sorted        The k = `max_steps` steps have the k smallest of k + 1 uniform numbers, sorted.
        # times=random_start  The first time is uniform in [0, 1]. The others are the k - 1 smallest of k
        #                     uniform numbers between the first time and 1, sorted.
        #
        # Each step samples only its own time. If the time before was t', and m of the uniform numbers are
        # above t', the smallest of these m numbers is t' + (1 - t') (1 - U^(1/m)), with a uniform U.
        step, before = state["step"], state["time"]
        of_time, of_guess = rng.uniform((2,), use="flow time and guess").unbind(1)
        m = reasoning.max_steps + 1 - step
        if self.arch.times == "random_start":
            m = torch.where(step == 0, 1, m)
        t = before + (1 - before) * (1 - of_time ** (1 / m))
        end = F.one_hot(state["target"].long(), self.vocab_size).to(state["x"].dtype)
        if self.arch.own_predictions is not None:
            is_own = (step > 0) & (of_guess < reasoning.progress / self.arch.own_predictions)
            end = where(is_own, state["guess"], end)
        return torch.lerp(state["x"], end, t[:, None, None]), t

    def _renoise(self, state: State, reasoning: Reasoning, rng: SlotRng) -> tuple[Tensor, Tensor]:
        # Returns x with more noise, [batch, cells, vocab], and its time u, [batch]. If x has the distribution
        # of the interpolant at time t = step / n, the result has that at time u = a t.
        n = reasoning.max_steps
        a = max(1 - reasoning.sde_noise / n, 0.0)
        u = a * state["step"] / n
        if a == 1:
            return state["x"], u
        std = self.noise_std * ((1 - u).square() - (a - u).square()).sqrt()
        noise = rng.normal(state["x"].shape[1:], use="flow noise")
        return a * state["x"] + std[:, None, None] * noise, u

    def _move(self, x: Tensor, u: Tensor, guess: Tensor, step: Tensor, reasoning: Reasoning) -> Tensor:
        # Moves x on a straight line to the prediction: from time u to (step + 1) / n. At time 1, the result
        # is the prediction.
        fraction = ((step + 1) / reasoning.max_steps - u) / (1 - u)
        return torch.lerp(x, guess, fraction[:, None, None])


NETWORK = Flow
