"""The Universal Reasoning Model (URM, arXiv 2512.14693): one state, updated repeatedly by the same blocks."""

import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import URMConfig
from dataset.format import Metadata
from models.blocks import Level, build_block
from models.carry import Prediction, Reasoning, State
from models.embedding import build_positions, build_puzzle_table, embed_puzzle
from models.layers import Embedding, Linear, gated, inner_width, truncated_normal
from models.network import Network
from models.q_head import QHead, QLearning
from models.random import Draws
from models.updates import gradient, update, with_step_noise


class ConvSwiGLU(nn.Module):
    """A SwiGLU with a depthwise convolution over the positions: down(silu(conv(silu(gate) * up))).

    conv turns u into v[p] = w0 u[p - 1] + w1 u[p] + bias, u[-1] = 0, over puzzle embedding and cells.
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


class URM(Network):
    """The network of URM. Its state z_H is [batch, positions, hidden]: the puzzle embedding, then cells.

    A thinking step, with a level L (a stack of blocks) and the embedded puzzle e: z_H = L(z_H + e),
    H_cycles x L_cycles times. The last `gradient_cycles` H cycles carry gradient; 0: only the last call does.
    """

    objective_class = QLearning

    def __init__(self, arch: URMConfig, metadata: Metadata):
        super().__init__(arch)
        width = arch.hidden_size

        # Weights are drawn in an order that recorded results depend on, and registered in the order of use.
        self.embed_tokens = Embedding(metadata.vocab_size, width, std=width**-0.5, dtype=self.dtype)
        self.puzzle_emb = build_puzzle_table(arch, metadata, width=arch.puzzle_emb_ndim)
        self.embed_pos, rotary = build_positions(arch, metadata, dtype=self.dtype)
        self.register_buffer("rotary", rotary, persistent=False)
        self.register_buffer("H_init", truncated_normal(width, std=1).to(self.dtype))  # never trained
        lm_head, q_head = Linear(width, metadata.vocab_size), QHead(width, reads_mean=arch.conv == "instead")
        self.L_level = Level(build_block(arch, metadata, mlp=ConvSwiGLU) for _ in range(arch.L_layers))
        self.lm_head, self.q_head = lm_head, q_head

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        shape = batch_size, self.arch.num_puzzle_positions + seq_len, self.arch.hidden_size
        return {"z_H": self.H_init.expand(shape)}

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        arch = self.arch
        z_H = with_step_noise(state, reasoning, draws)["z_H"]
        e = embed_puzzle(
            inputs,
            puzzle_identifiers,
            tokens=self.embed_tokens,
            puzzles=self.puzzle_emb,
            positions=self.embed_pos,
            num_puzzle_positions=arch.num_puzzle_positions,
        )
        num_calls = reasoning.H_cycles * reasoning.L_cycles
        for call in range(num_calls):
            with gradient(call >= num_calls - (arch.gradient_cycles * reasoning.L_cycles or 1)):
                z_H = update(z_H, self.L_level(z_H, e, self.rotary), reasoning, draws, use=f"z_H {call}")

        logits, q = self.lm_head(z_H)[:, arch.num_puzzle_positions :], self.q_head(z_H)
        return {"z_H": z_H.detach()}, Prediction(logits, q[:, 0], q[:, 1])


NETWORK = URM
