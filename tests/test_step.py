"""One process with the global batch and several with their slices are the same run.

AdamATan2 and sign-SGD do not see the scale of a gradient, so it is gradients that are compared, not only
losses.
"""

import pytest
import torch

from dataset.format import Batch, Metadata
from evaluation.metrics import training_metrics
from parallel.process_group import rank
from tests.ranks import run_ranks
from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config
from training.state import broadcast_model_, build_train_state
from training.step import train_step

_GLOBAL_BATCH = 24


def _train(steps: int, changes: dict, weights: dict | None = None) -> dict:
    """Trains on this rank's slices; returns what must be equal on any number of ranks."""
    config = tiny_config(arch=tiny_arch(**changes).model_dump())
    metadata = Metadata(**vars(FACTS), **_METADATA)
    state = build_train_state(config, metadata, device=torch.device("cpu"))
    with torch.no_grad():
        state.model.network.q_head.weight.normal_(std=0.5)  # else no slot halts early in so few steps
        state.model.network.q_head.bias.zero_()
    broadcast_model_(state.model)
    state.model.train()
    gradients = []
    for step in range(steps):
        batch = random_batch(_GLOBAL_BATCH, seed=step)
        sums = train_step(state, Batch(*(part[state.slots] for part in batch)), config=config, total_steps=20)
        state.metrics.add(sums)
        gradients.append({name: p.grad.clone() for name, p in state.model.network.named_parameters()})
    metrics = training_metrics(state.metrics.reduced(), slots=_GLOBAL_BATCH * steps)
    return {
        "gradients": gradients,
        "weights": state.model.network.state_dict(),
        "metrics": metrics if rank() == 0 else {},
        "steps": state.carry.steps,
        "halted": state.carry.halted,
        "rows": state.carry.data.rows,
    }


_METADATA = {
    "pad_id": 0,
    "ignore_label_id": None,
    "blank_identifier_id": 0,
    "total_groups": 1,
    "mean_puzzle_examples": 1.0,
    "sets": ("all",),
}


def _relative_difference(ours: dict, theirs: dict) -> float:
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in ours]).norm()
    return float(difference / torch.cat([value.flatten() for value in theirs.values()]).norm())


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"puzzle_emb_ndim": 0}], ids=["puzzle_emb", "no_puzzle_emb"])
def test_several_ranks_are_the_same_run(num_ranks, changes):
    (alone,) = run_ranks(_train, 1, 6, changes)
    together = run_ranks(_train, num_ranks, 6, changes)

    assert alone["halted"].any()
    assert not alone["halted"].all()
    assert alone["steps"].unique().numel() > 1, "the slots are at different steps, or this proves little"
    for name in ("steps", "halted", "rows"):
        assert torch.equal(torch.cat([each[name] for each in together]), alone[name]), name
    for number, each in enumerate(together):
        assert _relative_difference(each["gradients"][0], alone["gradients"][0]) < 1e-6, f"rank {number}"
        assert _relative_difference(each["gradients"][-1], alone["gradients"][-1]) < 1e-4, f"rank {number}"
        for name, value in each["weights"].items():
            assert torch.equal(value, together[0]["weights"][name]), f"rank {number} has another {name}"
            torch.testing.assert_close(value, alone["weights"][name], rtol=0, atol=1e-5, msg=name)
    assert together[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)


def test_gradients_are_those_of_the_mean_over_the_global_batch():
    """The naive oracle: the same loss on the whole batch, differentiated by torch alone."""
    from models.losses import loss_and_metrics
    from tests.tiny import tiny_model

    config = tiny_config(arch=tiny_arch(halt_exploration_prob=0.0).model_dump())
    batch = random_batch(_GLOBAL_BATCH)
    results = run_ranks(_first_gradients, 2, config)
    model = tiny_model(halt_exploration_prob=0.0).train()
    loss, _ = loss_and_metrics(model(model.initial_carry(batch), batch), loss_type=config.arch.loss.loss_type)
    expected = torch.autograd.grad(loss / _GLOBAL_BATCH, list(model.parameters()))
    names = [name for name, _ in model.network.named_parameters()]
    for gradients in results:
        assert _relative_difference(gradients, dict(zip(names, expected, strict=True))) < 1e-6


def _first_gradients(config) -> dict:
    from tests.tiny import tiny_model

    metadata = Metadata(**vars(FACTS), **_METADATA)
    state = build_train_state(config, metadata, device=torch.device("cpu"))
    state.model.network.load_state_dict(tiny_model().network.state_dict())
    state.model.train()
    batch = random_batch(_GLOBAL_BATCH)
    train_step(state, Batch(*(part[state.slots] for part in batch)), config=config, total_steps=20)
    return {name: p.grad for name, p in state.model.network.named_parameters()}


def test_broadcast_makes_different_models_equal():
    models = run_ranks(_broadcast_of_different_models, 2)
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def _broadcast_of_different_models() -> dict:
    from tests.tiny import tiny_model

    model = tiny_model(seed=rank(), forward_dtype="bfloat16")
    broadcast_model_(model)
    return model.network.state_dict()
