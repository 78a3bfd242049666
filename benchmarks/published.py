"""The training step of the public code of HRM and TRM, as the baseline of speed benchmarks.

The public code is the code that the authors of these models published. This is a rewrite that computes in the
same way:

- float32 weights are cast in every use.
- Rotary positions rotate concatenated halves.
- The target of q_continue needs a second call of the network.
- stablemax computes in float64.
- Each parameter is updated separately, and gradients are freed.
- The host reads the metrics in every step.
- For TRM, attention is scaled_dot_product_attention of torch. On CUDA, the attention of HRM is the same. It
  equals the flash-attn call of the public code. On a CPU, the attention of HRM consists of plain matrix
  products, as in the public code (at 23cb8793) without flash-attn. They are faster for short inputs. With
  `flash_attention=True`, it is scaled_dot_product_attention there too.

On CUDA, the public code has a fused kernel for the dense optimizer. This module has no such kernel. On CUDA,
the public code also compiles the complete model. This module does so with `compile_model=True`.
tests/test_published.py checks that the step equals `training.step`, except for puzzles without labels and for
the random numbers of exploration. Weights have the published names.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.worlds import TOTAL_STEPS
from dataset.metadata import IGNORE_LABEL_ID, Metadata
from optimizers.learning_rate import learning_rates


# --------------------------------------------------------------------------------------------------- network
class _Linear(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, *, has_bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def _rms_norm(x: Tensor, *, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


class _Block(nn.Module):
    def __init__(self, arch: Any, *, has_plain_attention: bool):
        super().__init__()
        hidden = arch.hidden_size
        inner = math.ceil(round(arch.expansion * hidden * 2 / 3) / 256) * 256
        self.self_attn = nn.ModuleDict(
            {"qkv_proj": _Linear(hidden, 3 * hidden), "o_proj": _Linear(hidden, hidden)}
        )
        self.mlp = nn.ModuleDict(
            {"gate_up_proj": _Linear(hidden, 2 * inner), "down_proj": _Linear(inner, hidden)}
        )
        self.num_heads, self.eps = arch.num_heads, arch.rms_norm_eps
        self.has_plain_attention = has_plain_attention

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = _rms_norm(h + self._attend(h, cos, sin), eps=self.eps)
        gate, up = self.mlp["gate_up_proj"](h).chunk(2, dim=-1)
        return _rms_norm(h + self.mlp["down_proj"](F.silu(gate) * up), eps=self.eps)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.self_attn["qkv_proj"](x).view(batch, length, 3 * self.num_heads, -1)
        q, k, v = qkv.chunk(3, dim=2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [batch, heads, length, head_dim]
        if self.has_plain_attention and x.device.type == "cpu":
            scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            mixed = torch.matmul(F.softmax(scores, dim=-1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, length, hidden))


class Network(nn.Module):
    """The network of HRM or TRM, with the operations of the public code.

    flash_attention: Only for HRM on a CPU. If True, its attention is torch's scaled_dot_product_attention. If
    False, it consists of plain matrix products, as in the public code. In all other cases, attention is
    scaled_dot_product_attention.
    """

    def __init__(self, arch: Any, metadata: Metadata, *, batch_size: int, flash_attention: bool):
        super().__init__()
        self.arch, self.dtype = arch, getattr(torch, arch.forward_dtype)
        hidden, positions = arch.hidden_size, arch.num_puzzle_positions
        self.embed_tokens, self.puzzle_emb = nn.Module(), nn.Module()
        self.embed_tokens.embedding_weight = nn.Parameter(torch.empty(metadata.vocab_size, hidden))
        # The table of puzzle embeddings, and a leaf tensor with this step's rows. It receives the gradient.
        shapes = {"weights": metadata.num_puzzle_identifiers, "rows": batch_size}
        for name, num_rows in shapes.items():
            rows = torch.zeros(num_rows, arch.puzzle_emb_ndim, requires_grad=name == "rows")
            self.puzzle_emb.register_buffer(name, rows, persistent=name == "weights")
        self.identifiers = torch.zeros(0, dtype=torch.int32)
        is_plain = arch.name == "hrm" and not flash_attention
        for name in ("L", "H") if arch.name == "hrm" else ("L",):
            level, num_layers = nn.Module(), getattr(arch, f"{name}_layers")
            level.layers = nn.ModuleList(
                _Block(arch, has_plain_attention=is_plain) for _ in range(num_layers)
            )
            self.add_module(f"{name}_level", level)
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
        """Runs the network once. Returns (new z_H, new z_L, logits, q_halt, q_continue).

        z_H and z_L are the hidden states between calls, [batch, puzzle positions + seq_len, hidden]. The
        returned ones are detached. logits: [batch, seq_len, vocabulary]. q_halt and q_continue, float32
        [batch]: logits of stopping and of continuing with the puzzle.

        data: {"inputs": tokens, int32 [batch, seq_len], "puzzle_identifiers": int32 [batch]}.
        """
        e = self._embed(data["inputs"], data["puzzle_identifiers"])
        reason = self._reason_as_hrm if self.arch.name == "hrm" else self._reason_as_trm
        z_H, z_L = reason(z_H, z_L, e)
        logits = self.lm_head(z_H)[:, self.arch.num_puzzle_positions :]
        q = self.q_head(z_H[:, 0]).to(torch.float32)
        return z_H.detach(), z_L.detach(), logits, q[..., 0], q[..., 1]

    def _embed(self, tokens: Tensor, identifiers: Tensor) -> Tensor:
        hidden, positions = self.arch.hidden_size, self.arch.num_puzzle_positions
        with torch.no_grad():
            self.puzzle_emb.rows.copy_(self.puzzle_emb.weights[identifiers])
            self.identifiers = identifiers
        rows = self.puzzle_emb.rows.to(self.dtype)
        if positions * hidden > rows.shape[-1]:
            rows = F.pad(rows, (0, positions * hidden - rows.shape[-1]))
        embedded = F.embedding(tokens, self.embed_tokens.embedding_weight.to(self.dtype))
        e = torch.cat((rows.view(-1, positions, hidden), embedded), dim=-2)
        return math.sqrt(hidden) * e

    def _run(self, level: nn.Module, state: Tensor, injection: Tensor) -> Tensor:
        h = state + injection
        for layer in level.layers:
            h = layer(h, self.cos, self.sin)
        return h

    def _reason_as_hrm(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for call in range(1, self.arch.H_cycles * self.arch.L_cycles):
                z_L = self._run(self.L_level, z_L, z_H + e)
                if call % self.arch.L_cycles == 0:
                    z_H = self._run(self.H_level, z_H, z_L)
        z_L = self._run(self.L_level, z_L, z_H + e)
        return self._run(self.H_level, z_H, z_L), z_L

    def _reason_as_trm(self, z_H: Tensor, z_L: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        for cycle in range(1, self.arch.H_cycles + 1):
            with torch.set_grad_enabled(cycle == self.arch.H_cycles and torch.is_grad_enabled()):
                for _ in range(self.arch.L_cycles):
                    z_L = self._run(self.L_level, z_L, z_H + e)
                z_H = self._run(self.L_level, z_H, z_L)
        return z_H, z_L


# --------------------------------------------------------------------------------------- halting and the loss
class Carry(NamedTuple):
    z_H: Tensor
    z_L: Tensor
    steps: Tensor
    halted: Tensor
    data: dict[str, Tensor]


class _ModelWithLoss(nn.Module):
    """Runs one thinking step of the network, and computes the loss.

    `forward(carry, batch)` continues the puzzles of `carry`. If a puzzle has halted, the puzzle at the same
    position of `batch` replaces it. Returns (new carry, loss, {metric: sum over the batch}).
    """

    def __init__(self, network: Network):
        super().__init__()
        self.network, self.arch = network, network.arch

    def forward(self, carry: Carry, batch: dict[str, Tensor]) -> tuple[Carry, Tensor, dict[str, Tensor]]:
        halted = carry.halted
        z_H = torch.where(halted.view(-1, 1, 1), self.network.H_init, carry.z_H)
        z_L = torch.where(halted.view(-1, 1, 1), self.network.L_init, carry.z_L)
        data = {
            name: torch.where(halted.view(-1, *[1] * (new.ndim - 1)), new, carry.data[name])
            for name, new in batch.items()
        }
        steps = torch.where(halted, 0, carry.steps)
        z_H, z_L, logits, q_halt, q_continue = self.network(z_H, z_L, data)
        with torch.no_grad():
            steps = steps + 1
            is_last = steps >= self.arch.halt_max_steps
            halted = is_last | (q_halt > (0 if self.arch.no_ACT_continue else q_continue))
            explores = torch.rand_like(q_halt) < self.arch.halt_exploration_prob
            drawn = torch.randint_like(steps, low=2, high=self.arch.halt_max_steps + 1)
            halted = halted & (steps >= explores * drawn)
            target = None
            if not self.arch.no_ACT_continue:
                _, _, _, next_q_halt, next_q_continue = self.network(z_H, z_L, data)
                best = torch.maximum(next_q_halt, next_q_continue)
                target = torch.sigmoid(torch.where(is_last, next_q_halt, best))
        loss, sums = _loss_and_sums(logits, q_halt, q_continue, target, data["labels"], halted, steps)
        return Carry(z_H, z_L, steps, halted, data), loss, sums


def _stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.float64)
    s = torch.where(wide < 0, 1 / (1 - wide + 1e-30), wide + 1)
    log_probabilities = torch.log(s / torch.sum(s, dim=-1, keepdim=True))
    counted = labels != IGNORE_LABEL_ID
    classes = torch.where(counted, labels, 0).to(torch.long).unsqueeze(-1)
    chosen = torch.gather(log_probabilities, index=classes, dim=-1).squeeze(-1)
    return -torch.where(counted, chosen, 0)


def _loss_and_sums(
    logits: Tensor,
    q_halt: Tensor,
    q_continue: Tensor,
    target: Tensor | None,
    labels: Tensor,
    halted: Tensor,
    steps: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.no_grad():
        counted = labels != IGNORE_LABEL_ID
        counts = counted.sum(-1)
        divisor = counts.clamp_min(1).unsqueeze(-1)
        correct = counted & (torch.argmax(logits, dim=-1) == labels)
        is_exact = correct.sum(-1) == counts
        valid = halted & (counts > 0)
        accuracy = torch.where(valid, (correct.to(torch.float32) / divisor).sum(-1), 0)
        sums = {
            "count": valid.sum(),
            "accuracy": accuracy.sum(),
            "exact_accuracy": (valid & is_exact).sum(),
            "q_halt_accuracy": (valid & ((q_halt >= 0) == is_exact)).sum(),
            "steps": torch.where(valid, steps, 0).sum(),
        }
    lm_loss = (_stablemax_cross_entropy(logits, labels) / divisor).sum()
    q_halt_loss = F.binary_cross_entropy_with_logits(q_halt, is_exact.to(q_halt.dtype), reduction="sum")
    sums |= {"lm_loss": lm_loss.detach(), "q_halt_loss": q_halt_loss.detach()}
    q_continue_loss = 0
    if target is not None:
        q_continue_loss = F.binary_cross_entropy_with_logits(q_continue, target, reduction="sum")
        sums["q_continue_loss"] = q_continue_loss.detach()
    return lm_loss + 0.5 * (q_halt_loss + q_continue_loss), sums


# ------------------------------------------------------------------------------------------------ the trainer
class PublishedTrainer:
    """Trains HRM or TRM as the public code does, in one process. `benchmarks.step` measures its speed.

    weights: Initial weights, the state_dict of the same model in this repository.
    compile_model: Whether to compile the complete model, as the public code does on CUDA.
    flash_attention: Only for HRM on a CPU. If True, its attention is torch's scaled_dot_product_attention. If
    False, it consists of plain matrix products, as in the public code.
    """

    def __init__(
        self,
        config: Any,
        metadata: Metadata,
        weights: dict[str, Tensor],
        *,
        device: torch.device,
        compile_model: bool = False,
        flash_attention: bool = False,
    ):
        self.config, self.device, self.num_steps = config, device, 0
        self.network = Network(
            config.arch, metadata, batch_size=config.global_batch_size, flash_attention=flash_attention
        )
        self.network.load_state_dict(weights)
        self.model = _ModelWithLoss(self.network.to(device)).train()
        if compile_model:
            self.model.compile(dynamic=False)
        self._moments = [
            (parameter, torch.zeros_like(parameter), torch.zeros_like(parameter))
            for parameter in self.network.parameters()
        ]
        self.carry = self._initial_carry(metadata)

    def step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """Makes a training step. Returns {metric: sum over the batch}.

        The sums of accuracies include only puzzles that halt in this step. In the next call, they are
        replaced by the puzzles at the same positions of the `batch` of that call.

        batch: Tensors "inputs", "labels" and "puzzle_identifiers", on the device of the model.
        """
        self.num_steps += 1
        self.carry, loss, sums = self.model(self.carry, batch)
        (1 / self.config.global_batch_size * loss).backward()
        rates = learning_rates(self.config, self.num_steps, total_steps=TOTAL_STEPS)
        self._update_table_(rates["puzzle_emb_lr"])
        self._update_weights_(rates["lr"])
        names = sorted(sums)
        return dict(zip(names, torch.stack([sums[name] for name in names]).cpu().tolist(), strict=True))

    @torch.no_grad()
    def _update_weights_(self, lr: float) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        for parameter, first, second in self._moments:
            parameter.mul_(1 - lr * self.config.weight_decay)
            first.lerp_(parameter.grad, 1 - beta1)
            second.lerp_(parameter.grad.square(), 1 - beta2)
            root = second.sqrt() / math.sqrt(1 - beta2**self.num_steps)
            parameter.add_(torch.atan2(first, root), alpha=-lr / (1 - beta1**self.num_steps))
            parameter.grad = None

    @torch.no_grad()
    def _update_table_(self, lr: float) -> None:
        embedding = self.network.puzzle_emb
        gradient = embedding.rows.grad
        identifiers, index = self.network.identifiers.unique(return_inverse=True)
        sums = gradient.new_zeros(len(identifiers), gradient.shape[1])
        sums.scatter_add_(0, index.unsqueeze(-1).expand_as(gradient), gradient)
        rows = embedding.weights[identifiers]
        rows.mul_(1 - lr * self.config.puzzle_emb_weight_decay).add_(torch.sign(sums), alpha=-lr)
        embedding.weights[identifiers] = rows
        embedding.rows.grad = None

    def _initial_carry(self, metadata: Metadata) -> Carry:
        size, arch = self.config.global_batch_size, self.config.arch
        shape = (size, metadata.seq_len + arch.num_puzzle_positions, arch.hidden_size)
        tokens, options = (size, metadata.seq_len), {"dtype": torch.int32, "device": self.device}
        return Carry(
            z_H=torch.zeros(shape, dtype=self.network.dtype, device=self.device),
            z_L=torch.zeros(shape, dtype=self.network.dtype, device=self.device),
            steps=torch.zeros(size, **options),
            halted=torch.ones(size, dtype=torch.bool, device=self.device),
            data={
                **{name: torch.zeros(tokens, **options) for name in ("inputs", "labels")},
                "puzzle_identifiers": torch.zeros(size, **options),
            },
        )
