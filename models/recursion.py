"""The recurrences that models share.

HRM and TRM repeat: several updates of z_L, then one of z_H. The two differ in the levels that do this, and in
how many calls carry gradient. URM, SE-RRM and FPRM update one state again and again.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import CyclesConfig, TwoAxesConfig
from models.blocks import Level
from models.carry import Reasoning, State
from models.layers import rms_norm
from models.network import plus_noise
from models.random import Draws
from models.tokens import TokenNetwork

_FIRST_DECAY = 0.55  # initial b, the best one in the paper's experiments


class Gate(nn.Module):
    """InfiLoop's update of a state (arXiv 2610.11570): a weighted mean of the results of all calls so far.

    A slot starts from z_0, and calls of the level return z_1, z_2, ...; the state after call t is N_t / D_t:
    N_t = b N_{t-1} + exp(s_t) z_t and D_t = b D_{t-1} + exp(s_t), with s_t = q . rms(z_t), N_0 = exp(s_0) z_0
    and D_0 = exp(s_0). q, [width], and b in (0, 1) are learned. The network keeps log D, float32 [batch,
    positions], instead of D, because exp(s) may overflow.
    """

    def __init__(self, width: int, *, eps: float):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(width))
        self.beta_logit = nn.Parameter(torch.tensor(_FIRST_DECAY).logit())
        self.eps = eps

    def score(self, z: Tensor) -> Tensor:
        """Returns q . rms(z), the logarithm of a state's weight in the mean: float32 [batch, positions]."""
        return rms_norm(z.float(), eps=self.eps) @ self.q

    def forward(self, z: Tensor, proposed: Tensor, log_D: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted mean of state z and result `proposed`, and log D for the next call."""
        score, faded = self.score(proposed), log_D + F.logsigmoid(self.beta_logit)
        share = torch.sigmoid(score - faded).to(z.dtype)[..., None]
        return torch.lerp(z, proposed, share), torch.logaddexp(faded, score)


class RecursiveNetwork(TokenNetwork):
    """The recurrence of HRM and TRM, where L and H are calls of levels, and e is the embedded puzzle.

    H_cycles x (L_cycles times z_L = L(z_L, z_H + e), then z_H = H(z_H, z_L)).
    With one state: H_cycles x (L_cycles times z_H = L(z_H, e), then z_H = H(z_H, 0)).

    Only the last `gradient_cycles` H cycles carry gradient; with 0, only the last call of L and the last call
    of H do: the one-step gradient (section 2 of arXiv 2506.21734). With `update=gate` each state z_X has a
    `Gate`, and the network also keeps log_D_X, which is -inf for a slot that has just started.
    """

    undecayed = ("gate_H.q", "gate_H.beta_logit", "gate_L.q", "gate_L.beta_logit")

    def __init__(self, arch: TwoAxesConfig, *more: Any, **options: Any):
        super().__init__(arch, *more, **options)
        self.gradient_cycles = arch.gradient_cycles
        self.gates: dict[str, Gate] = {}
        for name in self.state_names if arch.update == "gate" else ():
            self.gates[name] = Gate(arch.hidden_size, eps=arch.rms_norm_eps)
            self.add_module(name.replace("z", "gate"), self.gates[name])

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        state = super().initial_state(batch_size, seq_len=seq_len)
        for name in self.gates:
            z = state[name]
            state[_log_D_of(name)] = torch.full(z.shape[:-1], -torch.inf, device=z.device)
        return state

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        """Returns (the level that updates z_H, the level that updates z_L)."""
        return getattr(self, "H_level", self.L_level), self.L_level

    def reason(self, state: State, e: Tensor, reasoning: Reasoning, draws: Draws | None) -> State:
        H_level, L_level = self.slow_and_fast
        slow, fast = self.state_names[0], self.state_names[-1]
        has_one, state = slow == fast, dict(state)
        for name, gate in self.gates.items():
            log_D = state[_log_D_of(name)]
            state[_log_D_of(name)] = torch.where(log_D.isinf(), gate.score(state[name]), log_D)

        def put(name: str, proposed: Tensor, *, use: str) -> None:
            if name in self.gates:
                log_D = state[_log_D_of(name)]
                proposed, state[_log_D_of(name)] = self.gates[name](state[name], proposed, log_D)
            state[name] = update(state[name], proposed, reasoning, draws, use=f"{name} {use}")

        for cycle in range(reasoning.H_cycles):
            is_last = cycle == reasoning.H_cycles - 1
            with_gradient = reasoning.H_cycles - cycle <= self.gradient_cycles
            injection = e if has_one else state[slow] + e
            for call in range(reasoning.L_cycles):
                is_last_call = is_last and call == reasoning.L_cycles - 1
                with gradient(with_gradient or is_last_call):
                    put(fast, L_level(state[fast], injection, self.rotary), use=f"{cycle} {call}")
            with gradient(with_gradient or is_last):
                proposed = H_level(state[slow], 0 if has_one else state[fast], self.rotary)
                put(slow, proposed, use=f"{cycle}")
        return state

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        (slow, fast), H_calls = self.slow_and_fast, reasoning.H_cycles
        last = min(self.gradient_cycles, H_calls)
        return [
            (slow, H_calls, last or 1),
            (fast, H_calls * reasoning.L_cycles, last * reasoning.L_cycles or 1),
        ]


def _log_D_of(name: str) -> str:
    return name.replace("z", "log_D")


class OneState:
    """The recurrence of a network with one level, `L_level`: H_cycles x L_cycles times z_H = L(z_H + e).

    Inherit it before `Network`. The last `gradient_cycles` H cycles carry gradient; 0: only the last call.
    """

    state_names = ("z_H",)

    def __init__(self, arch: CyclesConfig, *more: Any, **options: Any):
        super().__init__(arch, *more, **options)
        self.gradient_cycles = arch.gradient_cycles

    def reason(self, state: State, e: Tensor, reasoning: Reasoning, draws: Draws | None) -> State:
        z_H, num_calls = state["z_H"], reasoning.H_cycles * reasoning.L_cycles
        first_with_gradient = num_calls - (self.gradient_cycles * reasoning.L_cycles or 1)
        for call in range(num_calls):
            with gradient(call >= first_with_gradient):
                proposed = self.refine(z_H, e, call=call, draws=draws)
                z_H = update(z_H, proposed, reasoning, draws, use=f"z_H {call}")
        return {"z_H": z_H}

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        calls = reasoning.H_cycles * reasoning.L_cycles
        return [(self.L_level, calls, min(self.gradient_cycles * reasoning.L_cycles or 1, calls))]

    def refine(self, z_H: Tensor, e: Tensor, *, call: int, draws: Draws | None) -> Tensor:
        """Returns the new z_H that call number `call` of the level in this step proposes."""
        return self.L_level(z_H, e, self.rotary)


def update(z: Tensor, proposed: Tensor, reasoning: Reasoning, draws: Draws | None, *, use: str) -> Tensor:
    """Returns the new state after a call of a level: z + damping * (proposed - z), plus noise (EqR).

    proposed: the result of the call.
    """
    if reasoning.damping != 1:
        proposed = torch.lerp(z, proposed, reasoning.damping)
    return plus_noise(proposed, reasoning.state_noise, draws, use=use)


def gradient(is_wanted: bool) -> contextlib.AbstractContextManager:
    """Returns a context that keeps the gradient mode if `is_wanted`, and otherwise turns gradients off."""
    return contextlib.nullcontext() if is_wanted else torch.no_grad()
