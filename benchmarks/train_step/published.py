"""The training step of the public code of HRM and TRM, which ours is measured against.

A transcription of the mathematics of both papers in the public code's way of computing it: a second call of
the whole network, with its logits, for the target of q_continue; stablemax in float64; every parameter is
updated by itself; gradients are dropped, not zeroed; the host reads the metrics in every step.

What differs from the public code: on CUDA its dense optimizer is one fused kernel, and its model is compiled
as a whole (`compile_whole`). Invariant: the same step as `training.step`'s, held by tests/test_published.py,
but for rows without labels and the random numbers of exploration.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train_step.published_network import Network, PuzzleEmbedding
from dataset.format import IGNORE_LABEL_ID
from optimizers.schedule import scheduled_lr


# --------------------------------------------------------------------------------------- halting and the loss
class _Carry(NamedTuple):
    z_H: Tensor
    z_L: Tensor
    steps: Tensor
    halted: Tensor
    data: dict[str, Tensor]


class _ModelWithLoss(nn.Module):
    """One step of all slots: the new carry, the loss as a sum over slots, and the sums of the metrics."""

    def __init__(self, network: Network):
        super().__init__()
        self.network, self.arch = network, network.arch

    def forward(self, carry: _Carry, batch: dict[str, Tensor]) -> tuple[_Carry, Tensor, dict[str, Tensor]]:
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
            halted = halted & (
                steps >= explores * torch.randint_like(steps, low=2, high=self.arch.halt_max_steps + 1)
            )
            target = None
            if not self.arch.no_ACT_continue:
                _, _, _, next_q_halt, next_q_continue = self.network(z_H, z_L, data)
                best = torch.maximum(next_q_halt, next_q_continue)
                target = torch.sigmoid(torch.where(is_last, next_q_halt, best))
        loss, sums = _loss_and_sums(logits, q_halt, q_continue, target, data["labels"], halted, steps)
        return _Carry(z_H, z_L, steps, halted, data), loss, sums


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
        num_counted = counted.sum(-1)
        divisor = num_counted.clamp_min(1).unsqueeze(-1)
        is_correct = counted & (torch.argmax(logits, dim=-1) == labels)
        is_exact = is_correct.sum(-1) == num_counted
        valid = halted & (num_counted > 0)
        accuracy = (is_correct.to(torch.float32) / divisor).sum(-1)
        sums = {
            "count": valid.sum(),
            "accuracy": torch.where(valid, accuracy, 0).sum(),
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


# ------------------------------------------------------------------------------------------------- optimizers
class _AdamATan2:
    def __init__(self, parameters: list[Tensor], config: SimpleNamespace):
        self._config, self._step = config, 0
        self._moments = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._step += 1
        beta1, beta2 = self._config.beta1, self._config.beta2
        for parameter, first, second in self._moments:
            parameter.mul_(1 - lr * self._config.weight_decay)
            first.lerp_(parameter.grad, 1 - beta1)
            second.lerp_(parameter.grad.square(), 1 - beta2)
            spread = second.sqrt() / math.sqrt(1 - beta2**self._step)
            parameter.add_(torch.atan2(first, spread), alpha=-lr / (1 - beta1**self._step))

    def zero_grad(self) -> None:
        for parameter, _, _ in self._moments:
            parameter.grad = None


class _SignSGD:
    def __init__(self, embedding: PuzzleEmbedding, config: SimpleNamespace):
        self._embedding, self._weight_decay = embedding, config.puzzle_emb_weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        table, gradient = self._embedding.weights, self._embedding.rows.grad
        identifiers, place = self._embedding.identifiers.unique(return_inverse=True)
        sums = torch.zeros(len(identifiers), gradient.shape[1], dtype=gradient.dtype, device=gradient.device)
        sums.scatter_add_(0, place.unsqueeze(-1).expand_as(gradient), gradient)
        rows = table[identifiers]
        rows.mul_(1 - lr * self._weight_decay).add_(torch.sign(sums), alpha=-lr)
        table[identifiers] = rows

    def zero_grad(self) -> None:
        self._embedding.rows.grad = None


# ------------------------------------------------------------------------------------------------ the trainer
class PublishedTrainer:
    """One process that trains, beginning with `weights`: the state dict of one of our networks.

    config, metadata: as for `training.state.build_train_state`. compile_whole: as the public code on CUDA.
    flash_attention: torch's, also where HRM's code has plain products.
    """

    def __init__(
        self,
        config: SimpleNamespace,
        metadata: SimpleNamespace,
        weights: dict[str, Tensor],
        *,
        device: torch.device,
        compile_whole: bool = False,
        flash_attention: bool = False,
    ):
        self.config, self.device, self.num_steps = config, device, 0
        self.network = Network(
            config.arch, metadata, batch_size=config.global_batch_size, flash_attention=flash_attention
        )
        self.network.load_state_dict(weights)
        self.model = _ModelWithLoss(self.network.to(device)).train()
        if compile_whole:
            self.model.compile(dynamic=False)
        self.optimizers = (
            (_SignSGD(self.network.puzzle_emb, config), config.puzzle_emb_lr),
            (_AdamATan2(list(self.network.parameters()), config), config.lr),
        )
        self.carry: _Carry | None = None

    def step(self, batch: dict[str, Tensor], *, total_steps: int) -> dict[str, float]:
        """One step on a batch that lies on the device; returns the sums of the metrics."""
        self.num_steps += 1
        if self.carry is None:
            self.carry = self.initial_carry(batch)
        self.carry, loss, sums = self.model(self.carry, batch)
        (1 / self.config.global_batch_size * loss).backward()
        for optimizer, base in self.optimizers:
            rate = scheduled_lr(
                self.num_steps,
                base=base,
                warmup_steps=self.config.lr_warmup_steps,
                total_steps=total_steps,
                min_ratio=self.config.lr_min_ratio,
            )
            optimizer.step(rate)
            optimizer.zero_grad()
        return self.read(sums)

    def read(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Reads the sums of the metrics, for which the host waits for the device."""
        names = sorted(sums)
        return dict(zip(names, torch.stack([sums[name] for name in names]).cpu().tolist(), strict=True))

    def initial_carry(self, batch: dict[str, Tensor]) -> _Carry:
        batch_size, length = batch["inputs"].shape
        shape = (batch_size, length + self.config.arch.puzzle_emb_positions, self.config.arch.hidden_size)
        return _Carry(
            z_H=torch.zeros(shape, dtype=self.network.dtype, device=self.device),
            z_L=torch.zeros(shape, dtype=self.network.dtype, device=self.device),
            steps=torch.zeros(batch_size, dtype=torch.int32, device=self.device),
            halted=torch.ones(batch_size, dtype=torch.bool, device=self.device),
            data={name: torch.zeros_like(tensor) for name, tensor in batch.items()},
        )
