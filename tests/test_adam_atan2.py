"""AdamATan2 against a loop over scalars that follows the formula."""

import math

import pytest
import torch

from optimizers.adam_atan2 import AdamATan2

_OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.3}


def _naive(values: list[float], gradients: list[list[float]]) -> list[float]:
    """`gradients[t][i]` is that of value i at update t + 1."""
    values = list(values)
    lr, b1, b2 = _OPTIONS["lr"], _OPTIONS["beta1"], _OPTIONS["beta2"]
    for i in range(len(values)):
        m = v = 0.0
        for t, at_t in enumerate(gradients, 1):
            g = at_t[i]
            values[i] *= 1 - lr * _OPTIONS["weight_decay"]
            m += (g - m) * (1 - b1)
            v += (g * g - v) * (1 - b2)
            values[i] -= lr / (1 - b1**t) * math.atan2(m, math.sqrt(v) / math.sqrt(1 - b2**t))
    return values


def test_updates_follow_the_formula():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    start = torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist()
    gradients = torch.randn(7, 17)
    gradients[:, 3] = 0  # atan2(0, 0) must be 0, not nan
    optimizer = AdamATan2(parameters, **_OPTIONS)
    for at_t in gradients:
        parameters[0].grad, parameters[1].grad = at_t[:12].view(3, 4).clone(), at_t[12:].clone()
        optimizer.step()
    ours = torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist()
    assert ours == pytest.approx(_naive(start, gradients.tolist()), abs=2e-6)


def test_update_does_not_depend_on_the_scale_of_the_gradient():
    results = []
    for scale in (1.0, 1e6):
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = AdamATan2([parameter], **_OPTIONS)
        parameter.grad = scale * torch.tensor([1.0, -2.0, 3.0, 0.5])
        optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def test_without_gradient_a_parameter_stands_still():
    still, moving = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdamATan2([still, moving], **_OPTIONS)
    moving.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(2))
    assert not torch.equal(moving.detach(), torch.ones(2))
