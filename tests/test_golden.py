"""Our numbers against those of the public implementations (REFERENCE section 10), with its tolerances.

In float32, as the public code computed them: the vectors are conditioned so that float32 and float64 agree
within 3e-5, and no gradient of the first step is near its rounding.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from checkpointing.pretrained import Checkpoint, find_checkpoint, load_trained_model
from checkpointing.published import PUBLISHED
from config.architecture import LossConfig
from config.files import load_yaml
from dataset.format import Batch
from dataset.mixture import open_datasets
from evaluation.evaluate import evaluate_split
from evaluation.tally import Grid
from models import HaltingModel
from models.halting import StepOutput
from models.losses import loss_and_metrics, sum_metrics
from optimizers import build_optimizers
from parallel.division import Division
from parallel.flat import FlatParameters, build_gradient_sync

_SUMS = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps")
_RELATIVE = {"lm_loss": 1e-4, "q_halt_loss": 1e-3, "q_continue_loss": 1e-4}


def _expected(folder: Path) -> dict:
    return json.loads((folder / "expected.json").read_text())


@pytest.fixture
def replays(golden_folder: Path) -> list[Path]:
    """Every golden training run of a model that we have."""
    found = [
        path.parent
        for path in sorted(golden_folder.glob("*/expected.json"))
        if "train" in _expected(path.parent)
    ]
    return [folder for folder in found if _expected(folder)["model"] in PUBLISHED]


@contextlib.contextmanager
def _published_checkpoint(folder: Path, step: int, **changes: object) -> Iterator[Checkpoint]:
    """The golden weights of a step as a checkpoint of the public code; changes: of arch, None leaves out."""
    expected = _expected(folder)
    arch = {**expected["arch"], "name": expected["model"], "loss": {"loss_type": expected["loss"]}, **changes}
    arch = {key: value for key, value in arch.items() if value is not None}
    with tempfile.TemporaryDirectory() as published:
        path = Path(published, f"step_{step}")
        path.symlink_to(folder / path.name)
        config = {"arch": arch, "data_path": "data", "global_batch_size": expected["batch_size"]}
        path.with_name("all_config.yaml").write_text(yaml.safe_dump(config))
        yield find_checkpoint(path)


def _load(folder: Path, step: int) -> tuple[HaltingModel, LossConfig]:
    """The model with the golden weights of a step, through the same reader as any published checkpoint."""
    expected = _expected(folder)
    metadata = {name: expected[name] for name in ("vocab_size", "seq_len", "num_puzzle_identifiers")}
    with _published_checkpoint(folder, step) as checkpoint:
        return load_trained_model(checkpoint, SimpleNamespace(**metadata)), checkpoint.arch.loss


def _batch(folder: Path, number: int) -> Batch:
    with np.load(folder / "batches.npz") as arrays:
        names = ("inputs", "labels", "puzzle_identifiers")
        tensors = [torch.from_numpy(arrays[f"{name}_{number}"]) for name in names]
    return Batch(*tensors, rows=torch.arange(len(tensors[0])))


def test_every_recurrent_model_is_replayed(replays):
    assert {PUBLISHED[_expected(folder)["model"]].name for folder in replays} == {
        "hrm",
        "trm",
        "serrm",
        "urm",
    }


def test_training_is_replayed(replays):
    for folder in replays:
        _replay(folder)


def _replay(folder: Path) -> None:
    expected = _expected(folder)
    model, options = _load(folder, 0)
    model.train()
    chosen = SimpleNamespace(**{**expected["optimizer"], "optimizer": "adam_atan2"})
    network = model.network
    flat = FlatParameters(network.named_parameters())
    sync = build_gradient_sync(model, flat)
    (dense,), sparse = build_optimizers(chosen, Division(flat), network.puzzle_emb, matrices=frozenset())
    carry = model.initial_carry(_batch(folder, 0))
    for number, golden in enumerate(expected["train"]):
        where = f"{folder.name}, step {golden['step']}"
        output = _as_published(model, model(carry, _batch(folder, number)))
        carry = output.carry
        loss, sums = loss_and_metrics(output, options)
        sync.zero()
        (loss / expected["batch_size"]).backward()
        sync.finish()

        assert loss.item() == pytest.approx(golden["loss"], rel=1e-4), where
        for name, tolerance in _RELATIVE.items():
            if name in golden:
                assert sums[name].item() == pytest.approx(golden[name], rel=tolerance, abs=1e-5), (
                    where,
                    name,
                )
        for name in _SUMS:
            assert float(sums[name]) == pytest.approx(golden[name], rel=1e-6), (where, name)
        gradients = [parameter.grad.norm() for parameter in model.parameters()]
        assert torch.stack(gradients).norm().item() == pytest.approx(golden["grad_norm"], rel=5e-4), where
        assert int(carry.halted.sum()) == golden["halted"], where
        assert carry.steps.tolist() == golden["slot_steps"], where
        if number == 0:
            _compare_outputs(output.prediction, folder / "outputs_step_1.npz", tolerance=5e-5)
        dense.step()
        if sparse is not None:
            sparse.all_gather_gradients()
            sparse.step()

    final = _load(folder, len(expected["train"]))[0].state_dict()
    for name, value in model.state_dict().items():
        tolerance = 1e-6 if name.endswith("puzzle_emb.weights") else 5e-5
        torch.testing.assert_close(value, final[name], rtol=0, atol=tolerance, msg=f"{folder.name}: {name}")


def _as_published(model: HaltingModel, output: StepOutput) -> StepOutput:
    """SE-RRM's public code takes a probability for a logit (REFERENCE_2, 14.3)."""
    if not model.network.halts_at_random:
        return output
    q_halt = torch.sigmoid(output.prediction.q_halt)
    return dataclasses.replace(output, prediction=output.prediction._replace(q_halt=q_halt))


