"""The operations that a network says it takes, beside those that torch counts while it computes them."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from config.architecture import architectures
from tests.tiny import FACTS, draws_of, random_batch, run_losses, tiny_model

_CONV = {"pos_encodings": "none", "puzzle_emb_ndim": 0, "puzzle_emb_len": 0, "conv": "instead"}
_CASES = [
    *((name, {}) for name in architectures()),
    *(("hrm", {"q_target": "exact"}), ("hrm", {"gradient_cycles": 1}), ("hrm", {"no_ACT_continue": True})),
    *(("trm", {"gradient_cycles": 0}), ("trm", {"gradient_cycles": 2, "L_cycles": 3, "H_cycles": 3})),
    *(("trm", {"single_z": True}), ("trm", {"mlp_t": True, "pos_encodings": "none"})),
    *(("trm", {"conv": "beside"}), ("trm", _CONV), ("trm", {"is_frozen": True})),
    *(("urm", {"gradient_cycles": 0, "L_cycles": 3}), ("serrm", {"equivariant_symbols": False})),
    *(("ldt", {"advance": "training_pass"}), ("ldt", {"pos_encodings": "rope"})),
]


@pytest.mark.parametrize(("name", "changes"), _CASES)
def test_a_step_takes_what_torch_counts(name, changes):
    """Training, with one of the slots in its last step, which a deferred target needs, and evaluation."""
    trained = {key: value for key, value in changes.items() if key != "is_frozen"}
    model, batch, size = tiny_model(name, **trained), random_batch(4), 4
    network = model.requires_grad_("is_frozen" not in changes).network
    assert model.reasoning.max_steps in (1, size)
    carry = model.initial_carry(batch)._replace(steps=torch.arange(size), halted=torch.zeros(size).bool())
    draws = draws_of(size)
    with FlopCounterMode(display=False) as counted:
        output, losses = run_losses(model, carry, batch, draws=draws, halts_early=False)
        losses()[0].backward()
        if network.advances:
            model.advance(output.carry, model.reasoning, draws)
    trains = counted.get_total_flops()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        run_losses(model.eval(), carry, batch, draws=draws)
    answers = counted.get_total_flops()
    if name == "urm":  # torch does not see the convolution, which is written out
        weights = sum(layer.mlp.dwconv.weight.numel() for layer in network.L_level.layers)
        unseen = size * 2 * weights * math.prod(network.state_shape(FACTS.seq_len)[:-1])
        ((_, calls, with_gradient),) = network.calls(model.reasoning)
        trains, answers = trains + unseen * (calls + 2 * with_gradient), answers + unseen * calls
    sizes = {"seq_len": FACTS.seq_len}
    assert size * network.step_flops(model.reasoning, trains=True, **sizes) == trains
    assert size * network.step_flops(model.eval_reasoning, **sizes) == answers
