"""AdamATan2 against a loop over scalars that follows the formula."""

import math

import pytest
import torch

from distributed.collectives import all_ranks
from distributed.flat import FlatParameters
from optimizers.rules.adam_atan2 import AdamATan2, short_atan2_sqrt
from tests.float64 import TOLERANCE, assert_close

_SHAPES = ((3, 4), (5,), (16, 41), ())
_OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.3}


def _flat(*parameters: torch.Tensor) -> FlatParameters:
    named = ((str(number), torch.nn.Parameter(value)) for number, value in enumerate(parameters))
    return FlatParameters(named, ranks=all_ranks())


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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("chunk", [10**6, 5])
def test_updates_follow_the_formula(monkeypatch, chunk):
    monkeypatch.setattr("optimizers.rules.adam_atan2._CHUNK", chunk)
    torch.manual_seed(0)
    flat = _flat(torch.randn(3, 4), torch.randn(5))
    weights, places = flat.views(flat.weights), flat.views(flat.gradients)
    start = torch.cat([weights[name].flatten() for name in ("0", "1")]).tolist()
    gradients = torch.randn(7, 17)
    gradients[:, 3] = 0  # atan2(0, 0) must be 0, not nan
    optimizer = AdamATan2(flat, **_OPTIONS)
    for at_t in gradients:
        places["0"].copy_(at_t[:12].view(3, 4))
        places["1"].copy_(at_t[12:])
        optimizer.step()
    ours = torch.cat([weights[name].flatten() for name in ("0", "1")]).tolist()
    assert ours == pytest.approx(_naive(start, gradients.tolist()), abs=TOLERANCE)


def _start() -> FlatParameters:
    generator = torch.Generator().manual_seed(0)
    return _flat(*(torch.randn(shape, generator=generator) for shape in _SHAPES))


def _trained(names: list[str] | None = None) -> tuple[FlatParameters, AdamATan2]:
    """Three updates with another learning rate each."""
    generator, flat = torch.Generator().manual_seed(1), _start()
    optimizer = AdamATan2(flat, names, **_OPTIONS)
    for lr in (0.1, 0.2, 0.05):
        for place in flat.views(flat.gradients).values():
            place.copy_(torch.randn(place.shape, generator=generator))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return flat, optimizer


@pytest.mark.usefixtures("float64")
def test_some_parameters_are_updated_as_among_all_and_the_others_stand_still():
    (whole, _), (some, optimizer) = _trained(), _trained(["0", "2", "3"])
    assert set(optimizer.state) == {some.parameters[name] for name in ("0", "2", "3")}
    still, moved = some.views(some.weights), whole.views(whole.weights)
    assert torch.equal(still.pop("1"), _start().views(_start().weights)["1"])
    for name, value in still.items():  # the ends of a range are computed without vectors
        assert_close(value, moved[name], what=name)


def test_the_short_arctangent():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(10**5, generator=generator).sign() * 10 ** torch.linspace(-18, 12, 10**5)
    for scale in (1e-6, 1.0, 1e6):
        x = (scale * y * torch.randn(y.shape, generator=generator)).square()
        exact = torch.atan2(y.double(), x.double().sqrt())
        assert ((short_atan2_sqrt(y, x) - exact) / exact).abs().max() < 2.5 * 2**-23
    y, x = torch.tensor([[0.0, 0.0, 1e-25, -1e-25, 3.0, -3.0], [0.0, 4.0, 0.0, 0.0, 0.0, 0.0]])
    right = math.pi / 2
    assert short_atan2_sqrt(y, x).tolist() == pytest.approx([0, 0, right, -right, right, -right])
    assert short_atan2_sqrt(y, x)[:2].tolist() == [0, 0], "without gradient nothing moves, not by a bit"
