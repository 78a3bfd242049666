"""Halting in evaluation: what a puzzle is answered does not depend on what else is in the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.files import open_dataset
from dataset.loader import read_rows
from distributed.mesh import Mesh
from distributed.pipeline import Ring, pipe_levels
from distributed.world import world_size
from evaluation.passes import SetResult, evaluate_split
from evaluation.trace import record_trace
from models import HaltingModel
from models.blocks import levels_of
from models.objective import Objective
from tests.float64 import TOLERANCE, float64
from tests.ranks import run_ranks
from tests.sudoku_source import build_sets
from tests.tiny import FACTS, halting_model, random_batch, run_step, tiny_arch, tiny_model

_STEPS = 6
_SAVED = ("preds", "q_halt_logits", "labels", "inputs")


def _evaluate(
    folder: Path, name="trm", halting="act", batch_size: int = 32, layers: int = 1, num_stages: int = 1
) -> SetResult:
    """In float64: rounding changes with the batch, and may decide neither a halt nor an answer."""
    with float64():
        model, mesh = halting_model(folder, name, steps=_STEPS, L_layers=layers), None
        if num_stages > 1:
            sizes = {"pipeline": num_stages, "replicate": world_size() // num_stages, "shard": 1, "tensor": 1}
            mesh = Mesh(sizes)
            pipe_levels(levels_of(model.network), Ring(mesh.pipeline, mesh.owners))
        result = evaluate_split(
            model,
            open_dataset(folder, read_everything=False),
            global_batch_size=batch_size,
            reasoning=model.eval_reasoning(halting),
            outputs=_SAVED,
            **({"ranks": mesh.data, "stages": mesh.pipeline} if mesh else {}),
        )
    return result.get("all")


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["hrm", "trm", "serrm", "fprm"])
def test_every_answer_is_that_of_its_puzzle_alone(sudoku_folder, name):
    model = halting_model(sudoku_folder, name, steps=_STEPS).eval()
    data = open_dataset(sudoku_folder, read_everything=False)
    found = _evaluate(sudoku_folder, name)
    calls = []
    for row in range(0, 100, 3):
        batch = read_rows(data, "all", np.array([row]))
        carry, calls_here = model.initial_carry(batch), 0
        with torch.inference_mode():
            while not calls_here or not carry.halted.item():
                output = run_step(model, carry, batch, halting="act")
                carry = output.carry
                calls_here += 1
        calls.append(calls_here)
        q_halt = output.prediction.q_halt
        assert calls_here == _STEPS or model.network.wants_to_halt(carry.state, output.prediction)
        assert np.array_equal(found.outputs["preds"][row], output.prediction.logits.argmax(-1)[0].numpy())
        assert found.outputs["q_halt_logits"][row] == pytest.approx(q_halt.item(), abs=TOLERANCE)
    assert 1 in calls or name == "fprm"
    assert _STEPS in calls
    assert len(set(calls)) > 2, "the test is about slots that halt at different times"


def _assert_equal(ours: SetResult, theirs: SetResult) -> None:
    assert ours.metrics == pytest.approx(theirs.metrics, rel=TOLERANCE)
    for name, array in theirs.outputs.items():
        tolerance = TOLERANCE if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(ours.outputs[name], array, rtol=tolerance, atol=tolerance)


def test_neither_ranks_nor_batch_size_change_anything(sudoku_folder):
    acted = _evaluate(sudoku_folder)
    _assert_equal(_evaluate(sudoku_folder, batch_size=1000), acted)
    _assert_equal(run_ranks(_evaluate, 3, sudoku_folder, "trm", "act", 21)[0], acted)


@pytest.mark.slow
def test_stages_of_a_pipeline_go_on_together(tmp_path):
    """With idle slots where a stage has fewer puzzles left than another one, or none."""
    build_sets("sudoku", tmp_path / "data", "--generate", 20, "--num-test", 40, "--box", "2x2")
    alone = _evaluate(tmp_path / "data", layers=2)
    assert 1 < alone.metrics["steps"] < _STEPS
    _assert_equal(run_ranks(_evaluate, 4, tmp_path / "data", "trm", "act", 24, 2, 2)[0], alone)


def test_halting_needs_fewer_calls_and_all_steps_tell_what_it_would_give(sudoku_folder, monkeypatch):
    counts, results = {}, {}
    forward = HaltingModel.forward

    def counted(self, carry, *arguments, **options):
        counts[halting] = counts.get(halting, 0) + len(carry.steps)
        return forward(self, carry, *arguments, **options)

    monkeypatch.setattr(HaltingModel, "forward", counted)
    for halting in ("max", "act"):
        results[halting] = _evaluate(sudoku_folder, halting=halting, batch_size=16)
    everything, acted = results.values()
    assert counts["max"] == 112 * _STEPS  # rows with padding
    assert counts["act"] <= acted.metrics["steps"] * 100 + 16 * _STEPS
    assert everything.metrics["steps"] == _STEPS
    assert everything.metrics["act_steps"] == pytest.approx(acted.metrics["steps"])
    assert everything.metrics["act_exact_accuracy"] == pytest.approx(acted.metrics["exact_accuracy"])
    assert 1 < acted.metrics["steps"] < _STEPS
    assert "act_steps" not in acted.metrics
    assert acted.exact_accuracy_after_each_step == []
    assert len(everything.exact_accuracy_after_each_step) == _STEPS


_MODELS = ("hrm", "trm", "urm", "fprm", "serrm", "transformer")


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [*((name, "stablemax_cross_entropy") for name in _MODELS), ("trm", "softmax_cross_entropy")],
)
def test_a_trace_is_what_the_network_answers_after_each_step(name, loss_type):
    """Its probabilities are those that the loss compares with the labels."""
    loss = tiny_arch(name).loss.model_dump() | {"loss_type": loss_type}
    model, batch = tiny_model(name, loss=loss).eval(), random_batch(3)
    trace = record_trace(model, batch)

    state = model.network.initial_state(3, seq_len=FACTS.seq_len)
    with torch.inference_mode():
        for step in range(model.eval_reasoning("max").max_steps):
            data = batch.inputs, batch.puzzle_identifiers
            state, prediction = model.network(state, *data, reasoning=model.eval_reasoning("max"))
            x = prediction.logits.double().numpy()
            s = np.exp(x) if loss_type.startswith("softmax") else np.where(x < 0, 1 / (1 - x), x + 1)
            probabilities = s / s.sum(-1, keepdims=True)
            assert np.array_equal(trace.preds[:, step], prediction.logits.argmax(-1))
            np.testing.assert_allclose(trace.confidence[:, step], probabilities.max(-1), rtol=1e-5)
            assert np.array_equal(trace.q_halt[:, step], prediction.q_halt)
            wants_to_halt = model.network.wants_to_halt(state, prediction)
            assert np.array_equal(trace.wants_to_halt[:, step], wants_to_halt)
    assert trace.preds.shape == (3, model.eval_reasoning("max").max_steps, FACTS.seq_len)


def test_an_objective_of_a_plugin_without_a_count_is_named(sudoku_folder, monkeypatch, capsys):
    sums = Objective.sums
    without = {name: by for name, by in Objective.metrics.items() if name != "count"}
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "metrics", without)
        with pytest.raises(ValueError, match='^Objective.metrics lacks "count": None, the number of puzzles'):
            tiny_model()

    def sums_without_count(*arguments):
        return {name: value for name, value in sums(*arguments).items() if name != "count"}

    monkeypatch.setattr(Objective, "sums", sums_without_count)
    with pytest.raises(SystemExit):
        _evaluate(sudoku_folder)
    assert 'error: Objective.sums returns no "count", the number of answered' in capsys.readouterr().err
