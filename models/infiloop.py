"""TRM with InfiLoop's gate (arXiv 2610.11570): a state is a weighted mean of all results of the level.

models/trm.py explains all other parts: gradient, puzzle embedding, halting and loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import InfiLoopConfig
from dataset.metadata import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, rms_norm, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng

_FIRST_DECAY = 0.55  # initial b, the best one in the paper's experiments


class Gate(nn.Module):
    """InfiLoop's update of a state: a weighted mean of the results of all calls so far.

    A slot starts from z_0. The calls of the level return z_1, z_2, and so on. The state after call t is

        N_t / D_t  with  N_t = b N_{t-1} + exp(s_t) z_t,  N_0 = exp(s_0) z_0
                         D_t = b D_{t-1} + exp(s_t),      D_0 = exp(s_0),     s_t = q . rms(z_t)

    q, [width], and b in (0, 1) are learned. A slot keeps log D, float32 [batch, positions], instead of D,
    because exp(s) may overflow. log D is -inf if the slot has just started.
    """

    def __init__(self, width: int, *, eps: float):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(width))
        self.beta_logit = nn.Parameter(torch.tensor(_FIRST_DECAY, device="cpu").logit())
        self.eps = eps

    def score(self, z: Tensor) -> Tensor:
        """Returns q . rms(z), the logarithm of the weight of z in the mean: float32 [batch, positions]."""
        return rms_norm(z.float(), eps=self.eps) @ self.q

    def start(self, z: Tensor, log_D: Tensor) -> Tensor:
        """Returns log D at the start of a thinking step, float32 [batch, positions].

        D is the sum of the weights of all results so far (docstring of the class). If a puzzle has just
        started, log_D is -inf, and becomes the score of its initial state z. Otherwise log_D stays unchanged.

        z: State, [batch, positions, width]. log_D: Value after the previous thinking step.
        """
        return torch.where(log_D.isinf(), self.score(z), log_D)

    def forward(self, z: Tensor, new: Tensor, log_D: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the state and log D after a call of the level.

        The state is a weighted mean of z and new. D is the sum of all weights so far (docstring of the
        class).

        z: State before the call. new: Result of the call. log_D: Value before the call.
        """
        score, faded = self.score(new), log_D + F.logsigmoid(self.beta_logit)
        weight = torch.sigmoid(score - faded).to(z.dtype)[..., None]
        return torch.lerp(z, new, weight), torch.logaddexp(faded, score)


class InfiLoop(TokenNetwork):
    """The network of TRM with a gate for each state. A slot keeps z_H, z_L, log_D_H and log_D_L.

    One thinking step, with the embedded puzzle e and the level L (a stack of `L_layers` transformer blocks):

        H_cycles times:
            L_cycles times:  z_L, log_D_L = gate_L(z_L, L(z_L + z_H + e), log_D_L)
            once:            z_H, log_D_H = gate_H(z_H, L(z_H + z_L), log_D_H)

    gate_H and gate_L are two `Gate` modules. The logits and Q values are read from z_H, as in
    `models.trm.TRM`. The shapes and the calls with gradient are also the same. log_D_H and log_D_L are
    float32 [batch, positions].
    """

    undecayed = ("gate_H.q", "gate_H.beta_logit", "gate_L.q", "gate_L.beta_logit")

    def __init__(self, arch: InfiLoopConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # The order of creation (heads, level) fixes the initial weights. See models/trm.py.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        self.L_level = Level(build_block(arch, metadata) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = lm_head, q_head
        self.gate_H, self.gate_L = (Gate(arch.hidden_size, eps=arch.rms_norm_eps) for _ in range(2))

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.num_puzzle_positions + seq_len, self.arch.hidden_size
        just_started = torch.full(shape[:-1], -torch.inf, device=self.H_init.device)
        z = {"z_H": self.H_init.expand(shape), "z_L": self.L_init.expand(shape)}
        return z | {"log_D_H": just_started, "log_D_L": just_started.clone()}

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, Prediction]:
        e = self.embed(inputs, puzzle_identifiers)
        # L(z, x) is blocks(z + x), in the shape of z. The formulas above write it as L(z + x). `perturbed`
        # adds damping and noise (models/noise.py). Both are off by default.
        L = perturbed(self.L_level, reasoning, rng, self.rotary)
        z_H, z_L = state["z_H"], state["z_L"]
        log_D_H = self.gate_H.start(z_H, state["log_D_H"])
        log_D_L = self.gate_L.start(z_L, state["log_D_L"])
        # The first H cycle in which all calls have gradient. With gradient_cycles=0, there is no such cycle.
        first_with_gradient = reasoning.H_cycles - self.arch.gradient_cycles
        for cycle in range(reasoning.H_cycles):
            has_gradient, is_last_cycle = cycle >= first_with_gradient, cycle == reasoning.H_cycles - 1
            x = z_H + e  # all calls for z_L in a cycle read the same x
            for call in range(reasoning.L_cycles):
                is_last_call = is_last_cycle and call == reasoning.L_cycles - 1
                with gradient_if(has_gradient or is_last_call):
                    z_L, log_D_L = self.gate_L(z_L, L(z_L, x), log_D_L)
            with gradient_if(has_gradient or is_last_cycle):
                z_H, log_D_H = self.gate_H(z_H, L(z_H, z_L), log_D_H)
        after = {"z_H": z_H, "z_L": z_L, "log_D_H": log_D_H, "log_D_L": log_D_L}
        return {name: tensor.detach() for name, tensor in after.items()}, self.answer(z_H)


NETWORK = InfiLoop
