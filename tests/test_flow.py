"""Looped Flows: the law of the sampler, the times of training, plain loops, and what evaluation may read."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from config.files import load_defaults
from config.programs import EvaluateConfig
from config.schema import validate_config
from dataset.files import open_dataset
from dataset.loader import Batch
from evaluation.loop import answer_batches
from evaluation.passes import SetResult, evaluate_split
from evaluation.selection import Settings
from evaluation.test_time import build_draw, set_up
from models import HaltingModel
from models.carry import Carry
from models.objective import CROSS_ENTROPIES, PROBABILITIES, stablemax
from models.random import SlotRng
from tests.float64 import assert_close, in_float64
from tests.ranks import run_ranks
from tests.sudoku_source import build_sets
from tests.tiny import FACTS, draws_of, halting_model, random_batch, tiny_model

_V = FACTS.vocab_size


def _draws(step: int, slots: int) -> SlotRng:
    return SlotRng.of_training(0, step=step, slots=range(slots), device=torch.device("cpu"))


def _without_blocks(model: HaltingModel) -> HaltingModel:
    """Makes a model fast whose answers do not matter."""
    model.network.L_level.run_blocks = lambda h, *_: h
    return model


def _train(model: HaltingModel, batch: Batch, steps: int, progress: float = 0.0) -> list[tuple]:
    """Runs thinking steps of training without halting. Returns the carries before and after each one."""
    reasoning = dataclasses.replace(model.reasoning, halting="max", progress=progress)
    carry, found = model.initial_carry(batch), []
    for step in range(1, steps + 1):
        rng = _draws(step, len(batch.rows))
        before = model.refill(carry, batch, reasoning, rng)
        output = model(before, reasoning, rng)
        carry = output.carry
        found.append((before, output, rng))
    return found


def _evaluate(model: HaltingModel, batch: Batch, **changes) -> list[tuple[Carry, torch.Tensor]]:
    """Runs an evaluation. Returns carry and logits after each step."""
    reasoning = dataclasses.replace(model.eval_reasoning("max"), **changes)
    found, draw = [], build_draw(model.network, reasoning, seed=3)
    options = {"draw": draw, "on_step": lambda output, _: found.append(output)}
    with torch.no_grad():
        list(answer_batches(model.eval(), iter([batch]), reasoning, **options))
    return [(output.carry, output.prediction.logits) for output in found]


@pytest.mark.parametrize("sde_noise", [0.0, 2.0, 50.0])
def test_the_sampler_of_a_perfect_predictor_has_the_law_of_the_interpolant(sde_noise, monkeypatch):
    """Mean and variance after each step. With sde_noise=50, every step draws all noise again."""
    model, batch, n = _without_blocks(tiny_model("flow")), random_batch(1000), 5
    right = F.one_hot(batch.inputs.long(), _V).float()
    answer = model.network.answer
    perfect = 1e12 * (2 * right - 1)
    monkeypatch.setattr(model.network, "answer", lambda z: answer(z)._replace(logits=perfect))
    steps = _evaluate(model, batch, max_steps=n, sde_noise=sde_noise)
    std = _V**-0.5
    previous = None
    for number, (carry, _) in enumerate(steps[:-1], 1):
        t = number / n
        noise = (carry.state["x"] - t * right) / (1 - t)
        for entries in (noise[right == 0], noise[right == 1]):
            assert abs(entries.mean()) < 5 * std / len(entries) ** 0.5
            assert entries.var() == pytest.approx(std**2, rel=5 * (2 / len(entries)) ** 0.5)
        if previous is not None:
            expected = (
                max(1 - sde_noise / n, 0) * (1 - (t - 1 / n)) / (1 - max(1 - sde_noise / n, 0) * (t - 1 / n))
            )
            kept = float((noise * previous).mean() / std**2)
            assert kept == pytest.approx(expected, abs=0.02), "the ODE keeps x0"
        previous = noise
    assert torch.allclose(steps[-1][0].state["x"], right, atol=1e-6)


@pytest.mark.parametrize("times", ["sorted", "random_start"])
def test_times_of_training_are_sorted_uniform_numbers(times):
    model, k = _without_blocks(tiny_model("flow", times=times)).train(), 4
    with torch.no_grad():
        steps = _train(model, random_batch(3000), k)
    found = np.stack([output.carry.state["time"].numpy() for _, output, _ in steps], axis=1)
    assert (np.diff(found, axis=1) >= 0).all()
    drawn = np.random.default_rng(0).random((20_000, k + 1))
    if times == "random_start":
        drawn[:, 1:] = drawn[:, :1] + (1 - drawn[:, :1]) * drawn[:, 1:]
    expected = np.sort(drawn, axis=1)[:, :k]
    np.testing.assert_allclose(found.mean(0), expected.mean(0), atol=0.025)
    np.testing.assert_allclose(found.std(0), expected.std(0), atol=0.015)
    np.testing.assert_allclose(np.corrcoef(found.T), np.corrcoef(expected.T), atol=0.06)
    noise = [before.state["x"] for before, _, _ in steps]
    assert all(torch.equal(noise[0], each) for each in noise), "all steps of an answer share x0"
    assert noise[0].std().item() == pytest.approx(_V**-0.5, rel=0.02)


def _step_of_a_plain_loop(model: HaltingModel, carry: Carry, x: torch.Tensor, t: torch.Tensor) -> tuple:
    """Returns z_H, logits and probabilities of a thinking step that reads x at time t."""
    network, state, reasoning = model.network, carry.state, model.reasoning
    puzzle = network.num_puzzle_positions
    e = network.embed(carry.data.inputs, carry.data.puzzle_identifiers).clone()
    first, _, second = network.time_mlp
    hidden = F.silu(t[:, None] @ first.weight.T + first.bias)
    e = e + (hidden @ second.weight.T + second.bias)[:, None]
    e[:, puzzle:] += network.arch.hidden_size**0.5 * torch.einsum("blv,vh->blh", x, network.W_x)
    z_H, z_L = state["z_H"], state["z_L"]
    for _ in range(reasoning.H_cycles):
        z_H, z_L = z_H.detach(), z_L.detach()  # only the last cycle has gradient
        for _ in range(reasoning.L_cycles):
            z_L = network.L_level(z_L, z_H + e, network.rotary)
        z_H = network.L_level(z_H, z_L, network.rotary)
    logits = network.lm_head(z_H)[:, puzzle:]
    numbers = [a + 1 if a >= 0 else 1 / (1 - a) for a in logits.flatten().tolist()]
    s = torch.tensor(numbers).view(logits.shape)
    return z_H, logits, s / s.sum(-1, keepdim=True)


@pytest.mark.usefixtures("float64")
def test_training_is_that_of_a_plain_loop():
    """Own predictions have probability 0.75 here, the first step excluded."""
    model, batch = tiny_model("flow", own_predictions=0.8).train(), random_batch(6)
    right = torch.where(batch.labels >= 0, batch.labels, batch.inputs).long()
    target, guess, t, owns = F.one_hot(right, _V).double(), None, torch.zeros(6), []
    for number, (before, output, rng) in enumerate(_train(model, batch, 4, progress=0.6)):
        u, draw = rng.uniform((2,), use="flow time and guess").unbind(1)
        t = torch.tensor([1 - (1 - s) * v ** (1 / (5 - number)) for s, v in zip(t, u, strict=True)])
        is_own = (draw < 0.75) & (number > 0)
        owns += is_own.tolist()
        end = torch.where(is_own[:, None, None], guess, target) if number else target
        x = (1 - t)[:, None, None] * before.state["x"] + t[:, None, None] * end
        z_H, logits, guess = _step_of_a_plain_loop(model, before, x, t)
        assert_close(output.prediction.logits, logits)
        assert_close(output.carry.state["z_H"], z_H.detach())
        names, weights = zip(*model.named_parameters(), strict=True)
        ours, theirs = (
            torch.autograd.grad(each.square().sum(), weights, allow_unused=True)
            for each in (output.prediction.logits, logits)
        )
        for name, found, expected in zip(names, ours, theirs, strict=True):
            assert_close(found, expected, what=name)
    assert 0 < sum(owns) < 18


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("sde_noise", [0.0, 2.0])
def test_evaluation_is_that_of_a_plain_loop(sde_noise):
    model, batch, n = tiny_model("flow").eval(), random_batch(3), 4
    reasoning = dataclasses.replace(model.eval_reasoning("max"), max_steps=n, sde_noise=sde_noise)
    rngs = [
        SlotRng.of_evaluation(3, rows=batch.rows, samples=torch.zeros(3).long(), steps=torch.tensor(i).int())
        for i in (1, 2, 3, 4)
    ]
    carry = model.refill(model.initial_carry(batch), batch, reasoning, rngs[0])
    x, s = _V**-0.5 * rngs[0].normal((FACTS.seq_len, _V), use="flow x0"), _V**-0.5
    a = 1 - sde_noise / n
    for i, (found, logits) in enumerate(_evaluate(model, batch, max_steps=n, sde_noise=sde_noise)):
        u = a * i / n
        noise = rngs[i].normal((FACTS.seq_len, _V), use="flow noise")
        xb = a * x + ((1 - u) ** 2 - (a - u) ** 2) ** 0.5 * s * noise
        z_H, expected, guess = _step_of_a_plain_loop(model, carry, xb, torch.full((3,), u))
        x = xb + ((i + 1) / n - u) * (guess - xb) / (1 - u)
        assert_close(logits, expected)
        assert_close(found.state["x"], x)
        carry = found
        assert_close(carry.state["z_H"], z_H)
    assert_close(x, guess)


@pytest.mark.parametrize("halting", ["max", "act"])
def test_evaluation_reads_no_label_and_has_all_steps(halting):
    model, batch = tiny_model("flow"), random_batch(8)
    model.network.q_head.bias.data.fill_(100)  # training would halt after every step
    changed = batch._replace(labels=random_batch(8, seed=1).labels)
    found, others = (_evaluate(model, each, halting=halting) for each in (batch, changed))
    assert len(found) == 6
    for (ours, logits), (theirs, other_logits) in zip(found, others, strict=True):
        assert torch.equal(logits, other_logits)
        assert all(torch.equal(ours.state[name], theirs.state[name]) for name in ours.state)
    assert model.train().network.wants_to_halt({}, model.network.answer(found[0][0].state["z_H"])).all()


def test_samples_of_a_flow_differ_and_its_noise_is_an_option():
    asked = load_defaults("evaluate") | {"checkpoint": "run", "samples": [5]}
    for noise, expected in ((None, 5.0), (0.0, 0.0)):
        config = validate_config(EvaluateConfig, asked | {"sde_noise": noise})
        assert set_up(tiny_model("flow"), config)[0].sde_noise == expected
    with pytest.raises(ValueError, match=r"^sde_noise is for models that follow a flow \(arch=flow\)"):
        set_up(tiny_model("trm"), validate_config(EvaluateConfig, asked | {"sde_noise": 1.0}))


def _evaluate_split(folder: Path, batch_size: int) -> SetResult | None:
    """Returns the result on rank 0, of one and of three samples."""
    model = halting_model(folder, "flow", steps=3, eval_halt_max_steps=4)
    options = {"outputs": ("preds",), "seed": 1, "settings": Settings((4,), (1, 3))}
    options |= {"global_batch_size": batch_size}
    return evaluate_split(model, open_dataset(folder, read_everything=False), **options).get("all")


@pytest.mark.slow
def test_neither_ranks_nor_batch_size_change_an_answer(tmp_path):
    build_sets("sudoku", tmp_path, "--generate", 20, "--num-test", 30, "--box", "2x2")
    results = [in_float64(_evaluate_split, tmp_path, size) for size in (16, 300)]
    results.append(run_ranks(in_float64, 2, _evaluate_split, tmp_path, 24)[0])
    for each in results[1:]:
        assert np.array_equal(each.outputs["preds"], results[0].outputs["preds"])
        assert each.metrics == pytest.approx(results[0].metrics, rel=1e-9)


def test_stablemax_has_finite_gradients():
    logits = torch.tensor([[[1.0, 0.0, -1.0, 3.0], [1.0, 1.0, -0.0, -1e4]]], requires_grad=True)
    stablemax(logits).square().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_are_those_of_the_loss(name):
    logits, labels = torch.randn(2, 3, 5).double(), torch.randint(5, (2, 3))
    chosen = PROBABILITIES[name](logits).gather(-1, labels[..., None])[..., 0]
    losses = CROSS_ENTROPIES[name](logits, labels, label_smoothing=0.0)
    torch.testing.assert_close(chosen.log().float(), -losses.float())


def test_a_slot_keeps_its_noise_until_it_halts():
    """A slot that halts gets new noise, and begins at step 0. Its neighbors keep theirs."""
    model, batch = tiny_model("flow").train(), random_batch(4)
    carry = model.refill(model.initial_carry(batch), batch, model.reasoning, draws_of(4))
    halted = torch.tensor([True, False, False, True])
    after = model(carry, model.reasoning, draws_of(4)).carry._replace(halted=halted)
    again = model.refill(after, random_batch(4, seed=2), model.reasoning, _draws(2, 4))
    assert torch.equal((again.state["x"] == carry.state["x"]).flatten(1).all(1), ~halted)
    assert torch.equal(again.state["step"] == 0, halted)
    assert torch.equal(again.state["time"] == 0, halted)
