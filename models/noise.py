"""Damping and noise. They can improve answers at test time (EqR, PTRM).

All are off by default, except init_noise of FPRM.

init_noise   a slot starts from noise instead of X_init (`with_initial_noise`)
step_noise   noise is added to the state before every thinking step (`with_step_noise`)
state_noise  noise is added to the result of every call of a level (`perturbed`)
damping      a call of a level changes the state only in part (`perturbed`)
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
    """Returns a function (z, injection) that calls the level, and adds damping and noise to its result.

    Without damping and noise, the function is only the call: level(z, injection, *context). name: Name of
    the level, which gives the levels of a network different random numbers.
    """

    def call(z: Tensor, injection: Tensor | int) -> Tensor:
        return level(z, injection, *context)

    if reasoning.damping == 1 and not reasoning.state_noise:
        return call
    numbers = itertools.count()  # different random numbers for each call in a thinking step

    def perturbed_call(z: Tensor, injection: Tensor | int) -> Tensor:
        return perturb(z, call(z, injection), reasoning, rng, use=f"{name} {next(numbers)}")

    return perturbed_call


def perturb(z: Tensor, new: Tensor, reasoning: Reasoning, rng: SlotRng | None, *, use: str) -> Tensor:
    """Returns z + damping * (new - z), plus noise of standard deviation state_noise."""
    if reasoning.damping != 1:
        new = torch.lerp(z, new, reasoning.damping)
    return _plus_noise(new, reasoning.state_noise, rng, use=use)


def with_initial_noise(state: State, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
    """Returns initial states. With init_noise, each z_X of the slots in `fresh`, bool [batch], is noise.

    The noise is normal with standard deviation init_noise, cut at 2 sigma.
    """
    if not reasoning.init_noise or rng is None:
        return state
    slots = fresh.nonzero().flatten()
    rng = rng[slots]
    for name, z in _latents(state).items():
        noise = reasoning.init_noise * rng.truncated_normal(z.shape[1:], use=f"start {name}")
        state[name] = z.index_copy(0, slots, noise.to(z.dtype))
    return state


def with_step_noise(state: State, reasoning: Reasoning, rng: SlotRng | None) -> State:
    """Returns a state plus step_noise: on z_L, as in PTRM, or on every z_X if there is no z_L."""
    assert rng is not None or not reasoning.is_noisy, "noise without random numbers"
    if not reasoning.step_noise:
        return state
    latents = _latents(state)
    noisy = {"z_L": latents["z_L"]} if "z_L" in latents else latents
    std = reasoning.step_noise
    return state | {name: _plus_noise(z, std, rng, use=f"step {name}") for name, z in noisy.items()}


def _latents(state: State) -> State:
    return {name: z for name, z in state.items() if name.startswith("z_")}


def _plus_noise(z: Tensor, std: float, rng: SlotRng | None, *, use: str) -> Tensor:
    return z + (std * rng.normal(z.shape[1:], use=use)).to(z.dtype) if std else z
