"""URM against a plain computation of its formulas: values, and gradients of the last calls alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.urm import ConvSwiGLU
from tests.float64 import assert_close
from tests.tiny import FACTS, random_batch, run_step, tiny_arch, tiny_model

_SIZES = {"L_layers": 2, "H_cycles": 3, "L_cycles": 2}


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def _mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gate, up = (x @ w[f"{name}.gate_up_proj.weight"].T).chunk(2, -1)
    u, kernel, rows = F.silu(gate) * up, w[f"{name}.dwconv.weight"], []
    for p in range(x.shape[1]):
        row = kernel[:, 0, 1] * u[:, p] + w[f"{name}.dwconv.bias"]
        rows.append(row + kernel[:, 0, 0] * u[:, p - 1] if p else row)
    return F.silu(torch.stack(rows, 1)) @ w[f"{name}.down_proj.weight"].T


def _attention(x: Tensor, w: dict[str, Tensor], name: str, heads: int) -> Tensor:
    size = x.shape[-1] // heads
    places = torch.arange(x.shape[1]).to(x.dtype)
    angles = torch.outer(places, 10000.0 ** (-torch.arange(0, size, 2).to(x.dtype) / size))

    def turn(head: Tensor) -> Tensor:
        x1, x2 = head.chunk(2, -1)
        return torch.cat([x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()], -1)

    q, k, v = (each.chunk(heads, -1) for each in (x @ w[f"{name}.qkv_proj.weight"].T).chunk(3, -1))
    found = [torch.softmax(turn(q[i]) @ turn(k[i]).mT / size**0.5, -1) @ v[i] for i in range(heads)]
    return torch.cat(found, -1) @ w[f"{name}.o_proj.weight"].T


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("gradient_cycles", [0, 1, 2])
def test_a_step_and_its_gradients_are_those_of_the_formulas(gradient_cycles):
    options = {**_SIZES, "gradient_cycles": gradient_cycles}
    model, arch, batch = tiny_model("urm", **options).train(), tiny_arch("urm", **options), random_batch(3)
    network = model.network
    w = dict(network.named_parameters())
    rows = network.puzzle_emb.weights[batch.puzzle_identifiers].clone().requires_grad_()
    tokens = w["embed_tokens.embedding_weight"][batch.inputs]
    e = 32**0.5 * torch.cat([rows[:, None], tokens], 1)
    h, num_calls = network.H_init.expand(e.shape), 6
    for call in range(num_calls):
        if call == num_calls - (2 * gradient_cycles or 1):
            h = h.detach()
        x = h + e
        for layer in range(2):
            name = f"L_level.layers.{layer}"
            x = _rms(x + _attention(x, w, f"{name}.self_attn", arch.num_heads))
            x = _rms(x + _mlp(x, w, f"{name}.mlp"))
        h = x
    logits = (h @ w["lm_head.weight"].T)[:, 1:]
    q = h[:, 0] @ w["q_head.weight"].T + w["q_head.bias"]

    output = run_step(model, model.initial_carry(batch), batch)
    assert output.carry.state.keys() == {"z_H"}
    assert_close(output.carry.state["z_H"], h.detach())
    assert_close(output.prediction.logits, logits)
    assert_close(output.prediction.q_halt, q[:, 0])
    assert torch.equal(output.carry.halted, q[:, 0] > 0)
    weights = torch.randn_like(logits)
    ((output.prediction.logits * weights).sum() + output.prediction.q_halt.sum()).backward()
    expected = torch.autograd.grad((logits * weights).sum() + q[:, 0].sum(), [*w.values(), rows])
    for (name, parameter), theirs in zip(w.items(), expected, strict=False):
        assert_close(parameter.grad, theirs, what=name)
    _, gradients = network.puzzle_emb.pop_gradients()
    assert_close(gradients, expected[-1])


def test_the_convolution_begins_as_published():
    torch.manual_seed(0)
    conv = ConvSwiGLU(512, expansion=4).dwconv
    assert conv.weight.shape == (1536, 1, 2)
    for values in (conv.weight, conv.bias):
        assert values.dtype == torch.float32
        assert values.abs().max().item() == pytest.approx(0.5**0.5, rel=1e-2)
        assert values.std().item() == pytest.approx(0.5**0.5 / 3**0.5, rel=0.05)


def test_a_cell_sees_the_one_before_it_in_the_sequence():
    layer, x = ConvSwiGLU(8, expansion=1), torch.randn(1, FACTS.seq_len, 8)
    changed = x.clone()
    changed[0, 3] += 1
    differs = (layer(changed) - layer(x)).abs().sum(-1)[0] > 0
    assert differs.nonzero().flatten().tolist() == [3, 4]
