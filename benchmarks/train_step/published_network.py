"""The networks of the public code of HRM and TRM, one plain operation after the other (see `published`).

float32 weights are cast where they are used, in every cycle anew; rotary positions by concatenated halves.
Attention is torch's scaled_dot_product_attention, which TRM's code calls, and which on CUDA is what HRM's
calls from the flash-attn package. Where that package is missing, as on a CPU, HRM's code of commit 23cb8793
takes plain products, faster there for short sequences; `flash_attention` takes torch's all the same.

Parameters have the names of the published checkpoints, which are ours, and no values of their own.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Linear(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, *, has_bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class _TokenEmbedding(nn.Module):
    def __init__(self, num_tokens: int, size: int, *, dtype: torch.dtype):
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(num_tokens, size))
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding_weight.to(self.dtype))


class PuzzleEmbedding(nn.Module):
    """The table, and the rows of this step's slots, copied into a leaf that collects their gradient."""

    def __init__(self, num_rows: int, size: int, *, batch_size: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("weights", torch.empty(num_rows, size))
        self.register_buffer("rows", torch.zeros(batch_size, size, requires_grad=True), persistent=False)
        self.register_buffer("identifiers", torch.zeros(batch_size, dtype=torch.int32), persistent=False)
        self.dtype = dtype

    def forward(self, identifiers: Tensor) -> Tensor:
        with torch.no_grad():
            self.rows.copy_(self.weights[identifiers])
            self.identifiers.copy_(identifiers)
        return self.rows.to(self.dtype)


def _rms_norm(x: Tensor, *, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    mean_square = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def _quarter_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, length, heads, head_dim]; cos and sin, float32 [length, head_dim]."""
    wide = x.to(cos.dtype)
    return (wide * cos.unsqueeze(-2) + _quarter_turn(wide) * sin.unsqueeze(-2)).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, hidden_size: int, *, num_heads: int, has_plain_fallback: bool):
        super().__init__()
        self.num_heads, self.has_plain_fallback = num_heads, has_plain_fallback
        self.qkv_proj = _Linear(hidden_size, 3 * hidden_size)
        self.o_proj = _Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv_proj(x).view(batch, length, 3 * self.num_heads, -1).chunk(3, dim=2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [batch, heads, length, head_dim]
        if self.has_plain_fallback and x.device.type == "cpu":
            scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            mixed = torch.matmul(F.softmax(scores, dim=-1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class _SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, *, expansion: float):
        super().__init__()
        inner = math.ceil(round(expansion * hidden_size * 2 / 3) / 256) * 256
        self.gate_up_proj = _Linear(hidden_size, 2 * inner)
        self.down_proj = _Linear(inner, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class _Block(nn.Module):
    def __init__(self, arch: SimpleNamespace, *, flash_attention: bool):
        super().__init__()
        self.self_attn = _Attention(
            arch.hidden_size,
            num_heads=arch.num_heads,
            has_plain_fallback=arch.name == "hrm" and not flash_attention,
        )
        self.mlp = _SwiGLU(arch.hidden_size, expansion=arch.expansion)
        self.eps = arch.rms_norm_eps

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = _rms_norm(h + self.self_attn(h, cos, sin), eps=self.eps)
        return _rms_norm(h + self.mlp(h), eps=self.eps)


class _Level(nn.Module):
    def __init__(self, arch: SimpleNamespace, num_layers: int, *, flash_attention: bool):
        super().__init__()
        self.layers = nn.ModuleList(_Block(arch, flash_attention=flash_attention) for _ in range(num_layers))

    def forward(self, state: Tensor, injection: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = state + injection
        for layer in self.layers:
            h = layer(h, cos, sin)
        return h


class Network(nn.Module):
    """arch.name: hrm or trm, with rotary positions, attention and the published part with gradient."""

    def __init__(
        self,
        arch: SimpleNamespace,
        metadata: SimpleNamespace,
        *,
        batch_size: int,
        flash_attention: bool = False,
    ):
        super().__init__()
        self.arch, self.dtype = arch, getattr(torch, arch.forward_dtype)
        hidden, positions = arch.hidden_size, arch.puzzle_emb_positions
        self.embed_tokens = _TokenEmbedding(metadata.vocab_size, hidden, dtype=self.dtype)
        self.puzzle_emb = PuzzleEmbedding(
            metadata.num_puzzle_identifiers, arch.puzzle_emb_ndim, batch_size=batch_size, dtype=self.dtype
        )
        self.L_level = _Level(arch, arch.L_layers, flash_attention=flash_attention)
        if arch.name == "hrm":
            self.H_level = _Level(arch, arch.H_layers, flash_attention=flash_attention)
        self.lm_head = _Linear(hidden, metadata.vocab_size)
        self.q_head = _Linear(hidden, 2, has_bias=True)
        for name in ("H_init", "L_init"):
            self.register_buffer(name, torch.empty(hidden, dtype=self.dtype))

        head_dim = hidden // arch.num_heads
        frequencies = 1.0 / arch.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(metadata.seq_len + positions, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, z_H: Tensor, z_L: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The new z_H and z_L, detached; logits; q_halt; q_continue."""
        e = self._embed(data["inputs"], data["puzzle_identifiers"])
        if self.arch.name == "hrm":
            z_H, z_L = self._reason_as_hrm(z_H, z_L, e)
        else:
            z_H, z_L = self._reason_as_trm(z_H, z_L, e)
        logits = self.lm_head(z_H)[:, self.arch.puzzle_emb_positions :]
        q = self.q_head(z_H[:, 0]).to(torch.float32)
        return z_H.detach(), z_L.detach(), logits, q[..., 0], q[..., 1]

    def _embed(self, tokens: Tensor, identifiers: Tensor) -> Tensor:
        hidden, positions = self.arch.hidden_size, self.arch.puzzle_emb_positions
        rows = self.puzzle_emb(identifiers)
        if positions * hidden > rows.shape[-1]:
            rows = F.pad(rows, (0, positions * hidden - rows.shape[-1]))
        e = torch.cat((rows.view(-1, positions, hidden), self.embed_tokens(tokens)), dim=-2)
        return math.sqrt(hidden) * e

    def _reason_as_hrm(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        rotary, num_calls = (self.cos, self.sin), self.arch.H_cycles * self.arch.L_cycles
        with torch.no_grad():
            for call in range(1, num_calls):
                z_L = self.L_level(z_L, z_H + e, *rotary)
                if call % self.arch.L_cycles == 0:
                    z_H = self.H_level(z_H, z_L, *rotary)
        z_L = self.L_level(z_L, z_H + e, *rotary)
        return self.H_level(z_H, z_L, *rotary), z_L

    def _reason_as_trm(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for _ in range(self.arch.H_cycles - 1):
                z_H, z_L = self._trm_cycle(z_H, z_L, e)
        return self._trm_cycle(z_H, z_L, e)

    def _trm_cycle(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.arch.L_cycles):
            z_L = self.L_level(z_L, z_H + e, self.cos, self.sin)
        return self.L_level(z_H, z_L, self.cos, self.sin), z_L
