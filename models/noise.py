"""Damping and noise of a network's state. They can improve answers at test time (docs/test_time.md).

`models.carry.Reasoning` has a field for each kind. All are off by default, except init_noise of FPRM.

init_noise   The initial hidden states of a slot are noise. `Network.start` calls `with_initial_noise`.
step_noise   Noise is added to z_L before every thinking step. Without z_L, it is added to all hidden states.
             `HaltingModel.forward` calls `with_step_noise`.
state_noise  Noise is added to the result of every call of a level. Networks call `perturbed` or `perturb`.
damping      If a level returns f(z) for the state z, the new state is z + damping * (f(z) - z). Networks call
             `perturbed` or `perturb`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.carry import Reasoning, State
from models.random import SlotRng


def perturbed(
    level: nn.Module, reasoning: Reasoning, rng: SlotRng | None, *context: Any, name: str = "L"
) -> Callable[[Tensor, Tensor | int], Tensor]:
    """Returns a function that calls a stack of blocks, and adds damping and noise.

    The function takes (z, injection), calls level(z, injection, *context), and passes the result to
    `perturb`. The function counts its calls, so that each call gets different noise. Create a new function in
    each thinking step, so that the count starts from 0.

    Args:
        level: Stack of blocks. It gets the hidden state z, and a tensor to add to z.
        reasoning: Settings. The fields damping and state_noise are used.
        rng: Random numbers of this thinking step. They are needed if state_noise is not 0.
        context: Further arguments of `level`.
        name: Name of the stack. Stacks with different names get different noise.
    """

    def call(z: Tensor, injection: Tensor | int) -> Tensor:
        return level(z, injection, *context)

    if reasoning.damping == 1 and not reasoning.state_noise:
        return call
    numbers = itertools.count()  # gives each call in a thinking step different random numbers

    def perturbed_call(z: Tensor, injection: Tensor | int) -> Tensor:
        return perturb(z, call(z, injection), reasoning, rng, use=f"{name} {next(numbers)}")

    return perturbed_call


def perturb(z: Tensor, new: Tensor, reasoning: Reasoning, rng: SlotRng | None, *, use: str) -> Tensor:
    """Returns z + damping * (new - z), plus normal noise of standard deviation state_noise.

    z: Hidden state before a call of a stack of blocks. new: Result of the call. reasoning: Settings, with the
    numbers damping and state_noise. rng: Random numbers, needed if state_noise is not 0. use: Any text, such
    as "L 0". Different texts give independent noise.
    """
    if reasoning.damping != 1:
        new = torch.lerp(z, new, reasoning.damping)
    return _plus_noise(new, reasoning.state_noise, rng, use=use)


def with_initial_noise(state: State, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
    """Replaces the hidden states of new puzzles by normal noise. Returns the changed `state`.

    Hidden states are the entries with names that start with "z_". The normal distribution is cut at 2 of its
    standard deviations. After the cut, the noise has the standard deviation reasoning.init_noise. If
    init_noise is 0 or `rng` is None, nothing changes.

    state: Initial state, which is changed in place. fresh: Slots with a new puzzle, bool [batch].
    """
    if not reasoning.init_noise or rng is None:
        return state
    slots = fresh.nonzero().flatten()
    rng = rng[slots]
    for name, z in hidden_states(state).items():
        noise = reasoning.init_noise * rng.truncated_normal(z.shape[1:], use=f"start {name}")
        state[name] = z.index_copy(0, slots, noise.to(z.dtype))
    return state


def with_step_noise(state: State, reasoning: Reasoning, rng: SlotRng | None) -> State:
    """Adds normal noise to the hidden state z_L, as in PTRM (arXiv 2605.19943).

    Returns a new state. If the state has no z_L, the noise is added to all hidden states (names that start
    with "z_"). The standard deviation of the noise is reasoning.step_noise. If step_noise is 0, `state`
    itself is returned.

    rng: Random numbers, needed if any noise in `reasoning` is on.
    """
    assert rng is not None or not reasoning.is_noisy, "noise needs rng"
    if not reasoning.step_noise:
        return state
    latents = hidden_states(state)
    noisy = {"z_L": latents["z_L"]} if "z_L" in latents else latents
    std = reasoning.step_noise
    return state | {name: _plus_noise(z, std, rng, use=f"step {name}") for name, z in noisy.items()}


def hidden_states(state: State) -> State:
    """Returns the entries of a state with names that start with "z_"."""
    return {name: z for name, z in state.items() if name.startswith("z_")}


def _plus_noise(z: Tensor, std: float, rng: SlotRng | None, *, use: str) -> Tensor:
    return z + (std * rng.normal(z.shape[1:], use=use)).to(z.dtype) if std else z
