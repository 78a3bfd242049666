"""TRM with InfiLoop's gate (arXiv 2610.11570): a state is a weighted mean of the results of its calls.

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
    """Computes the weighted mean of an initial hidden state and the results of all calls for this state.

    If z_0 is the initial state and z_t the result of call t, the state after call t is N_t / D_t:

        N_t = b N_{t-1} + exp(s_t) z_t,  N_0 = exp(s_0) z_0
        D_t = b D_{t-1} + exp(s_t),      D_0 = exp(s_0)
        s_t = q . rms_norm(z_t)

    The vector q, [width], and the number b in (0, 1) are learned. The methods use log D, float32 [batch,
    positions], instead of D, because exp(s) may overflow.
    """

    def __init__(self, width: int, *, eps: float):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(width))
        self.beta_logit = nn.Parameter(torch.tensor(_FIRST_DECAY, device="cpu").logit())
        self.eps = eps

    def score(self, z: Tensor) -> Tensor:
        return rms_norm(z.float(), eps=self.eps) @ self.q  # s, float32 [batch, positions]

    # log D at the start of a thinking step. It is -inf for a puzzle that has just started.
    def start(self, z: Tensor, log_D: Tensor) -> Tensor:
        return torch.where(log_D.isinf(), self.score(z), log_D)

    def forward(self, z: Tensor, new: Tensor, log_D: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the result of a call to the weighted mean of the initial state and all earlier results.

        Returns the new mean, which is the hidden state after the call, and the new log D. D is the sum of all
        weights of the mean. In each call, a learned factor shrinks the earlier weights.

        z: Mean before the call, which is the hidden state, [batch, positions, width].
        new: Result of the call, in the same shape.
        log_D: Logarithm of D before the call, float32 [batch, positions].
        """
        score, faded = self.score(new), log_D + F.logsigmoid(self.beta_logit)
        weight = torch.sigmoid(score - faded).to(z.dtype)[..., None]
        return torch.lerp(z, new, weight), torch.logaddexp(faded, score)


class InfiLoop(TokenNetwork):
    """The network of InfiLoop (arXiv 2610.11570), a variant of TRM (arXiv 2510.04871).

    Each hidden state is a weighted mean of its initial value and the results of all calls so far (`Gate`),
    also of calls in earlier thinking steps on the puzzle. One call of the network,
    with the embedded puzzle e and a stack L of `L_layers` transformer blocks:

        H_cycles times:
            L_cycles times:  z_L, log_D_L = gate_L(z_L, L(z_L + z_H + e), log_D_L)
            once:            z_H, log_D_H = gate_H(z_H, L(z_H + z_L), log_D_H)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0; with arch.conv=instead, the mean over positions)

    The hidden states z_H and z_L are [batch, positions, hidden]. log_D_H and log_D_L are float32 [batch,
    positions]. All calls in the last `gradient_cycles` H cycles have gradient (by default in the last one).
    If gradient_cycles is 0, only the last call for each state has gradient.
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
        # L(z, x) is blocks(z + x). `perturbed` adds damping and noise (models/noise.py), by default none.
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
