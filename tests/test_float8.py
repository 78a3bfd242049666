"""Products in float8: against the rounding done by hand, and where in a model they are."""

import pytest
import torch
import torch.nn.functional as F

from models import float8
from models.float8 import product, use_float8
from models.layers import Linear
from tests.ranks import run_program
from tests.tiny import FACTS, OVERRIDES, random_batch, tiny_model

_ROUNDING = 2.0**-4  # of a float8 number with 3 bits behind the point, relative, at most
_OF_BFLOAT16 = 2.0**-8


pytestmark = pytest.mark.skipif(
    float8.why_not(torch.device("cpu")) != "", reason="this torch has no float8 products for CPUs"
)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as float8 has them, each scaled so that its largest value is 448."""
    scale = x.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    return (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


def _factors(*, num_rows: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(num_rows, 32) * torch.logspace(-6, 3, num_rows).unsqueeze(1)  # of very different sizes
    x, weight = rows.bfloat16().view(3, -1, 32), torch.randn(48, 32).bfloat16()
    return x.requires_grad_(), weight.requires_grad_()


def test_a_product_is_that_of_the_rounded_rows():
    x, weight = _factors()
    y = product(x, weight)
    assert (y.dtype, y.shape) == (torch.bfloat16, (3, 7, 48))
    expected = F.linear(_rounded(x), _rounded(weight))
    size = F.linear(_rounded(x).abs(), _rounded(weight).abs())
    assert ((y.double() - expected).abs() <= 2 * _OF_BFLOAT16 * size).all()
    assert ((y - F.linear(x, weight)).double().abs() <= 2.2 * _ROUNDING * size).all()
    assert not torch.equal(y, F.linear(x, weight))


def test_gradients_are_those_of_the_factors():
    """That of the weight is not rounded to float8, as it is a sum over the rows of the whole batch."""
    x, weight = _factors()
    gradient = torch.randn(3, 7, 48).bfloat16()
    product(x, weight).backward(gradient)
    expected = F.linear(_rounded(gradient), _rounded(weight.t()))
    size = F.linear(_rounded(gradient).abs(), _rounded(weight.t()).abs())
    assert ((x.grad.double() - expected).abs() <= 2 * _OF_BFLOAT16 * size).all()
    of_weight = gradient.flatten(0, 1).t() @ x.flatten(0, 1)
    assert torch.equal(weight.grad, of_weight)


def test_a_row_does_not_depend_on_the_others():
    x, weight = _factors()
    assert torch.equal(product(x, weight)[1:2], product(x[1:2], weight))


def test_rows_of_zeros_stay_zeros():
    _, weight = _factors()
    assert not product(torch.zeros(2, 3, 32, dtype=torch.bfloat16), weight).any()


def _float8_projections(model: torch.nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if getattr(each, "product", None) is product}


@pytest.mark.parametrize("name", ["hrm", "trm", "urm", "serrm"])
def test_they_are_in_the_blocks_alone(name):
    network = tiny_model(name, forward_dtype="bfloat16").network
    use_float8(network)
    found = _float8_projections(network)
    inside = {key for key, each in network.named_modules() if isinstance(each, Linear) and "_level." in key}
    of_16 = {key for key in inside if not any(n % 16 for n in network.get_parameter(f"{key}.weight").shape)}
    assert found == of_16
    assert any(key.endswith("gate_up_proj") for key in found)
    assert not any("head" in key for key in found)


@pytest.mark.parametrize("conv", ["none", "instead", "beside"])
def test_each_of_them_is_computed(conv):
    """Without rotary positions: with them the CPU has another way to q, k and v, of one product."""
    options = {"conv": conv, "pos_encodings": "none", "puzzle_emb_ndim": 0}
    network = tiny_model("trm", forward_dtype="bfloat16", **options).network
    use_float8(network)
    marked, computed = _float8_projections(network), set()
    assert ("L_level.layers.0.self_attn.qkv_proj" in marked) == (conv != "instead")
    for name in marked:
        network.get_submodule(name).product = lambda *factors, name=name: (
            computed.add(name) or product(*factors)
        )
    batch = random_batch(2)
    network(network.initial_state(2, seq_len=FACTS.seq_len), batch.inputs, batch.puzzle_identifiers)
    assert computed == marked


def test_a_mistake_of_our_own_is_no_missing_device(monkeypatch):
    monkeypatch.setattr(float8, "_to_float8", lambda _: torch.ones(2) @ torch.ones(3))
    network = tiny_model(forward_dtype="bfloat16").network
    use_float8(network)
    with pytest.raises(RuntimeError, match="size"):
        product(*_factors())


def test_sides_that_are_no_multiples_of_16_stay():
    """MLPs over 16 cells and 3 positions of the puzzle embedding."""
    network = tiny_model("trm", forward_dtype="bfloat16", mlp_t=True).network
    use_float8(network)
    assert _float8_projections(network) == {
        f"L_level.layers.0.mlp.{each}" for each in ("gate_up_proj", "down_proj")
    }


@pytest.mark.parametrize("name", ["hrm", "trm"])
def test_a_step_is_nearly_the_one_without(name):
    models = [tiny_model(name, forward_dtype="bfloat16").train() for _ in range(2)]
    use_float8(models[1].network)
    batch, gradients = random_batch(8), []
    for model in models:
        prediction = model(model.initial_carry(batch), batch).prediction
        F.cross_entropy(prediction.logits.float().flatten(0, 1), batch.labels.long().flatten()).backward()
        gradients.append(
            torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        )
    assert F.cosine_similarity(*gradients, dim=0) > 0.9
    assert not torch.equal(*gradients)


def test_a_device_without_is_told(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("torch._scaled_mm is only supported on ...\nand more")

    monkeypatch.setattr(float8.torch, "_scaled_mm", fail)
    with pytest.raises(ValueError, match=r"float8=true needs a GPU .*only supported on \.\.\.\)"):
        use_float8(tiny_model(forward_dtype="bfloat16").network)


@pytest.mark.slow
def test_a_run_learns_with_them(tmp_path, sudoku_folder):
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "arch.forward_dtype=bfloat16", "float8=true")
    finished = run_program("pretrain", *words, "checkpoint_path=run", folder=tmp_path, world_size=2)
    assert finished.statuses == [0, 0], finished.stderr
    finished = run_program("pretrain", *words, "float8=false", "checkpoint_path=run", folder=tmp_path)
    assert finished.statuses == [1]
    assert "float8" in finished.stderr
