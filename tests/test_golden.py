"""Our numbers against those of the public implementations (`tests.golden`), with its tolerances."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model, load_weights
from config.compose import compose_overrides
from config.published import PUBLISHED
from config.schema import PretrainConfig
from dataset.mixture import open_datasets
from evaluation.passes import evaluate_split
from models.infiloop import Gate
from runtime.reading import read_yaml
from tests import golden
from tests.float64 import assert_close
from tests.golden import __main__ as golden_program
from tests.golden import ldt
from tests.tiny import run_step, tiny_arch, tiny_model
from training.initial import copy_weights_
from training.run_config import name_arch

_RUNS = golden.find_runs()


def test_every_model_is_replayed():
    names = {PUBLISHED[golden.expected(folder)["model"]].name for folder in _RUNS}
    assert names == {"hrm", "trm", "serrm", "urm", "fprm"}
    assert ldt.find_runs()


@pytest.mark.slow
def test_parity_is_printed(monkeypatch, capsys):
    """Every row, with its differences; a run that differs is named, with the number, and ends in status 1."""
    monkeypatch.setattr("sys.argv", ["golden"])
    assert golden_program.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "_a " in line]
    assert {row[0] for row in rows} == {run.name for run in [*_RUNS, *ldt.find_runs()]}
    assert all(0 <= float(number) <= 5e-4 for row in rows for number in row[2:])
    replay = functools.partial(golden.replay, first_step=8)
    monkeypatch.setattr(golden_program, "replay", replay)
    monkeypatch.setattr(golden_program, "find_runs", lambda folder: _RUNS[:1])
    monkeypatch.setattr(ldt, "find_runs", lambda folder: [])
    assert golden_program.main() == 1
    assert "step 1: loss is " in capsys.readouterr().out


def test_evaluation_of_the_given_final_weights():
    seen = golden.Differences()
    for folder in _RUNS:
        expected = golden.expected(folder)
        known = expected["eval_on_batch_0_after_training"]
        model = golden.load(folder, len(expected["train"])).eval()
        batch = golden.batch(folder, 0)
        carry = model.initial_carry(batch)
        rng, last = golden.recorded_start(folder, model, "eval_initial_y"), known["inference_steps"]
        with torch.inference_mode():
            for _ in range(last):
                output = run_step(model, carry, batch, rng=rng, max_steps=last)
                output = golden.as_published(model, output)
                carry = output.carry
        if (folder / "trace.npz").exists():
            golden.compare_trace(seen, carry, folder / "trace.npz", "eval_{}")
            assert model.network.wants_to_halt(carry.state, output.prediction).all()
        assert carry.halted.all(), "all slots halt after exactly inference_steps calls"
        golden.compare_outputs(seen, output.prediction, folder / "eval_outputs.npz", tolerance=5e-3)
        sums = model.network.objective.sums(output)
        for name in golden.SUMS:
            assert float(sums[name]) == pytest.approx(known[name], rel=1e-6), name
        assert sums["lm_loss"].item() == pytest.approx(known["lm_loss"], rel=1e-4)
        assert sums["q_halt_loss"].item() == pytest.approx(known["q_halt_loss"], rel=1e-3)


@pytest.mark.usefixtures("float64")
def test_a_gated_state_is_the_recorded_mean_of_all_that_was_proposed():
    """The recurrence alone: values and gradients."""
    sequence = np.load(golden.GOLDEN / "gate_a" / "sequence.npz")
    known = {name: torch.from_numpy(each) for name, each in sequence.items()}
    gate = Gate(len(known["q"]), eps=float(known["eps"]))
    gate.load_state_dict({name: known[name] for name in ("q", "beta_logit")})
    z = known["z"].requires_grad_()
    h, log_D, total = z[0], gate.score(z[0]), 0
    for step, proposed in enumerate(z):
        h, log_D = gate(h, proposed, log_D) if step else (h, log_D)
        assert_close(h, known["h"][step])
        assert_close(log_D.exp(), known["D"][step])
        total = total + (h * known["weight"]).sum()
    assert_close(total, known["loss"])
    for name, ours in zip(("z", "q"), torch.autograd.grad(total, (z, gate.q)), strict=True):
        assert_close(ours, known[f"grad_{name}"], what=name)


def test_a_published_config_may_have_more_and_less():
    """URM's has keys of the run in its arch, and lacks a constant of its code."""
    changes = {"halt_exploration_prob": None, "profile": True, "loop_deltas": [0, 8], "ema_rate": 0.999}
    changes["forward_dtype"] = None
    with golden.published_checkpoint(golden.GOLDEN / "urm_a", 0, **changes) as checkpoint:
        assert (checkpoint.arch.name, checkpoint.arch.L_layers) == ("urm", 2)
        assert checkpoint.arch.forward_dtype == "bfloat16"
        assert (checkpoint.arch.halt_max_steps, checkpoint.arch.halt_exploration_prob) == (4, 0.1)
    unknown = golden.published_checkpoint(golden.GOLDEN / "urm_a", 0, loop_delta=1)
    with pytest.raises(ValueError, match="loop_delta"), unknown:
        pass