def _compare_outputs(prediction, path: Path, *, tolerance: float) -> None:
    ours = {
        "logits": prediction.logits,
        "q_halt_logits": prediction.q_halt,
        "q_continue_logits": prediction.q_continue,
    }
    with np.load(path) as golden:
        assert ("q_continue_logits" in golden.files) == (prediction.q_continue is not None)
        for name in golden.files:
            np.testing.assert_allclose(
                ours[name].detach().numpy(), golden[name], rtol=0, atol=tolerance, err_msg=name
            )


def test_evaluation_of_the_given_final_weights(replays):
    for folder in replays:
        expected = _expected(folder)
        golden = expected["eval_on_batch_0_after_training"]
        model = _load(folder, len(expected["train"]))[0].eval()
        batch = _batch(folder, 0)
        carry = model.initial_carry(batch)
        with torch.inference_mode():
            for _ in range(golden["inference_steps"]):
                output = _as_published(model, model(carry, batch))
                carry = output.carry
        assert carry.halted.all(), "all slots halt after exactly inference_steps calls"
        _compare_outputs(output.prediction, folder / "eval_outputs.npz", tolerance=5e-3)
        sums = sum_metrics(output, loss_type=expected["loss"])
        for name in _SUMS:
            assert float(sums[name]) == pytest.approx(golden[name], rel=1e-6), name
        assert sums["lm_loss"].item() == pytest.approx(golden["lm_loss"], rel=1e-4)
        assert sums["q_halt_loss"].item() == pytest.approx(golden["q_halt_loss"], rel=1e-3)


def test_a_published_config_may_have_more_and_less(golden_folder):
    """URM's has keys of the run in its arch, and lacks a constant of its code."""
    changes = {"halt_exploration_prob": None, "profile": True, "loop_deltas": [0, 8], "ema_rate": 0.999}
    with _published_checkpoint(golden_folder / "urm_a", 0, **changes) as checkpoint:
        assert (checkpoint.arch.name, checkpoint.arch.L_layers) == ("urm", 2)
        assert (checkpoint.arch.halt_max_steps, checkpoint.arch.halt_exploration_prob) == (4, 0.1)
    with (
        pytest.raises(ValueError, match="loop_delta"),
        _published_checkpoint(golden_folder / "urm_a", 0, loop_delta=1),
    ):
        pass


@pytest.mark.slow
def test_published_checkpoint_is_evaluated_as_by_the_public_tools(golden_folder):
    folder = golden_folder / "hrm_checkpoint"
    expected = _expected(folder)
    checkpoint = find_checkpoint(folder)
    assert checkpoint.step == expected["step"]
    assert checkpoint.data_paths == [load_yaml(folder / "all_config.yaml")["data_path"]]
    data = open_datasets(checkpoint.find_data(), splits=("test",), read_everything=True)
    results = evaluate_split(
        load_trained_model(checkpoint, data.metadata),
        data,
        loss_type=checkpoint.arch.loss.loss_type,
        global_batch_size=128,
        device=torch.device("cpu"),
        outputs=("preds", "q_halt_logits"),
    )
    result = results[expected["set"]]
    assert result.metrics["count"] == expected["count"]
    for name, value in expected["metrics"].items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-3 if name == "q_halt_loss" else 1e-4), name
    assert result.exact_accuracy_after_each_step == pytest.approx(
        expected["exact_accuracy_after_each_step"], abs=1e-6
    )
    with np.load(folder / "predictions.npz") as golden:
        assert result.outputs["preds"].dtype == np.uint8
        assert (result.outputs["preds"] != golden["preds"]).sum() <= 2, "but for a tie of two logits"
        np.testing.assert_allclose(result.outputs["q_halt_logits"], golden["q_halt_logits"], atol=5e-3)


@pytest.mark.slow
def test_published_checkpoint_over_a_grid(golden_folder):
    """One run without noise is the public tools' evaluation at every depth; noise finds what it misses."""
    folder = golden_folder / "hrm_checkpoint"
    expected, checkpoint = _expected(folder), find_checkpoint(folder)
    data = open_datasets(checkpoint.find_data(), splits=("test",), read_everything=False)
    options = {"loss_type": checkpoint.arch.loss.loss_type, "global_batch_size": 500}
    options |= {"device": torch.device("cpu")}
    model = load_trained_model(checkpoint, data.metadata)
    result = evaluate_split(model, data, grid=Grid((1, 2, 4)), **options)[expected["set"]]
    for depth, accuracy in zip(
        (1, 2, 4), np.array(expected["exact_accuracy_after_each_step"])[[0, 1, 3]], strict=True
    ):
        assert result.scores[depth, 1]["q_head"].exact / expected["count"] == pytest.approx(
            accuracy, abs=1e-6
        )
    model.network.step_noise = 0.3
    noisy = evaluate_split(model, data, grid=Grid((4,), (1, 2)), **options)[expected["set"]]
    assert noisy.scores[4, 2]["q_head"].exact > noisy.scores[4, 1]["q_head"].exact
    assert noisy.scores[4, 2]["any"].exact > noisy.scores[4, 2]["q_head"].exact
