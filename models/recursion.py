"""The recurrences that models share.

HRM and TRM refine z_L several times, then z_H once, and again; they differ in which levels do it, and how
much of it carries gradient. URM and SE-RRM refine one state again and again.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from config.architecture import CyclesConfig, RecursiveConfig
from dataset.format import Metadata
from models.carry import Reasoning, State
from models.layers import Level, Rotary
from models.network import plus_noise
from models.random import Draws
from models.tokens import TokenNetwork


class RecursiveNetwork(TokenNetwork):
    """H_cycles x (L_cycles times z_L = L(z_L, z_H + e), then z_H = H(z_H, z_L)).

    The last `gradient_cycles` H cycles carry gradient; 0 means the very last L and the very last H call
    alone, the one-step gradient (section 2 of arXiv 2506.21734).
    """

    def __init__(self, arch: RecursiveConfig, metadata: Metadata, *, levels: dict[str, int]):
        super().__init__(arch, metadata, levels=levels)
        self.gradient_cycles = arch.gradient_cycles

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        """Returns the levels that update z_H and z_L."""
        raise NotImplementedError

    def reason(
        self, state: State, e: Tensor, rotary: Rotary | None, reasoning: Reasoning, draws: Draws | None
    ) -> State:
        H_level, L_level = self.slow_and_fast
        z_H, z_L = state["z_H"], state["z_L"]
        for cycle in range(reasoning.H_cycles):
            is_last = cycle == reasoning.H_cycles - 1
            with_gradient = reasoning.H_cycles - cycle <= self.gradient_cycles
            injection = z_H + e
            for call in range(reasoning.L_cycles):
                is_last_call = is_last and call == reasoning.L_cycles - 1
                with gradient(with_gradient or is_last_call):
                    proposed = L_level(z_L, injection, rotary)
                    z_L = update(z_L, proposed, reasoning, draws, use=f"z_L {cycle} {call}")
            with gradient(with_gradient or is_last):
                z_H = update(z_H, H_level(z_H, z_L, rotary), reasoning, draws, use=f"z_H {cycle}")
        return {"z_H": z_H, "z_L": z_L}

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        (slow, fast), H_calls = self.slow_and_fast, reasoning.H_cycles
        last = min(self.gradient_cycles, H_calls)
        return [
            (slow, H_calls, last or 1),
            (fast, H_calls * reasoning.L_cycles, last * reasoning.L_cycles or 1),
        ]


class OneState:
    """H_cycles x L_cycles times z_H = L(z_H + e): the recurrence of a network with one level, `L_level`.

    A base in front of `Network`. The last `gradient_cycles` H cycles carry gradient; 0 means the very last
    call alone.
    """

    state_names = ("z_H",)

    def __init__(self, arch: CyclesConfig, *more: Any, **options: Any):
        super().__init__(arch, *more, **options)
        self.gradient_cycles = arch.gradient_cycles

    def reason(
        self, state: State, e: Tensor, rotary: Rotary | None, reasoning: Reasoning, draws: Draws | None
    ) -> State:
        z_H, num_calls = state["z_H"], reasoning.H_cycles * reasoning.L_cycles
        first_with_gradient = num_calls - (self.gradient_cycles * reasoning.L_cycles or 1)
        for call in range(num_calls):
            with gradient(call >= first_with_gradient):
                proposed = self.refine(z_H, e, rotary, call=call, draws=draws)
                z_H = update(z_H, proposed, reasoning, draws, use=f"z_H {call}")
        return {"z_H": z_H}

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        calls = reasoning.H_cycles * reasoning.L_cycles
        return [(self.L_level, calls, min(self.gradient_cycles * reasoning.L_cycles or 1, calls))]

    def refine(
        self, z_H: Tensor, e: Tensor, rotary: Rotary | None, *, call: int, draws: Draws | None
    ) -> Tensor:
        """Computes what call number `call` of the step proposes."""
        return self.L_level(z_H, e, rotary)


def update(z: Tensor, proposed: Tensor, reasoning: Reasoning, draws: Draws | None, *, use: str) -> Tensor:
    """Computes what a call of a level makes of z: what it proposes, damped, and with noise (EqR)."""
    if reasoning.damping != 1:
        proposed = torch.lerp(z, proposed, reasoning.damping)
    return plus_noise(proposed, reasoning.state_noise, draws, use=use)


def gradient(is_wanted: bool) -> contextlib.AbstractContextManager:
    """Surrounds a call that carries gradient, or one that does not."""
    return contextlib.nullcontext() if is_wanted else torch.no_grad()
