"""The Fixed-Point Reasoning Model (FPRM, arXiv 2606.18206): updates one state until it hardly changes.

A slot wants to halt if its state hardly changes any more, or if its step size w has become very small. The Q
head is trained, but it does not decide about halting. The table in models/halting.py lists when a slot halts.
The loss is the stablemax cross-entropy of the answer plus 0.5 times the binary cross-entropy of q_halt.
models/trm.py describes the puzzle embedding and the loss, which are the same as in TRM.

By default (config/arch/fprm.yaml), a thinking step has 6 calls of a level of 2 blocks in training, and 1 call
in evaluation. `decay` in the formulas of `FPRM` is arch.stepsize_decay_train or arch.stepsize_decay_eval.

The state of a slot:

    z_H        [batch, positions, hidden]  y in the paper, in the forward dtype. Initially noise. With
                                           init_noise=0, initially H_init, or 0 if fixed_init_std is 0.
                                           The positions: puzzle embedding, then the cells
    step_size  float32 [batch]             w, initially 1
    residual   float32 [batch]             r of the last call
    best       float32 [batch]             smallest r so far
    patience   float32 [batch]             number of calls without a new minimum until w shrinks
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import FPRMConfig
from dataset.metadata import Metadata, columns_of
from models.blocks import Level
from models.carry import Prediction, Reasoning, State
from models.layers import Attention, Linear, SwiGLU, rms_norm, truncated_normal
from models.network import TokenNetwork, build_q_head
from models.noise import perturb
from models.random import SlotRng

_KERNELS = {"conv1d": 4, "conv2d": 3}
_LEAST_STEP = 1e-3  # a slot with a smaller step size wants to halt


class ScaledBlock(nn.Module):
    """A pre-norm transformer block that scales its residual connections.

        y = a y + b self_attn(rms_norm(y))
        y = a y + b mlp(rms_norm(y))

    y is [batch, positions, hidden]. The factors a and b, [hidden], are arguments of `forward`.
    """

    def __init__(self, arch: FPRMConfig):
        super().__init__()
        self.self_attn = Attention(arch.hidden_size, num_heads=arch.num_heads)
        self.mlp = SwiGLU(arch.hidden_size, expansion=arch.expansion)
        self.eps = arch.rms_norm_eps

    def forward(self, y: Tensor, rotary: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        y = a * y + b * self.self_attn(rms_norm(y, eps=self.eps), rotary)
        return a * y + b * self.mlp(rms_norm(y, eps=self.eps))


class FixedPointLevel(Level):
    """The function f of FPRM: f(y) = blocks(a2 conv(y) + b2 e).

    FPRM calls f repeatedly, until the hidden state y hardly changes. y and the embedded puzzle e are [batch,
    positions, hidden]. The blocks are `ScaledBlock` modules with the factors a1 and b1. With
    norm_placement=output, an RMS norm follows the blocks.

    conv is a depthwise convolution over the cells. It does not change the positions before the cells, which
    contain the puzzle embedding. With conv_type=conv2d, its kernel has 3 x 3 cells of the grid. With
    conv_type=conv1d, its kernel has a cell and the 3 cells before it.

    The factors a1 and a2, [hidden] in (0, 1), are learned. b1 and b2 are computed from them, so that the size
    of y stays about the same.
    """

    def __init__(self, arch: FPRMConfig, metadata: Metadata):
        super().__init__(ScaledBlock(arch) for _ in range(arch.L_layers))
        self.num_layers = arch.L_layers  # of all pipeline stages
        width, self.num_before, self.eps = arch.hidden_size, arch.num_puzzle_positions, arch.rms_norm_eps
        for name, first in (("alpha_1_param", arch.alpha_1_init), ("alpha_2_param", arch.alpha_2_init)):
            self.register_parameter(name, nn.Parameter(torch.full((width,), first, device="cpu").logit()))
        self.has_grid, self.has_last_norm = arch.conv_type == "conv2d", arch.norm_placement == "output"
        convolution = nn.Conv2d if self.has_grid else nn.Conv1d
        self.conv = convolution(width, width, _KERNELS[arch.conv_type], groups=width, bias=False)
        if self.has_grid:
            self.num_columns = columns_of(metadata, needed_by="arch.conv_type=conv2d")

    def forward(self, y: Tensor, e: Tensor, rotary: Tensor | None) -> Tensor:
        a1, a2 = self.alpha_1_param.sigmoid(), self.alpha_2_param.sigmoid()
        power = a1 ** (2 * self.num_layers)
        b2 = 1 - a2 * power
        b1 = b2 * (1 - a1) / (1 - power + 1e-5)
        a1, b1, a2, b2 = (factor.to(y.dtype) for factor in (a1, b1, a2, b2))
        y = super().forward(a2 * self._convolve(y), b2 * e, rotary, a1, b1)
        return rms_norm(y, eps=self.eps) if self.has_last_norm else y

    def _convolve(self, y: Tensor) -> Tensor:
        before, cells = y[:, : self.num_before], y[:, self.num_before :].transpose(1, 2)
        weight, groups = self.conv.weight.to(y.dtype), y.shape[-1]
        if self.has_grid:
            grid = cells.unflatten(2, (-1, self.num_columns))
            cells = F.conv2d(grid, weight, padding=1, groups=groups).flatten(2)
        else:
            cells = F.conv1d(F.pad(cells, (weight.shape[-1] - 1, 0)), weight, groups=groups)
        return torch.cat((before, cells.transpose(1, 2)), dim=1)


class FPRM(TokenNetwork):
    """The network of FPRM (arXiv 2606.18206): updates one hidden state until it hardly changes.

    One thinking step, with the hidden state z_H, the embedded puzzle e, and the function f that
    `FixedPointLevel` computes:

        L_cycles times:
            z = f(z_H)
            r = max over positions of (max over features of |z_H - z|) / (max over features of |z|)
            z_H = z_H + w (z - z_H)
            w = decay * w  if r has had no new minimum for `decay_patience` calls of f, and r >= fp_thresh
        logits = lm_head(z_H at the cells)
        q_halt, q_continue = q_head(z_H at position 0)

    r is the residual of a puzzle, and w its step size, initially 1. decay, decay_patience and fp_thresh come
    from the config. The network wants to halt if r < fp_thresh or w < 0.001. All calls of f have gradient.
    The returned state is detached.
    """

    undecayed = ("L_level.alpha_1_param", "L_level.alpha_2_param")

    def __init__(self, arch: FPRMConfig, metadata: Metadata):
        super().__init__(arch, metadata)  # builds embed_tokens, puzzle_emb, embed_pos and rotary
        # The order of creation (heads, level) fixes the initial weights. See models/trm.py.
        lm_head, q_head = Linear(arch.hidden_size, metadata.vocab_size), build_q_head(arch.hidden_size)
        self.L_level = FixedPointLevel(arch, metadata)
        self.lm_head, self.q_head = lm_head, q_head
        if arch.fixed_init_std:
            fixed = truncated_normal(arch.hidden_size, std=arch.fixed_init_std)
            self.register_buffer("H_init", fixed.to(self.dtype))

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        numbers = torch.ones(batch_size, dtype=torch.float32, device=self.lm_head.weight.device)
        shape = batch_size, self.num_puzzle_positions + seq_len, self.arch.hidden_size
        z_H = numbers.to(self.dtype).new_zeros(shape)
        if self.arch.fixed_init_std:
            z_H = self.H_init.expand(shape)
        unknown, patience = numbers * torch.inf, numbers * self.arch.decay_patience
        return {"z_H": z_H, "step_size": numbers, "patience": patience, "best": unknown, "residual": unknown}

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
        for call in range(reasoning.L_cycles):
            y, step_size = state["z_H"], state["step_size"].to(e.dtype)[:, None, None]
            z = self.L_level(y, e, self.rotary)
            new = torch.lerp(y, z, step_size)
            new = {"z_H": perturb(y, new, reasoning, rng, use=f"z_H {call}")}
            state = state | new | self._judge(state, y.detach(), z.detach())
        return {name: tensor.detach() for name, tensor in state.items()}, self.answer(state["z_H"])

    def wants_to_halt(self, state: State, prediction: Prediction, rng: SlotRng | None = None) -> Tensor:
        return (state["residual"] < self.arch.fp_thresh) | (state["step_size"] < _LEAST_STEP)

    def _judge(self, state: State, y: Tensor, z: Tensor) -> State:
        # state: State before a call of the level. y, z: Input and result of this call.
        change, size = (values.float().abs().amax(-1) for values in (y - z, z))
        residual = (change / (size + 1e-8)).amax(-1)
        full = torch.full_like(state["patience"], self.arch.decay_patience)
        patience = torch.where(residual < state["best"], full, state["patience"] - 1)
        is_stuck = (patience <= 0) & (residual >= self.arch.fp_thresh)
        decay = self.arch.stepsize_decay_train if self.training else self.arch.stepsize_decay_eval
        return {
            "step_size": torch.where(is_stuck, state["step_size"] * decay, state["step_size"]),
            "patience": torch.where(is_stuck, full, patience),
            "best": torch.minimum(residual, state["best"]),
            "residual": residual,
        }


NETWORK = FPRM
