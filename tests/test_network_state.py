"""A network keeps the tensors that it names between steps and in checkpoints: here four."""

import pytest
import torch
from torch import Tensor

import models.hrm
from models.carry import Reasoning, State
from models.hrm import HRM
from models.layers import Rotary
from models.random import Draws
from tests.checkpoints import assert_equal, open_checkpoints, random_state, resume, state_tensors
from tests.tiny import random_batch, run_losses, tiny_arch
from training.state import TrainState


class _ThreeStates(HRM):
    """A level between the two, and a scale of the noise that nobody adds."""

    state_names = ("z_H", "z_M", "z_L")

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        kept = super().initial_state(batch_size, seq_len=seq_len)
        return kept | {"noise": torch.ones(batch_size)}

    def reason(
        self, state: State, e: Tensor, rotary: Rotary | None, reasoning: Reasoning, draws: Draws | None
    ) -> State:
        z_L = self.L_level(state["z_L"], state["z_M"] + e, rotary)
        z_M = self.L_level(state["z_M"], z_L, rotary)
        return {
            "z_H": self.H_level(state["z_H"], z_M, rotary),
            "z_M": z_M,
            "z_L": z_L,
            "noise": state["noise"] / 2,
        }


def _gradients_of_a_step(state: TrainState) -> Tensor:
    state.model.train().zero_grad()
    batch = random_batch(len(state.carry.steps))
    data = state.carry.data._replace(**{name: getattr(batch, name) for name in ("inputs", "labels")})
    data = data._replace(puzzle_identifiers=batch.puzzle_identifiers)
    carry = state.carry._replace(
        halted=batch.rows % 2 == 0, steps=torch.ones_like(state.carry.steps), data=data
    )
    output, losses = run_losses(state.model, carry, batch)
    loss, _ = losses()
    loss.backward()
    assert output.carry.state.keys() == state.carry.state.keys()
    assert not any(tensor.requires_grad for tensor in output.carry.state.values())
    return torch.cat([parameter.grad.flatten() for parameter in state.model.parameters()])


@pytest.mark.parametrize("q_target", ["exact", "deferred"])
def test_any_state_is_trained_with_saved_and_resumed(monkeypatch, run, q_target):
    monkeypatch.setattr(models.hrm, "NETWORK", _ThreeStates)
    options = {"arch": tiny_arch(q_target=q_target).model_dump()}
    saved = random_state(3, **options)
    assert saved.carry.state.keys() == {"z_H", "z_M", "z_L", "noise"}
    buffers = [name for name in saved.model.network.state_dict() if name.endswith("_init")]
    assert buffers == ["H_init", "M_init", "L_init"]
    with open_checkpoints(run, **options) as checkpoints:
        checkpoints.save(saved)
    state = resume(run, **options)
    assert_equal(state_tensors(state), state_tensors(saved))
    assert torch.equal(_gradients_of_a_step(state), _gradients_of_a_step(saved))
