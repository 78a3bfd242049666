"""One process with the global batch and several with their slices are the same run.

AdamATan2 and sign-SGD do not see the scale of a gradient, so it is gradients that are compared, not only
losses. In float64: the order of a sum differs with the split, and rounding may not decide a sign or a halt.
"""

import os
from collections.abc import Callable

import pytest
import torch

from config.files import load_defaults
from distributed.world import rank
from optimizers.learning_rate import learning_rates
from tests.checkpoints import begin_training, do_step, replicated_tensors
from tests.float64 import TOLERANCE, assert_close, in_float64, relative_difference
from tests.ranks import run_ranks
from tests.tiny import random_batch, run_losses, tiny_arch, tiny_config, tiny_model
from training.metrics import training_metrics

_STEPS, _GLOBAL_BATCH = 6, 24
_NOISE = {"init_noise": 1.0, "state_noise": 0.1, "damping": 0.95}

# What must not change a run: the name says what, the values are config keys (arch.* among them).
_SAME_RUNS = {
    "plain": {},
    "small buckets": {"bucket_size_mb": 0.01},
    "ddp": {"sync": "ddp"},
    "accumulation with ddp": {"gradient_accumulation_steps": 2, "sync": "ddp"},
    "accumulation and checkpointing": {"gradient_accumulation_steps": 3, "activation_checkpointing": "block"},
}


def _train(steps: int, options: dict) -> dict:
    """Trains on this rank's slices; returns what must be equal on any number of ranks."""
    options = dict(options)
    config = tiny_config(arch=tiny_arch(**options.pop("arch", {})).model_dump(), **options)
    state = begin_training(config)
    with torch.no_grad():
        if config.arch.name != "serrm":
            state.model.network.q_head.weight.normal_(std=0.5)  # else no slot halts early in so few steps
            state.model.network.q_head.bias.zero_()
    state.broadcast_model_()
    gradients, norms, losses = [], [], []
    for step in range(steps):
        result = do_step(state, config, random_batch(_GLOBAL_BATCH, seed=step))
        with pytest.raises(AssertionError, match="loss: too late, the scalars may already be sent"):
            state.weights.scalars.add(loss=1.0)
        gradients.append({name: p.grad.clone() for name, p in state.model.network.named_parameters()})
        norms.append(float(result.grad_norm))
        losses.append(float(result.loss))
    sums = state.metrics.reduce()
    metrics = training_metrics(state.model.network, sums, steps=steps, global_batch_size=_GLOBAL_BATCH)
    if rank() == 0:
        tolerance = 1e-2 if config.sync_dtype == "bfloat16" else 1e-5
        assert metrics["loss"] == pytest.approx(sum(losses) / steps, rel=tolerance)
    return {
        "gradients": gradients,
        "norms": norms,
        "loss": float(result.loss),
        "weights": {name: value.clone() for name, value in state.model.network.state_dict().items()},
        "metrics": metrics if rank() == 0 else {},
        "steps": state.carry.steps,
        "halted": state.carry.halted,
        "rows": state.carry.data.rows,
    }


def _train_each(steps: int, runs: dict[str, dict]) -> dict[str, dict]:
    return {name: _train(steps, options) for name, options in runs.items()}


def _run_ranks(function: Callable, world_size: int, *arguments) -> list:
    return run_ranks(in_float64, world_size, function, *arguments)


def _assert_same_run(together: list[dict], alone: dict, what: str) -> None:
    """Every rank's result against that of one process with the whole batch."""
    for name in ("steps", "halted", "rows"):
        assert torch.equal(torch.cat([each[name] for each in together]), alone[name]), f"{what}: {name}"
    for number, each in enumerate(together):
        where = f"{what}, rank {number}"
        for ours, theirs in zip(each["gradients"], alone["gradients"], strict=True):
            assert relative_difference(ours, theirs) < TOLERANCE, where
        assert each["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE), where
        assert each["norms"] == pytest.approx(alone["norms"], rel=TOLERANCE), where
        for name, value in each["weights"].items():
            assert torch.equal(value, together[0]["weights"][name]), f"{where} has another {name}"
            assert value.dtype == torch.float64, name
            assert_close(value, alone["weights"][name], what=f"{where}: {name}")
    assert together[0]["metrics"] == pytest.approx(alone["metrics"], rel=TOLERANCE), what


@pytest.fixture(scope="module")
def alone() -> dict:
    """The run of one process."""
    (alone,) = _run_ranks(_train, 1, _STEPS, {})
    assert alone["halted"].any()
    assert not alone["halted"].all()
    assert alone["steps"].unique().numel() > 1, "the slots are at different steps, or this proves little"
    return alone


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4))])
def test_several_ranks_are_the_same_run(num_ranks, alone):
    """And so is every way to save memory or to exchange gradients."""
    names = _SAME_RUNS if num_ranks == 2 else ("accumulation and checkpointing",)
    ranks = _run_ranks(_train_each, num_ranks, _STEPS, {name: _SAME_RUNS[name] for name in names})
    for name in names:
        _assert_same_run([each[name] for each in ranks], alone, name)


def _assert_same_runs(num_ranks: int, steps: int, archs: dict[str, dict], **options) -> list[dict]:
    """Compares the run of each model on so many ranks, with these options, with one process; returns this."""
    (alone,) = _run_ranks(_train_each, 1, steps, {name: {"arch": arch} for name, arch in archs.items()})
    runs = {name: {"arch": arch, **options} for name, arch in archs.items()}
    ranks = _run_ranks(_train_each, num_ranks, steps, runs)
    for name in archs:
        _assert_same_run([each[name] for each in ranks], alone[name], name)
    return list(alone.values())


