"""How a stage changes the model: the calls of its levels are counted."""

import pytest
import torch

from dataset.curriculum import Stage
from tests.tiny import random_batch, tiny_arch, tiny_model
from training.curriculum import set_cycles


@pytest.mark.parametrize(
    ("cycles", "expected"),
    [
        ({}, (3, 6)),
        ({"H_cycles": 1}, (1, 2)),
        ({"L_cycles": 1}, (3, 3)),
        ({"H_cycles": 2, "L_cycles": 5}, (2, 10)),
    ],
)
def test_a_stage_runs_its_own_cycles(cycles, expected):
    options = {"H_cycles": 3, "L_cycles": 2}
    model, arch, batch = tiny_model(**options).eval(), tiny_arch(**options), random_batch(2)
    calls = {"H_level": 0, "L_level": 0}
    for name in calls:
        level = getattr(model.network, name)
        level.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    set_cycles(model, Stage((0,), epochs=1, eval_interval=1, H_cycles=1, L_cycles=1), arch)
    set_cycles(model, Stage((0,), epochs=1, eval_interval=1, **cycles), arch)
    with torch.no_grad():
        model(model.initial_carry(batch), batch)
    assert (calls["H_level"], calls["L_level"]) == expected


def test_a_transformer_has_no_cycles_to_change():
    model = tiny_model("transformer")
    set_cycles(model, Stage((0,), epochs=1, eval_interval=1), tiny_arch("transformer"))
    assert not hasattr(model.network, "H_cycles")
