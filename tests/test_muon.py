"""Muon against the exact orthogonal factor, and which weights it moves."""

import pytest
import torch

from config.architecture import architectures
from optimizers.weights import Muon, build_weights
from parallel.collectives import all_ranks
from parallel.flat import FlatParameters
from tests.float64 import assert_close
from tests.tiny import tiny_config, tiny_model

_LR, _WEIGHT_DECAY, _MOMENTUM = 0.1, 0.5, 0.95


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_a_step_is_the_orthogonal_factor_of_the_momentum(shape):
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(shape))
    optimizer = Muon([matrix], lr=_LR, weight_decay=_WEIGHT_DECAY)
    momentum = torch.zeros(shape)
    for _ in range(3):
        before, gradient = matrix.detach().clone(), torch.randn(shape)
        matrix.grad = gradient.clone()
        optimizer.step()
        momentum = _MOMENTUM * momentum + (1 - _MOMENTUM) * gradient
        ahead = _MOMENTUM * momentum + (1 - _MOMENTUM) * gradient  # Nesterov's

        moved = (1 - _LR * _WEIGHT_DECAY) * before - matrix.detach()
        direction = moved / (_LR * 0.2 * max(shape) ** 0.5)  # root mean square as of Adam's step
        left, _, right = torch.linalg.svd(ahead, full_matrices=False)
        values = torch.diagonal(left.T @ direction @ right.T)
        assert ((values > 0.6) & (values < 1.3)).all(), "five iterations bring singular values near 1"
        assert_close(left @ torch.diag(values) @ right, direction)


@pytest.mark.parametrize("name", architectures())
def test_it_moves_the_matrices_of_the_blocks_and_adam_atan2_the_rest(name):
    network = tiny_model(name).network
    flat = FlatParameters(network.named_parameters(), ranks=all_ranks())
    weights = build_weights(tiny_config(optimizer="muon"), flat, matrices=network.block_weights())
    adam, muon = (group.optimizer for group in weights.groups)
    names = {weight: name for name, weight in network.named_parameters()}
    moved = {names[weight] for weight in muon.param_groups[0]["params"]}
    others = {names[weight] for weight in adam.param_groups[0]["params"]}
    assert moved | others == set(names.values())
    assert others == {name for name in names.values() if "_level." not in name and "blocks." not in name} | {
        name for name in names.values() if "dwconv" in name
    }
    assert "lm_head.weight" in others

    before = {name: weight.detach().clone() for weight, name in names.items()}
    flat.gradients.normal_()
    for name, gradient in flat.views(flat.gradients).items():
        flat.parameters[name].grad = gradient
    for optimizer in (adam, muon):
        optimizer.step()
    for weight, name in names.items():
        assert not torch.equal(weight.detach(), before[name]), name
