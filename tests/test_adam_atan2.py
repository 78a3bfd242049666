"""AdamATan2 against a loop over scalars that follows the formula."""

import math

import pytest
import torch

from models.compilation import COMPILER_OPTIONS
from optimizers.adam_atan2 import AdamATan2, short_atan2_sqrt
from parallel.flat_buffers import flat_views
from parallel.gradient_sync import build_gradient_sync
from tests.float64 import TOLERANCE, assert_close

_SHAPES = ((3, 4), (5,), (16, 41), ())
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


@pytest.mark.usefixtures("float64")
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
    assert ours == pytest.approx(_naive(start, gradients.tolist()), abs=TOLERANCE)


@pytest.mark.usefixtures("float64")
def test_update_does_not_depend_on_the_scale_of_the_gradient():
    results = []
    for scale in (1.0, 1e6):
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = AdamATan2([parameter], **_OPTIONS)
        parameter.grad = scale * torch.tensor([1.0, -2.0, 3.0, 0.5])
        optimizer.step()
        results.append(parameter.detach())
    assert_close(*results)


def _trained(*, is_flat: bool, **options) -> tuple[list[torch.nn.Parameter], AdamATan2]:
    """Parameters after three updates with another learning rate each; what compiles, does so in the first."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]
    optimizer = AdamATan2(parameters, **_OPTIONS, **options)
    _, places = flat_views(parameters[::-1])
    for lr in (0.1, 0.2, 0.05):
        for parameter, place in zip(parameters, reversed(places), strict=True):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = place.copy_(gradient) if is_flat else gradient
        assert len(list(optimizer._pieces())) == (1 if is_flat else len(parameters))
        optimizer.param_groups[0]["lr"] = lr
        with torch.compiler.set_stance("default" if lr == 0.1 else "fail_on_recompile"):
            optimizer.step()
    return parameters, optimizer


def _assert_all_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)


@pytest.mark.usefixtures("float64")
def test_one_pass_over_flat_gradients_is_one_for_each_parameter():
    (flat, optimizer), (apart, _) = _trained(is_flat=True), _trained(is_flat=False)
    _assert_all_close(flat, apart)
    for buffer in optimizer._buffers:
        assert len(buffer) == 16 + 16 + 656 + 16
        assert buffer[[1, 15, 16 + 656 + 5, 16 + 656 + 16 + 12]].tolist() == [0] * 4, "between the tensors"


@pytest.mark.usefixtures("float64")
def test_chunks_are_updated_as_one(monkeypatch):
    whole, _ = _trained(is_flat=True)
    monkeypatch.setattr("optimizers.adam_atan2._CHUNK", 50)
    _assert_all_close(_trained(is_flat=True)[0], whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_compiled_updates_are_the_eager_ones_and_are_compiled_once():
    """To the rounding of float32: three updates go 3.5 at most, each right to four units in the last place.

    To that comes the rounding of the weights themselves, below 4, in six operations.
    """
    torch.compiler.reset()
    eager, _ = _trained(is_flat=True)
    for is_flat in (True, False):
        compiled, _ = _trained(is_flat=is_flat, compiler_options=COMPILER_OPTIONS)
        for one, other in zip(compiled, eager, strict=True):
            assert other.abs().max() < 4
            assert (one - other).abs().max() < 3.5 * 4 * 2**-23 + 6 * 4 * 2**-24


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


def test_parameters_stay_what_they_are():
    module = torch.nn.Linear(3, 5)
    parameters, values = list(module.parameters()), [p.detach().clone() for p in module.parameters()]
    AdamATan2(parameters, **_OPTIONS)
    assert all(now is then for now, then in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(parameters, values, strict=True))


def test_gradients_of_flat_sync_lie_as_the_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 7))
    optimizer = AdamATan2(model.parameters(), **_OPTIONS)
    sync = build_gradient_sync(model)
    model(torch.ones(2, 3)).sum().backward()
    sync.finish()
    ((parameters, gradients, *_),) = optimizer._pieces()
    assert len(parameters) == len(gradients)
    assert gradients.norm() == sync.norm() > 0


def test_without_gradient_a_parameter_stands_still():
    still, moving = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdamATan2([still, moving], **_OPTIONS)
    moving.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(2))
    assert not torch.equal(moving.detach(), torch.ones(2))
