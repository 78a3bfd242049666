"""A network keeps the tensors that it names between steps and in checkpoints: one, three, or none."""

import pytest
import torch
from torch import Tensor

import models.hrm
import models.transformer
from models.hrm import HRM
from models.losses import loss_and_metrics
from models.network import Network, State
from models.rotary import Rotary
from models.transformer import Transformer
from tests.checkpoints import assert_equal, open_checkpoints, random_state, resume, state_tensors
from tests.tiny import random_batch, tiny_arch
from training.state import TrainState


class _OneState(HRM):
    """z_H alone."""

    state_names = ("z_H",)

    def reason(self, state: State, e: Tensor, rotary: Rotary | None) -> State:
        return {"z_H": self.H_level(state["z_H"], self.L_level(state["z_H"], e, rotary), rotary)}


class _ThreeStates(HRM):
    """A level between the two, and a scale of the noise that nobody adds."""

    state_names = ("z_H", "z_M", "z_L")

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        kept = super().initial_state(batch_size, seq_len=seq_len)
        return kept | {"noise": torch.ones(batch_size)}

    def reason(self, state: State, e: Tensor, rotary: Rotary | None) -> State:
        z_L = self.L_level(state["z_L"], state["z_M"] + e, rotary)
        z_M = self.L_level(state["z_M"], z_L, rotary)
        return {
            "z_H": self.H_level(state["z_H"], z_M, rotary),
            "z_M": z_M,
            "z_L": z_L,
            "noise": state["noise"] / 2,
        }


class _EarlierTransformer(Transformer):
    """The transformer as it was: it kept two tensors, of which it read none."""

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        return Network.initial_state(self, batch_size, seq_len=seq_len)

    def reason(self, state: State, e: Tensor, rotary: Rotary | None) -> State:
        return super().reason(state, e, rotary) | {"z_L": state["z_L"]}


def _gradients_of_a_step(state: TrainState) -> Tensor:
    state.model.train().zero_grad()
    batch = random_batch(len(state.carry.steps))
    data = state.carry.data._replace(**{name: getattr(batch, name) for name in ("inputs", "labels")})
    data = data._replace(puzzle_identifiers=batch.puzzle_identifiers)
    carry = state.carry._replace(
        halted=batch.rows % 2 == 0, steps=torch.ones_like(state.carry.steps), data=data
    )
    output = state.model(carry, batch)
    loss, _ = loss_and_metrics(output, tiny_arch().loss)
    loss.backward()
    assert output.carry.state.keys() == state.carry.state.keys()
    assert not any(tensor.requires_grad for tensor in output.carry.state.values())
    return torch.cat([parameter.grad.flatten() for parameter in state.model.parameters()])


@pytest.mark.parametrize("q_target", ["exact", "deferred"])
@pytest.mark.parametrize(
    ("network", "kept", "buffers"),
    [
        (_OneState, {"z_H"}, ["H_init"]),
        (_ThreeStates, {"z_H", "z_M", "z_L", "noise"}, ["H_init", "M_init", "L_init"]),
    ],
)
def test_any_state_is_trained_with_saved_and_resumed(monkeypatch, run, network, kept, buffers, q_target):
    monkeypatch.setattr(models.hrm, "NETWORK", network)
    options = {"arch": tiny_arch(q_target=q_target).model_dump()}
    saved = random_state(3, **options)
    assert saved.carry.state.keys() == kept
    assert [name for name in saved.model.network.state_dict() if name.endswith("_init")] == buffers
    with open_checkpoints(run, **options) as checkpoints:
        checkpoints.save(saved)
    state = resume(run, **options)
    assert_equal(state_tensors(state), state_tensors(saved))
    assert torch.equal(_gradients_of_a_step(state), _gradients_of_a_step(saved))


def test_a_transformer_that_kept_more_is_resumed(monkeypatch, run):
    options = {"arch": tiny_arch("transformer").model_dump()}
    with monkeypatch.context() as earlier, open_checkpoints(run, **options) as checkpoints:
        earlier.setattr(models.transformer, "NETWORK", _EarlierTransformer)
        saved = random_state(3, **options)
        assert saved.carry.state.keys() == {"z_H", "z_L"}
        checkpoints.save(saved)
    state = resume(run, **options)
    assert state.carry.state == {}
    wanted = {name: tensor for name, tensor in state_tensors(saved).items() if name not in ("z_H", "z_L")}
    assert_equal(state_tensors(state), wanted)
