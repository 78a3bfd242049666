"""The Universal Reasoning Model (URM, arXiv 2512.14693): one state, updated repeatedly by the same blocks.

In training, a slot halts after 16 thinking steps, or earlier if q_halt > 0 and exploration allows it. The
puzzle embedding is a learned vector for each puzzle identifier, in position 0, before the cells. The loss is
the stablemax cross-entropy of the answer, plus 0.5 times the binary cross-entropy of q_halt. Halting and loss
are the same as in TRM (models/trm.py).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import URMConfig
from dataset.metadata import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.layers import Linear, gated, inner_width, truncated_normal
from models.network import TokenNetwork, build_q_head, gradient_if
from models.noise import perturbed
from models.random import SlotRng


class ConvSwiGLU(nn.Module):
    """A gated MLP with a convolution: down_proj(silu(conv(silu(gate) * up))).

    gate and up are the two halves of gate_up_proj(x). x is [batch, positions, width]. conv is a depthwise
    convolution over the positions. With u = silu(gate) * up, the output of conv at position p is

        w0 * u[p - 1] + w1 * u[p] + bias,  where u[-1] = 0

    w0, w1 and bias are learned vectors with a number for each feature of u.
    """

    def __init__(self, width: int, *, expansion: float):
        super().__init__()
        inner = inner_width(width, expansion)
        self.gate_up_proj = Linear(width, 2 * inner)
        self.dwconv = nn.Conv1d(inner, inner, kernel_size=2, groups=inner)
        self.down_proj = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        u = gated(x, self.gate_up_proj)
        (before, here), bias = self.dwconv.weight.to(x.dtype).unbind(-1), self.dwconv.bias.to(x.dtype)
        shifted = F.pad(u, (0, 0, 1, -1))
        return self.down_proj(F.silu(shifted * before.squeeze(1) + u * here.squeeze(1) + bias))


class URM(TokenNetwork):
    """The network of URM (arXiv 2512.14693). The same blocks update one hidden state repeatedly.

    One call of the network, with the embedded puzzle e and a stack L of `L_layers` transformer blocks:

        H_cycles x L_cycles times:  z_H = L(z_H + e)
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0; with arch.conv=instead, the mean over positions)

    By default, H_cycles is 2, L_cycles is 6, and the stack has 4 blocks. q_halt decides when a puzzle halts.
    q_continue has no effect by default.

    e and z_H are [batch, positions, hidden] in the dtype of the activations. The first positions contain the
    puzzle embedding (by default 1 position). The cells (tokens) of the puzzle follow.

    All calls of L in the last `gradient_cycles` H cycles have gradient (by default in the last one). If
    gradient_cycles is 0, only the last call has gradient. The returned state is detached.
    """

    def __init__(self, arch: URMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The state of a slot that starts: a random vector, equal at all positions, never trained.
        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        # The order of creation (heads, level) fixes the initial weights. See models/trm.py.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        self.L_level = Level(build_block(arch, metadata, mlp=ConvSwiGLU) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = lm_head, q_head

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.num_puzzle_positions + seq_len, self.arch.hidden_size
        return {"z_H": self.H_init.expand(shape)}

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
        z_H = state["z_H"]
        num_calls = reasoning.H_cycles * reasoning.L_cycles
        num_with_gradient = max(self.arch.gradient_cycles * reasoning.L_cycles, 1)
        for call in range(num_calls):
            with gradient_if(call >= num_calls - num_with_gradient):
                z_H = L(z_H, e)
        return {"z_H": z_H.detach()}, self.answer(z_H)


NETWORK = URM