@pytest.mark.long
@pytest.mark.slow
def test_other_models_are_the_same_run():
    """With random stops, dropout and noise, however the batch is cut into parts."""
    archs = {
        "urm": {"name": "urm"},
        "gate": {"name": "infiloop", "init_noise": 1.0, "state_noise": 0.1},
        **{f"hrm {target}": {"q_target": target, **_NOISE} for target in ("exact", "deferred")},
        "fprm": {"name": "fprm", "init_noise": 6.0},
        "flow": {"name": "flow"},
        "serrm": {"name": "serrm", "dropout": 0.3, "H_cycles": 1},
        "serrm without a table": {"name": "serrm", "dropout": 0.3, "puzzle_emb_ndim": 0},
        "hrm without a table": {"puzzle_emb_ndim": 0},
    }
    for alone in _assert_same_runs(2, 4, archs, **_SAME_RUNS["accumulation and checkpointing"]):
        assert alone["halted"].any()
        assert alone["steps"].unique().numel() > 1


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_an_elastic_run_have_fewer_slots_or_none():
    """5 x 4 + 4 of 24 slots, or 6 x 4 and none."""
    _assert_same_runs(5, 3, {"hrm": {}}, gradient_accumulation_steps=2)
    _assert_same_runs(7, 3, {name: {"name": name} for name in ("hrm", "serrm", "fprm")})


def _train_on_nodes() -> dict:
    os.environ["GROUP_WORLD_SIZE"] = "2"
    return _train(_STEPS, {"data_parallel_shard_degree": -1})


@pytest.mark.slow
def test_nodes_of_several_ranks_are_the_same_run(alone):
    _assert_same_run(_run_ranks(_train_on_nodes, 4), alone, "4 ranks on 2 nodes")


@pytest.mark.slow
def test_gradients_on_the_wire_in_bfloat16():
    """Each rank's share and their sum are rounded by at most 2**-9 of themselves, float32 by 2**-24."""
    (alone,) = run_ranks(_train, 1, 1, {})
    for each in run_ranks(_train, 2, 1, {"sync_dtype": "bfloat16"}):
        assert 1e-5 < relative_difference(each["gradients"][0], alone["gradients"][0]) < 1e-2


@pytest.mark.slow
def test_clipping(alone):
    """The norm that is told is that before; what the optimizer sees has at most the norm asked for."""
    limit = 0.5 * min(alone["norms"])
    for each in _run_ranks(_train, 2, 1, {"grad_clip_norm": limit}):
        assert each["norms"][0] == pytest.approx(alone["norms"][0], rel=TOLERANCE)
        clipped = torch.cat([value.flatten() for value in each["gradients"][0].values()])
        whole = torch.cat([value.flatten() for value in alone["gradients"][0].values()])
        assert_close(clipped, whole * limit / alone["norms"][0])
    (loose,) = _run_ranks(_train, 1, _STEPS, {"grad_clip_norm": 2 * max(alone["norms"])})
    assert all(torch.equal(loose["weights"][name], value) for name, value in alone["weights"].items())


def test_learning_rates_scale_with_the_batch():
    def rates(**changes) -> dict[str, float]:
        config = tiny_config(lr=1e-3, puzzle_emb_lr=1e-2, lr_warmup_steps=0, **changes)
        return learning_rates(config, 1, total_steps=10**9)

    batch = {"global_batch_size": 96, "lr_reference_batch_size": 24}
    assert rates(**batch) == {"lr": 1e-3, "puzzle_emb_lr": 1e-2}
    assert rates(**batch, lr_scaling="sqrt") == pytest.approx({"lr": 2e-3, "puzzle_emb_lr": 2e-2})
    assert rates(**batch, lr_scaling="linear") == pytest.approx({"lr": 4e-3, "puzzle_emb_lr": 4e-2})


@pytest.mark.usefixtures("float64")
def test_gradients_are_those_of_the_mean_over_the_global_batch():
    """The naive oracle: the same loss on the whole batch, differentiated by torch alone."""
    chosen = load_defaults("arch/hrm")["loss"] | {"label_smoothing": 0.1, "halting_weight": 0.3}
    chosen |= {"supervision_decay": 0.7}
    config = tiny_config(arch=tiny_arch(halt_exploration_prob=0.0, loss=chosen).model_dump())
    batch = random_batch(_GLOBAL_BATCH)
    results = _run_ranks(_first_gradients, 2, config)
    model = tiny_model(halt_exploration_prob=0.0, loss=chosen).train()
    loss, _ = run_losses(model, model.initial_carry(batch), batch)[1]()
    expected = torch.autograd.grad(loss / _GLOBAL_BATCH, list(model.parameters()))
    names = [name for name, _ in model.network.named_parameters()]
    for gradients in results:
        assert relative_difference(gradients, dict(zip(names, expected, strict=True))) < TOLERANCE


def _first_gradients(config) -> dict:
    state = begin_training(config)
    state.model.network.load_state_dict(tiny_model().network.state_dict())
    do_step(state, config, random_batch(_GLOBAL_BATCH))
    return {name: p.grad.clone() for name, p in state.model.network.named_parameters()}


def test_broadcast_makes_different_models_equal():
    models = run_ranks(_broadcast_of_different_models, 2)
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def _broadcast_of_different_models() -> dict:
    config = tiny_config(seed=rank(), ema=0.9, arch=tiny_arch(forward_dtype="bfloat16").model_dump())
    return replicated_tensors(begin_training(config))
