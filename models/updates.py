"""What becomes of a state when a level has been called, and which calls carry gradient."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.carry import Reasoning, State
from models.layers import rms_norm
from models.random import Draws

_FIRST_DECAY = 0.55  # initial b, the best one in the paper's experiments


def gradient(is_wanted: bool) -> contextlib.AbstractContextManager:
    """Returns a context that keeps the gradient mode if `is_wanted`, and otherwise turns gradients off."""
    return contextlib.nullcontext() if is_wanted else torch.no_grad()


def plus_noise(z: Tensor, std: float, draws: Draws | None, *, use: str) -> Tensor:
    """Adds normal noise of standard deviation `std`. use: name of the random numbers (`Draws`)."""
    return z + (std * draws.normal(z.shape[1:], use=use)).to(z.dtype) if std else z


def with_step_noise(state: State, reasoning: Reasoning, draws: Draws | None) -> State:
    """Returns a step's state with step_noise: on z_L, as PTRM has; without a z_L, on every z_X."""
    assert draws is not None or not reasoning.is_noisy, "noise without random numbers"
    if not reasoning.step_noise:
        return state
    names, std = (
        {"z_L"} & state.keys() or {name for name in state if name.startswith("z_")},
        reasoning.step_noise,
    )
    return state | {n: plus_noise(state[n], std, draws, use=f"step {n}") for n in names}


def update(z: Tensor, proposed: Tensor, reasoning: Reasoning, draws: Draws | None, *, use: str) -> Tensor:
    """Returns the new state after a call of a level: z + damping * (proposed - z), plus noise (EqR).

    proposed: the result of the call.
    """
    if reasoning.damping != 1:
        proposed = torch.lerp(z, proposed, reasoning.damping)
    return plus_noise(proposed, reasoning.state_noise, draws, use=use)


class Gate(nn.Module):
    """InfiLoop's update of a state (arXiv 2610.11570): a weighted mean of the results of all calls so far.

    A slot starts from z_0, and calls of the level return z_1, z_2, ...; the state after call t is N_t / D_t:
    N_t = b N_{t-1} + exp(s_t) z_t and D_t = b D_{t-1} + exp(s_t), with s_t = q . rms(z_t), N_0 = exp(s_0) z_0
    and D_0 = exp(s_0). q, [width], and b in (0, 1) are learned. The network keeps log D, float32 [batch,
    positions], instead of D, because exp(s) may overflow; -inf: the slot has just started.
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


GATE_WEIGHTS = tuple(f"gate_{axis}.{name}" for axis in "HL" for name in ("q", "beta_logit"))
Gates = dict[str, Gate]  # {name of a state: its gate}; {}: what a level returns is the new state


def initial_gates(gates: Gates, state: State) -> State:
    """Returns the states log_D_X of gated states z_X, for slots that start."""
    return {
        _log_D_of(name): torch.full(state[name].shape[:-1], -torch.inf, device=state[name].device)
        for name in gates
    }


class GatedUpdates:
    """The updates in one thinking step, by a gate for each state that has one; `kept` are the log_D_X."""

    def __init__(self, gates: Gates, state: State, reasoning: Reasoning, draws: Draws | None):
        self._gates, self._reasoning, self._draws, self.kept = gates, reasoning, draws, {}
        for name, gate in gates.items():
            log_D = state[_log_D_of(name)]
            self.kept[_log_D_of(name)] = torch.where(log_D.isinf(), gate.score(state[name]), log_D)

    def __call__(self, name: str, z: Tensor, proposed: Tensor, *, at: str) -> Tensor:
        """Returns the new state z, called `name`, after a call that returned `proposed`. at: of the call."""
        if name in self._gates:
            log_D = _log_D_of(name)
            proposed, self.kept[log_D] = self._gates[name](z, proposed, self.kept[log_D])
        return update(z, proposed, self._reasoning, self._draws, use=f"{name} {at}")


def _log_D_of(name: str) -> str:
    return name.replace("z", "log_D")
