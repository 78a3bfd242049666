"""The transcription of the public code makes our training step; and what the products of a step cost.

Both sides compute in float64. In float32 the gradients differ by 1e-5 where a recurrence amplifies rounding,
on one machine more than on another.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train_step.flops import inner_width, step_flops
from benchmarks.train_step.published import PublishedTrainer
from benchmarks.trainee import TOTAL_STEPS, Trainee, build_config, random_batch
from dataset.format import IGNORE_LABEL_ID
from dataset.loader import Batch
from models.layers import SwiGLU
from tests.float64 import TOLERANCE, assert_close

_METADATA = SimpleNamespace(vocab_size=7, seq_len=16, num_puzzle_identifiers=20, num_columns=None)
_BATCH, _STEPS = 8, 3
_CPU = torch.device("cpu")


def _config(name: str, **changes) -> SimpleNamespace:
    """TRM is shorter than published: each cycle amplifies rounding a little more (see `tests.float64`)."""
    layers = {"hrm": {"H_layers": 1, "L_layers": 2}, "trm": {"L_layers": 2, "L_cycles": 2}}[name]
    sizes = {"hidden_size": 32, "num_heads": 2, "forward_dtype": "float32", "halt_exploration_prob": 0.0}
    return build_config(
        name,
        global_batch_size=_BATCH,
        sizes=sizes | layers | {"halt_max_steps": 3} | changes,
        lr=1e-3,
        lr_warmup_steps=2,
        weight_decay=1.0,
    )


def _pair(config: SimpleNamespace, **options: bool):
    """Returns ours and the published trainer, with equal weights; Q head and puzzle table matter."""
    ours = Trainee(config, _CPU, metadata=_METADATA)
    network = ours.state.model.network
    with torch.no_grad():
        network.q_head.weight.normal_()
        network.q_head.bias.normal_()
        network.puzzle_emb.weights.normal_()
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    return ours, PublishedTrainer(config, _METADATA, weights, device=_CPU, **options)


def _batch(seed: int) -> Batch:
    batch = random_batch(_BATCH, seed=seed, device=_CPU, metadata=_METADATA)
    batch.labels[:, ::3] = IGNORE_LABEL_ID
    batch.puzzle_identifiers[1] = batch.puzzle_identifiers[0]  # their gradients are summed
    return batch


def _keep_gradients(published: PublishedTrainer) -> dict[str, torch.Tensor]:
    """What the optimizers of the trainer are given, by name, from its next step on; it drops them itself."""
    kept = {}
    for name, parameter in published.network.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: kept.__setitem__(name, parameter.grad.clone())
        )
    return kept


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("hrm", {}, {}),
        ("hrm", {}, {"flash_attention": True}),
        ("trm", {}, {}),
        ("trm", {"no_ACT_continue": False, "puzzle_emb_len": 0}, {}),
    ],
)
@pytest.mark.usefixtures("float64")
def test_the_published_step_is_ours(name, changes, options, monkeypatch):
    config = _config(name, **changes)
    trainee, published = _pair(config, **options)
    state = trainee.state
    attention, has_torchs_attention = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv: has_torchs_attention.append(True) or attention(*qkv)
    )
    theirs_gradients = _keep_gradients(published)
    has_halted_early = False
    for number in range(_STEPS):
        batch = _batch(number)
        theirs = published.step(
            {key: value for key, value in batch._asdict().items() if key != "rows"}, total_steps=TOTAL_STEPS
        )
        ours = trainee.step(batch).sums
        for metric, value in theirs.items():
            assert float(ours[metric]) == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric
        assert ("q_continue_loss" in theirs) == (not config.arch.no_ACT_continue)
        for parameter_name, parameter in state.model.network.named_parameters():
            difference = (parameter.grad - theirs_gradients[parameter_name]).norm()
            assert difference <= TOLERANCE * parameter.grad.norm(), parameter_name
        assert published.carry.halted.tolist() == state.carry.halted.tolist()
        assert published.carry.steps.tolist() == state.carry.steps.tolist()
        has_halted_early |= bool(state.carry.halted.any()) and number + 1 < config.arch.halt_max_steps
    assert has_halted_early, "else slots are never given new data"
    assert bool(has_torchs_attention) == (name == "trm" or options.get("flash_attention", False))

    final = published.network.state_dict()
    for key, value in state.model.network.state_dict().items():
        assert value.dtype == torch.float64, key
        assert_close(value, final[key], what=key)


@pytest.mark.parametrize("name", ["hrm", "trm"])
def test_flops_are_those_of_the_products(name):
    """Counted by torch; the published step also computes logits with the target, which nobody reads."""
    config = _config(name)
    _, published = _pair(config)
    batch = {key: value for key, value in _batch(0)._asdict().items() if key != "rows"}
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        published.step(batch, total_steps=TOTAL_STEPS)
    sizes = {"vocab_size": _METADATA.vocab_size, "seq_len": _METADATA.seq_len}
    flops = step_flops(config.arch, batch_size=_BATCH, **sizes)
    unread = 0
    if name == "hrm":
        tokens = _BATCH * (_METADATA.seq_len + config.arch.puzzle_emb_positions)
        unread = 2 * tokens * config.arch.hidden_size * _METADATA.vocab_size
    assert counted.get_total_flops() - unread == flops


def test_inner_width_is_that_of_our_layers():
    for hidden in (32, 128, 512):
        arch = SimpleNamespace(hidden_size=hidden, expansion=4)
        assert SwiGLU(hidden, expansion=4).down_proj.weight.shape == (hidden, inner_width(arch))
