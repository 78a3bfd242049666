"""The transcription of the public code makes our training step.

Both sides compute in float64. In float32 the gradients differ by 1e-5 where a recurrence amplifies rounding,
on one machine more than on another.
"""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.published import PublishedTrainer
from benchmarks.worlds import Trainer, random_batch
from dataset.loader import Batch
from dataset.metadata import IGNORE_LABEL_ID, usual_metadata
from tests.float64 import TOLERANCE, assert_close
from tests.tiny import draw_small_parts_

_BATCH, _STEPS, _CPU = 8, 3, torch.device("cpu")
# TRM is shorter than published: each cycle amplifies rounding a little more (see `tests.float64`).
_LAYERS = {"hrm": ("arch.H_layers=1", "arch.L_layers=2"), "trm": ("arch.L_layers=2", "arch.L_cycles=2")}
_WORDS = (
    *("arch.hidden_size=32", "arch.num_heads=2", "arch.puzzle_emb_ndim=32", "arch.halt_max_steps=3"),
    *("arch.forward_dtype=float32", "arch.halt_exploration_prob=0", "lr=1e-3", "lr_warmup_steps=2"),
    "weight_decay=1.0",
)


def _pair(name: str, *changes: str, **options: bool) -> tuple[Trainer, PublishedTrainer]:
    """Returns ours and the published trainer, with equal weights; Q head and puzzle table matter."""
    ours = Trainer(
        _CPU, f"arch={name}", *_WORDS, *_LAYERS[name], *changes, puzzles=_BATCH, rows=20, seq_len=16
    )
    network = ours.state.model.network
    draw_small_parts_(network)
    ours.state.carry.halted.fill_(True)
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    return ours, PublishedTrainer(ours.config, ours.metadata, weights, device=_CPU, **options)


def _batch(seed: int) -> Batch:
    batch = random_batch(
        _BATCH, usual_metadata(seq_len=16, vocab_size=11, num_puzzle_identifiers=20), seed=seed
    )
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("hrm", (), {}),
        ("hrm", (), {"flash_attention": True}),
        ("trm", (), {}),
        ("trm", ("arch.no_ACT_continue=false", "arch.puzzle_emb_len=0"), {}),
    ],
)
@pytest.mark.usefixtures("float64")
def test_the_published_step_is_ours(name, changes, options, monkeypatch):
    trainer, published = _pair(name, *changes, **options)
    state, config = trainer.state, trainer.config
    attention, has_torchs_attention = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv: has_torchs_attention.append(True) or attention(*qkv)
    )
    theirs_gradients = _keep_gradients(published)
    has_halted_early = False
    for number in range(_STEPS):
        batch = _batch(number)
        del has_torchs_attention[:]
        unread = ("rows", "answers")
        theirs = published.step({key: value for key, value in batch._asdict().items() if key not in unread})
        assert bool(has_torchs_attention) == (name == "trm" or options.get("flash_attention", False))
        trainer.batches = [batch]
        state.metrics.reset()
        trainer.step()
        ours = state.metrics.own()
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

    final = published.network.state_dict()
    for key, value in state.model.network.state_dict().items():
        assert value.dtype == torch.float64, key
        assert_close(value, final[key], what=key)
