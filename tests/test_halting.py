"""Which slots halt, and where exploration comes from.

What a halted slot starts with: test_published.py. The exact targets of q_continue: test_golden.py.
"""

import numpy as np
import pytest
import torch

from models.carry import Carry, Prediction, Reasoning, StepOutput
from models.halting import HaltingModel
from models.network import Network
from models.objective import ContinueTarget
from tests.float64 import assert_close
from tests.tiny import draws_of, random_batch, run_step, tiny_arch, tiny_model

_SLOTS = 8


class _FixedQ(Network):
    """A network whose halting values are given, so that the rule around it can be seen alone."""

    def initial_state(self, batch_size: int, *, seq_len: int) -> dict[str, torch.Tensor]:
        return {"z_H": torch.zeros(batch_size, seq_len, 1)}

    def forward(self, state, inputs, puzzle_identifiers, **_):
        return {"z_H": state["z_H"] + 1}, Prediction(torch.zeros(*inputs.shape, 7), *self.q)


def _with_q(q_halt: float | list, q_continue: float | list, *, steps=4, eval_steps=4, **keys) -> HaltingModel:
    number = {"halt_max_steps": steps, "eval_halt_max_steps": eval_steps}
    network = _FixedQ(tiny_arch(**{"no_ACT_continue": False, "q_target": "exact", **number, **keys}))
    network.q = [torch.tensor(value).expand(_SLOTS) for value in (q_halt, q_continue)]
    return HaltingModel(network)


def _run(model: HaltingModel, steps: int, min_steps: list[int] | None = None) -> list[Carry]:
    batch = random_batch(_SLOTS)
    carries, carry = [], model.initial_carry(batch)
    arrays = None if min_steps is None else {"min_steps": torch.tensor(min_steps, dtype=torch.int32)}
    for _ in range(steps):
        carry = run_step(model, carry, batch, arrays=arrays).carry
        carries.append(carry)
    return carries


def _targets(model: HaltingModel, carry: Carry, batch, rng=None) -> tuple[StepOutput, list[ContinueTarget]]:
    before = model.refill(carry, batch, model.reasoning, rng)
    output = model(before, model.reasoning, rng)
    given = (model.network, before, output, model.reasoning, rng)
    return output, model.network.objective.continue_targets(*given)


def test_without_continue_a_slot_halts_where_its_answer_is_rather_right():
    q_halt = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, 0.0]
    model, batch = _with_q(q_halt, 5.0, no_ACT_continue=True).train(), random_batch(_SLOTS)
    output, targets = _targets(model, model.initial_carry(batch), batch)
    assert output.carry.halted.tolist() == [value > 0 for value in q_halt]
    assert targets == []
    postponed = _run(model, 1, min_steps=[2] * _SLOTS)
    assert not postponed[0].halted.any()


def test_evaluation_runs_all_steps_and_may_have_a_number_of_its_own():
    for steps in (2, 4, 6):
        model = _with_q(1.0, 0.0, eval_steps=steps).eval()
        carries = _run(model, steps + 1, min_steps=[0] * _SLOTS)
        assert [carry.halted.all().item() for carry in carries] == [False] * (steps - 1) + [True, False]
        assert [carry.steps[0].item() for carry in carries] == [*range(1, steps + 1), 1]


def test_exploration_postpones_halting_but_not_beyond_the_last_step():
    carries = _run(_with_q(1.0, 0.0).train(), 1, min_steps=[0, 1, 2, 3, 4, 0, 0, 0])
    assert carries[0].halted.tolist() == [True, True, False, False, False, True, True, True]
    carries = _run(_with_q(1.0, 0.0).train(), 4, min_steps=[4] * _SLOTS)
    assert [carry.halted.all().item() for carry in carries] == [False, False, False, True]


def test_one_step_halts_always_and_has_no_target():
    model, batch = _with_q(-1.0, 0.0, steps=1).train(), random_batch(_SLOTS)
    output, targets = _targets(model, model.initial_carry(batch), batch)
    assert output.carry.halted.all()
    assert targets == []


@pytest.mark.usefixtures("float64")
def test_deferred_targets_are_the_exact_ones_where_weights_stand_still():
    exact, deferred = (tiny_model(q_target=q_target).train() for q_target in ("exact", "deferred"))
    carry = exact.initial_carry(random_batch(_SLOTS))
    expected, num_went_on, num_stopped = None, 0, 0
    for step in range(12):
        batch = random_batch(_SLOTS, seed=step)
        rng = draws_of(_SLOTS, min_steps=torch.tensor([0, 0, 0, 2, 2, 3, 4, 4], dtype=torch.int32))
        (wanted, (now_expected,)), (found, targets) = (
            _targets(model, carry, batch, rng) for model in (exact, deferred)
        )
        assert torch.equal(wanted.carry.halted, found.carry.halted)
        earlier, *stopping = targets
        assert torch.equal(earlier[2], ~carry.halted)
        if expected is not None:
            went_on = earlier[2]
            assert_close(earlier[1][went_on], expected[1][went_on])
            assert_close(earlier[0][went_on], expected[0][went_on])
            num_went_on += int(went_on.sum())
        expected = now_expected
        for now in stopping:
            assert torch.equal(now[2], found.carry.halted)
            assert_close(now[1][now[2]], expected[1][now[2]])
            assert_close(now[0], expected[0])
            num_stopped += int(now[2].sum())
        carry = found.carry
    assert num_went_on > 20
    assert num_stopped > 20


def test_deferred_targets_save_most_calls():
    calls = {}
    for q_target in ("exact", "deferred"):
        model, rows = tiny_model(q_target=q_target).train(), []
        model.network.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(len(inputs[1])))
        carry = model.initial_carry(random_batch(_SLOTS))
        rng = draws_of(_SLOTS, min_steps=torch.full((_SLOTS,), 4, dtype=torch.int32))
        for step in range(8):
            carry = _targets(model, carry, random_batch(_SLOTS, seed=step), rng)[0].carry
        calls[q_target] = sum(rows)
    assert calls["exact"] == 2 * 8 * _SLOTS
    assert calls["deferred"] == 8 * _SLOTS + 2 * _SLOTS, "after 4 and after 8 steps all slots stop"


def _draw(step: int, *, seed: int = 3, max_steps: int = 5, probability: float = 0.25) -> np.ndarray:
    network = _FixedQ(tiny_arch(halt_exploration_prob=probability))
    options = {"batch_size": 100_000, "reasoning": Reasoning(max_steps, halting="act")}
    return network.sample_randomness(seed=seed, step=step, **options).get("min_steps")


def test_exploration_is_a_pure_function_of_seed_and_step():
    assert np.array_equal(_draw(7), _draw(7))
    assert not np.array_equal(_draw(7), _draw(8))
    assert not np.array_equal(_draw(7), _draw(7, seed=4))


def test_exploration_is_uniform_over_both_ends():
    drawn = _draw(1)
    assert set(drawn.tolist()) == {0, 2, 3, 4, 5}
    assert (drawn > 0).mean() == pytest.approx(0.25, abs=0.01)
    for steps in (2, 3, 4, 5):
        assert (drawn == steps).mean() == pytest.approx(0.25 / 4, abs=0.005)
    assert _draw(1, probability=0.0) is None
    assert _draw(1, max_steps=1) is None
    assert set(_draw(1, probability=1.0, max_steps=2).tolist()) == {2}
