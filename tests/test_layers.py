"""The parts of the network against plain loops, and what the whole must satisfy."""

import dataclasses
import math

import pytest
import torch

from models import build_model
from models.blocks import Block
from models.layers import (
    Attention,
    Convolution,
    SwiGLU,
    attend,
    rms_norm,
    rotary_angles,
    rotate,
    rotate_pairs,
    truncated_normal,
)
from tests.float64 import assert_close
from tests.tiny import FACTS, random_batch, run_step, tiny_arch, tiny_model


def test_truncated_normal_has_the_standard_deviation_asked_for():
    torch.manual_seed(0)
    values = truncated_normal(400_000, std=0.5)
    assert values.std().item() == pytest.approx(0.5, rel=5e-3)
    assert values.mean().item() == pytest.approx(0.0, abs=5e-3)
    assert values.abs().max().item() == pytest.approx(2 * 0.5 / 0.87962566, rel=1e-3)


def test_rms_norm_is_computed_in_float32():
    x = torch.randn(3, 64, dtype=torch.bfloat16) * 100
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert rms_norm(x, eps=1e-5).dtype == torch.bfloat16
    in_bfloat16, in_float32 = rms_norm(x, eps=1e-5).double(), rms_norm(x.float(), eps=1e-5).double()
    torch.testing.assert_close(in_bfloat16, expected, rtol=2**-8, atol=0)  # the result alone is rounded
    # The mean of 64 squares has as many roundings at most, the root halves what they do; and a few more.
    torch.testing.assert_close(in_float32, expected, rtol=40 * 2**-24, atol=0)


@pytest.mark.usefixtures("float64")
def test_pairs_side_by_side_turn_as_halves_do():
    x, angles = torch.randn(2, 5, 3, 8), rotary_angles(torch.arange(5), 8, base=100.0)
    rotary = angles.cos(), angles.sin()
    side_by_side = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    turned = rotate_pairs(side_by_side, *rotary).unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
    assert_close(turned, rotate(x, *rotary))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("length", [17, 300])
def test_short_and_long_sequences_attend_alike(length):
    """Plain products or torch's kernel: values and gradients are those of the formula."""
    torch.manual_seed(0)
    q, k, v = inputs = [torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(3)]
    ours, theirs = attend(q, k, v), torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), dim=-1) @ v
    assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    gradients = (torch.autograd.grad(output, inputs, weights) for output in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        assert_close(mine, other)


@pytest.mark.usefixtures("float64")
def test_a_convolution_sees_the_neighbours_of_each_cell():
    torch.manual_seed(0)
    rows, columns, hidden = 3, 5, 4
    conv = Convolution(hidden, num_columns=columns, num_before=2)
    x = torch.randn(2, 2 + rows * columns, hidden)
    grid, kernel = x[:, 2:].view(2, rows, columns, hidden), conv.weight.view(hidden, hidden, 3, 3)
    expected = torch.zeros(2, rows, columns, hidden)
    for row in range(rows):
        for column in range(columns):
            for down in (-1, 0, 1):
                for right in (-1, 0, 1):
                    there = row + down, column + right
                    if 0 <= there[0] < rows and 0 <= there[1] < columns:
                        weight = kernel[:, :, down + 1, right + 1]
                        expected[:, row, column] += grid[:, there[0], there[1]] @ weight.T
    mixed = conv(x)
    assert not mixed[:, :2].any()
    assert_close(mixed[:, 2:], expected.flatten(1, 2))


@pytest.mark.usefixtures("float64")
def test_a_convolution_beside_attention_is_added_to_it():
    torch.manual_seed(0)
    conv = Convolution(16, num_columns=2, num_before=1)
    block = Block(self_attn=Attention(16, num_heads=2), conv=conv, mlp=SwiGLU(16, expansion=4), eps=1e-5)
    h = torch.randn(3, 7, 16)
    mixed = rms_norm(h + block.self_attn(h, None) + block.conv(h), eps=1e-5)
    assert_close(block(h, None), rms_norm(mixed + block.mlp(mixed), eps=1e-5))


def test_weights_are_float32_and_activations_bfloat16():
    model = tiny_model(forward_dtype="bfloat16").train()
    batch = random_batch(4)
    output = run_step(model, model.initial_carry(batch), batch)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert output.carry.state["z_H"].dtype == output.prediction.logits.dtype == torch.bfloat16
    assert model.network.H_init.dtype == torch.bfloat16
    assert output.prediction.q_halt.dtype == torch.float32
    output.prediction.logits.float().sum().backward()
    assert model.network.lm_head.weight.grad.dtype == torch.float32


@pytest.mark.slow
def test_initial_values_of_the_published_model():
    torch.manual_seed(0)
    facts = dataclasses.replace(FACTS, vocab_size=11, seq_len=81, num_puzzle_identifiers=3)
    arch = tiny_arch(hidden_size=512, num_heads=8, puzzle_emb_ndim=512)
    network = build_model(arch, facts).network
    assert network.embed_tokens.embedding_weight.std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert network.lm_head.weight.std().item() == pytest.approx(512**-0.5, rel=0.05)
    down = network.H_level.layers[0].mlp.down_proj.weight
    assert down.std().item() == pytest.approx(1536**-0.5, rel=0.02)
    assert not network.q_head.weight.any()
    assert (network.q_head.bias == -5.0).all()
    assert not network.puzzle_emb.weights.any()
    assert network.H_init.std().item() == pytest.approx(1, rel=0.1)