@pytest.mark.parametrize(
    "wrapper", ["", "model.inner.", "module.model.inner.", "module._orig_mod.model.inner."]
)
@pytest.mark.parametrize("name", ["urm_a", "hrm_a"])
def test_a_public_checkpoint_may_be_wrapped_and_hold_more(tmp_path, name, wrapper):
    """As URM's code writes it, beside config.yaml; without compile, and with DDP. Given as a folder too."""
    run = golden.GOLDEN / name
    expected = golden.load(run, 8).network.state_dict()
    weights = torch.load(run / "step_8", weights_only=True)
    weights = {wrapper + key.removeprefix("_orig_mod.model.inner."): value for key, value in weights.items()}
    others = {"step": 8, "optimizer_states": [{"state": {0: {"step": 8}}}]}
    others |= {"rng_state": torch.get_rng_state(), "model_state_dict": weights}
    torch.save(others, tmp_path / "step_8.pt")
    torch.save(weights, tmp_path / "step_7")
    golden.write_config(tmp_path / "config.yaml", run)
    for path in (tmp_path, tmp_path / "step_8.pt", tmp_path / "step_7"):
        checkpoint = find_checkpoint(path)
        assert checkpoint.name == ("step_7" if path.name == "step_7" else "step_8")
        loaded = load_weights(checkpoint)
        assert loaded.keys() >= expected.keys()
        assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_a_public_fprm_with_a_fixed_start_begins_with_its_vector(tmp_path):
    """As with a recorded start that has this vector at every position. No golden run has a fixed start."""
    run = golden.GOLDEN / "fprm_a"
    weights, known = torch.load(run / "step_8", weights_only=True), golden.expected(run)
    vector = torch.randn(known["arch"]["hidden_size"])
    key = "_orig_mod.model.inner.L_optimizer.init_vec"
    torch.save(weights | {key: vector}, tmp_path / "step_8")
    golden.write_config(tmp_path / "config.yaml", run, fixed_init=True)
    checkpoint, noisy, batch = find_checkpoint(tmp_path), golden.load(run, 8).eval(), golden.batch(run, 0)
    assert (checkpoint.arch.init_noise, checkpoint.arch.fixed_init_std) == (0, known["arch"]["init_std"])
    sizes = {name: known[name] for name in ("vocab_size", "seq_len", "num_puzzle_identifiers")}
    fixed = load_trained_model(checkpoint, SimpleNamespace(**sizes, num_columns=None)).eval()
    start = noisy.initial_carry(batch).state["z_H"]
    rng = golden.RecordedStart(vector.expand(start.shape), std=noisy.reasoning.init_noise)
    with torch.inference_mode():
        expected = run_step(noisy, noisy.initial_carry(batch), batch, rng=rng)
        ours = run_step(fixed, fixed.initial_carry(batch), batch)
    torch.testing.assert_close(ours.prediction.logits, expected.prediction.logits)
    fresh = tiny_model("fprm", fixed_init_std=3.0).network
    assert fresh.H_init.std().item() == pytest.approx(3.0, rel=0.3)
    assert torch.equal(fresh.initial_state(2, seq_len=4)["z_H"][1, 3], fresh.H_init)
    with pytest.raises(ValueError, match="fixed_init_std=3 has no effect"):
        tiny_arch("fprm", fixed_init_std=3.0, init_noise=6.0)


@pytest.mark.slow
def test_a_run_that_begins_with_a_checkpoint_has_its_arch_by_one_word_or_by_those_of_the_refusal():
    with golden.published_checkpoint(golden.GOLDEN / "urm_a", 8) as checkpoint:
        with pytest.raises(ValueError, match="does not match") as refused:
            copy_weights_({"more": torch.zeros(1)}, str(checkpoint.path), tiny_arch("trm"))
        advice = str(refused.value).partition(" Set ")[2].removesuffix(".")
        one_word, *words = advice.replace(", or", "").split()
        words_of_path = [f"init_from={checkpoint.path}", "experiment=trm_maze", one_word]
        loops = "curriculum=[{share: 0.5, loops: 2}]"  # which the default arch has not
        assert name_arch([loops, *words_of_path])[0] == "arch=urm"
        for given in (words, name_arch(words_of_path), name_arch(["-cd", ".", *words_of_path])):
            assert compose_overrides(PretrainConfig, ["data_path=x", *given]).arch == checkpoint.arch
        deeper = name_arch([*words_of_path, "arch.L_layers=5"])
        assert compose_overrides(PretrainConfig, deeper).arch.L_layers == 5
    with pytest.raises(ValueError, match="^config: arch=checkpoint .* init_from=PATH"):
        name_arch([one_word])


@pytest.mark.slow
def test_published_checkpoint_is_evaluated_as_by_the_public_tools():
    folder = golden.GOLDEN / "hrm_checkpoint"
    expected = golden.expected(folder)
    checkpoint = find_checkpoint(folder)
    assert checkpoint.step == expected["step"]
    assert checkpoint.data_paths == [read_yaml(folder / "all_config.yaml")["data_path"]]
    data = open_datasets(checkpoint.find_data(), splits=("test",), read_everything=True)
    model, outputs = load_trained_model(checkpoint, data.metadata), ("preds", "q_halt_logits")
    result = evaluate_split(model, data, global_batch_size=128, outputs=outputs)[expected["set"]]
    assert result.metrics["count"] == expected["count"]
    for name, value in expected["metrics"].items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-3 if name == "q_halt_loss" else 1e-4), name
    after_each_step = pytest.approx(expected["exact_accuracy_after_each_step"], abs=1e-6)
    assert result.exact_accuracy_after_each_step == after_each_step
    with np.load(folder / "predictions.npz") as predictions:
        assert result.outputs["preds"].dtype == np.uint8
        assert (result.outputs["preds"] != predictions["preds"]).sum() <= 2, "but for a tie of two logits"
        np.testing.assert_allclose(result.outputs["q_halt_logits"], predictions["q_halt_logits"], atol=5e-3)
