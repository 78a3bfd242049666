"""AdamW against a naive loop, on flat parameters."""

import pytest
import torch

from optimizers.weights import build_weights
from parallel.collectives import all_ranks
from parallel.flat import FlatParameters
from tests.float64 import assert_close
from tests.tiny import tiny_config, tiny_model

_LR, _WEIGHT_DECAY, _BETA1, _BETA2 = 0.1, 0.5, 0.8, 0.9


def _optimizer(flat: FlatParameters) -> torch.optim.Optimizer:
    config = tiny_config(optimizer="adamw", lr=_LR, weight_decay=_WEIGHT_DECAY, beta1=_BETA1, beta2=_BETA2)
    (group,) = build_weights(config, flat, matrices=frozenset()).groups
    return group.optimizer


@pytest.mark.usefixtures("float64")
def test_it_is_adam_with_decoupled_weight_decay():
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(size)) for name, size in (("a", (3, 7)), ("b", 5))}
    flat = FlatParameters(weights.items(), ranks=all_ranks())
    optimizer = _optimizer(flat)
    expected = {
        name: (w.detach().clone(), torch.zeros_like(w), 0 * w.detach()) for name, w in weights.items()
    }
    for name, gradient in flat.views(flat.gradients).items():
        weights[name].grad = gradient
    for step in range(1, 4):
        flat.gradients.normal_()
        optimizer.step()
        for name, (weight, mean, square) in expected.items():
            gradient = weights[name].grad
            mean = _BETA1 * mean + (1 - _BETA1) * gradient
            square = _BETA2 * square + (1 - _BETA2) * gradient**2
            direction = mean / (1 - _BETA1**step) / ((square / (1 - _BETA2**step)).sqrt() + 1e-8)
            weight = weight * (1 - _LR * _WEIGHT_DECAY) - _LR * direction
            expected[name] = (weight, mean, square)
            assert_close(weights[name].detach(), weight.detach())
            assert_close(flat.views(flat.weights)[name], weight.detach())


def test_it_moves_all_weights():
    flat = FlatParameters(tiny_model().network.named_parameters(), ranks=all_ranks())
    optimizer = _optimizer(flat)
    before = flat.weights.clone()
    flat.gradients.normal_()
    for name, gradient in flat.views(flat.gradients).items():
        flat.parameters[name].grad = gradient
    optimizer.step()
    for name, weight in flat.views(before).items():
        assert not torch.equal(flat.parameters[name].detach(), weight), name


def test_without_gradients_it_stands_still():
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    flat = FlatParameters([("a", parameter)], ranks=all_ranks())
    _optimizer(flat).step()
    assert parameter.tolist() == [1, 1, 1]
