"""Counts the operations of the matrix products of a training step, and measures a machine's rate of them.

A product of [m, k] and [k, n] counts 2 m k n. With T = batch * length tokens (length with the positions of
the puzzle embedding), hidden size h and SwiGLU's inner width i, one block takes

    block = 2 T (4 h^2 + 3 h i) + 4 T length h

(q, k, v and output projections; gate, up and down; scores and their mix of values), and the heads

    heads = 2 T h vocab + 4 batch h

A step takes block * (calls of a block) and once heads forward; for the target of q_continue block * (calls)
and 4 batch h once more, of which a deferred one takes the share of the slots that stop, 1 / halt_max_steps;
and backward, of what carries gradient, twice its forward: one product for the gradient of the input and one
for that of the weight, nothing computed anew.
"""

from types import SimpleNamespace

import torch

from benchmarks.harness import now

_BUNDLE_SECONDS = 5e-3  # products are timed in bundles at least so long


def step_flops(
    arch: SimpleNamespace, *, vocab_size: int, seq_len: int, batch_size: int, is_deferred: bool = False
) -> int:
    """Returns the operations of one training step of hrm or trm with attention.

    is_deferred: with `q_target: deferred`.
    """
    length, hidden = seq_len + arch.puzzle_emb_positions, arch.hidden_size
    tokens, inner = batch_size * length, inner_width(arch)
    block = 2 * tokens * (4 * hidden**2 + 3 * hidden * inner) + 4 * tokens * length * hidden
    q_head = 4 * batch_size * hidden
    heads = 2 * tokens * hidden * vocab_size + q_head

    num_H_layers = arch.H_layers if arch.name == "hrm" else arch.L_layers
    cycle = arch.L_cycles * arch.L_layers + num_H_layers
    calls = arch.H_cycles * cycle
    with_gradient = arch.gradient_cycles * cycle or arch.L_layers + num_H_layers

    forward = block * calls + heads
    target = 0 if arch.no_ACT_continue else block * calls + q_head
    if is_deferred:
        target //= arch.halt_max_steps
    return forward + target + 2 * (block * with_gradient + heads)


def inner_width(arch: SimpleNamespace) -> int:
    """Returns the inner width of SwiGLU: 2/3 * expansion * hidden, rounded up to a multiple of 256."""
    return -(-round(arch.expansion * arch.hidden_size * 2 / 3) // 256) * 256


def matmul_rate(m: int, k: int, n: int, *, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """Measures operations a second of a product of [m, k] and [k, n], the best of `rounds`."""
    x, weight = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
    best = min(_seconds_of_product(x, weight) for _ in range(rounds))
    del x, weight
    give_memory_back(device)
    return 2 * m * k * n / best


def _seconds_of_product(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Times one product, out of as many as a clock needs."""
    count = 1
    while True:
        begin = now(x.device)
        for _ in range(count):
            torch.nn.functional.linear(x, weight)
        seconds = now(x.device) - begin
        if seconds > _BUNDLE_SECONDS:
            return seconds / count
        count *= 2


def give_memory_back(device: torch.device) -> None:
    """Frees the memory that this process keeps on a GPU for its next tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
