"""Which slots halt, what a halted slot starts with, and where exploration comes from."""

import numpy as np
import pytest
import torch

from models.halting import Carry, draw_min_steps
from models.network import Prediction
from tests.float64 import assert_close
from tests.tiny import random_batch, tiny_model

_SLOTS = 8


class _FixedQ(torch.nn.Module):
    """A network whose halting values are given, so that the rule around it can be seen alone."""

    halts_at_random = False

    def __init__(self, q_halt: torch.Tensor, q_continue: torch.Tensor):
        super().__init__()
        self.q = q_halt, q_continue

    def initial_state(self, batch_size: int, *, seq_len: int) -> dict[str, torch.Tensor]:
        return {"z_H": torch.zeros(batch_size, seq_len, 1)}

    def forward(self, state, inputs, puzzle_identifiers):
        return {"z_H": state["z_H"] + 1}, Prediction(torch.zeros(*inputs.shape, 7), *self.q)


def _with_q(q_halt: float | list, q_continue: float | list, **options):
    from models.halting import HaltingModel

    q = [torch.tensor(value).expand(_SLOTS) for value in (q_halt, q_continue)]
    return HaltingModel(
        _FixedQ(*q), **{"halt_max_steps": 4, "no_ACT_continue": False, "q_target": "exact", **options}
    )


def _run(model, steps: int, min_steps: list[int] | None = None) -> list[Carry]:
    batch = random_batch(_SLOTS)
    carries, carry = [], model.initial_carry(batch)
    for _ in range(steps):
        drawn = None if min_steps is None else torch.tensor(min_steps, dtype=torch.int32)
        carry = model(carry, batch, min_steps=drawn).carry
        carries.append(carry)
    return carries


@pytest.mark.usefixtures("float64")
def test_only_halted_slots_start_anew():
    model = tiny_model().train()
    old, new = random_batch(_SLOTS, seed=1), random_batch(_SLOTS, seed=2)
    carry = model(model.initial_carry(old), old).carry
    halted = torch.tensor([True, False] * (_SLOTS // 2))
    carry = carry._replace(halted=halted, steps=torch.full((_SLOTS,), 2, dtype=torch.int32))
    after = model(carry, new).carry

    for name in ("inputs", "labels", "puzzle_identifiers"):
        kept, fresh, held = (getattr(data, name) for data in (old, new, after.data))
        assert torch.equal(held[halted], fresh[halted])
        assert torch.equal(held[~halted], kept[~halted])
    assert after.steps.tolist() == [1, 3] * (_SLOTS // 2)

    # A halted slot forgets its state: the same as a slot that never had one. The others go on from theirs.
    fresh = model(model.initial_carry(new), new).carry
    assert_close(after.state["z_H"][halted], fresh.state["z_H"][halted])
    assert not torch.isclose(after.state["z_H"][~halted], fresh.state["z_H"][~halted]).all()


def test_first_step_takes_the_whole_batch():
    model = tiny_model().eval()
    batch = random_batch(_SLOTS)
    carry = model(model.initial_carry(random_batch(_SLOTS, seed=5)), batch).carry
    assert torch.equal(carry.data.inputs, batch.inputs)
    assert carry.steps.tolist() == [1] * _SLOTS


@pytest.mark.parametrize(("q_halt", "expected"), [(1.0, [True] * 4), (-1.0, [False, False, False, True])])
def test_training_halts_where_halting_is_worth_more(q_halt, expected):
    carries = _run(_with_q(q_halt, 0.0).train(), 4)
    assert [carry.halted.all().item() for carry in carries] == expected
    assert [carry.halted.any().item() for carry in carries] == expected


def test_without_continue_a_slot_halts_where_its_answer_is_rather_right():
    q_halt = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, 0.0]
    model = _with_q(q_halt, 5.0, no_ACT_continue=True).train()
    batch = random_batch(_SLOTS)
    output = model(model.initial_carry(batch), batch)
    assert output.carry.halted.tolist() == [value > 0 for value in q_halt]
    assert output.continue_targets == ()
    postponed = _run(model, 1, min_steps=[2] * _SLOTS)
    assert not postponed[0].halted.any()


def test_evaluation_always_runs_all_steps():
    carries = _run(_with_q(1.0, 0.0).eval(), 5, min_steps=[0] * _SLOTS)
    assert [carry.halted.all().item() for carry in carries] == [False, False, False, True, False]
    assert [carry.steps[0].item() for carry in carries] == [1, 2, 3, 4, 1]


@pytest.mark.parametrize("steps", [2, 6])
def test_evaluation_may_have_a_number_of_steps_of_its_own(steps):
    model = _with_q(-1.0, 0.0, eval_halt_max_steps=steps)
    for is_trained, expected in ((True, 4), (False, steps)):
        carries = _run(model.train(is_trained), 7)
        assert [carry.halted.all().item() for carry in carries].index(True) == expected - 1


def test_exploration_postpones_halting_but_not_beyond_the_last_step():
    carries = _run(_with_q(1.0, 0.0).train(), 1, min_steps=[0, 1, 2, 3, 4, 0, 0, 0])
    assert carries[0].halted.tolist() == [True, True, False, False, False, True, True, True]
    carries = _run(_with_q(1.0, 0.0).train(), 4, min_steps=[4] * _SLOTS)
    assert [carry.halted.all().item() for carry in carries] == [False, False, False, True]


def test_one_step_halts_always_and_has_no_target():
    model = _with_q(-1.0, 0.0, halt_max_steps=1).train()
    batch = random_batch(_SLOTS)
    output = model(model.initial_carry(batch), batch)
    assert output.carry.halted.all()
    assert output.continue_targets == ()


@pytest.mark.usefixtures("float64")
def test_target_is_the_better_of_the_next_values_and_halting_after_the_last_step():
    model = _with_q(-1.0, 0.5).train()
    batch = random_batch(_SLOTS)
    carry = model.initial_carry(batch)
    for step in range(1, 5):
        output = model(carry, batch)
        carry = output.carry
        value = torch.sigmoid(torch.tensor(-1.0 if step == 4 else 0.5))
        (continued,) = output.continue_targets
        assert_close(continued.targets, value.expand(_SLOTS))
        assert continued.counts.all()
    assert model.eval()(carry, batch).continue_targets == ()


@pytest.mark.usefixtures("float64")
def test_target_comes_from_a_call_on_the_new_state_of_every_slot():
    model = tiny_model(q_target="exact").train()
    batch = random_batch(_SLOTS)
    output = model(model.initial_carry(batch), batch)
    with torch.no_grad():
        _, following = model.network(output.carry.state, batch.inputs, batch.puzzle_identifiers)
    best = torch.maximum(following.q_halt, following.q_continue)
    (continued,) = output.continue_targets
    assert_close(continued.targets, torch.sigmoid(best))
    assert torch.equal(continued.logits, output.prediction.q_continue)


@pytest.mark.usefixtures("float64")
def test_deferred_targets_are_the_exact_ones_where_weights_stand_still():
    exact, deferred = (tiny_model(q_target=q_target).train() for q_target in ("exact", "deferred"))
    carry = exact.initial_carry(random_batch(_SLOTS))
    expected, num_went_on, num_stopped = None, 0, 0
    for step in range(12):
        batch = random_batch(_SLOTS, seed=step)
        min_steps = torch.tensor([0, 0, 0, 2, 2, 3, 4, 4], dtype=torch.int32)
        wanted, found = (model(carry, batch, min_steps=min_steps) for model in (exact, deferred))
        assert torch.equal(wanted.carry.halted, found.carry.halted)
        earlier, *stopping = found.continue_targets
        assert torch.equal(earlier.counts, ~carry.halted)
        if expected is not None:
            went_on = earlier.counts
            assert_close(earlier.targets[went_on], expected.targets[went_on])
            assert_close(earlier.logits[went_on], expected.logits[went_on])
            num_went_on += int(went_on.sum())
        (expected,) = wanted.continue_targets
        for now in stopping:
            assert torch.equal(now.counts, found.carry.halted)
            assert_close(now.targets[now.counts], expected.targets[now.counts])
            assert_close(now.logits, expected.logits)
            num_stopped += int(now.counts.sum())
        carry = found.carry
    assert num_went_on > 20
    assert num_stopped > 20


def test_deferred_targets_save_most_calls():
    calls = {}
    for q_target in ("exact", "deferred"):
        model, rows = tiny_model(q_target=q_target).train(), []
        forward = model.network.forward

        def counted(state, *rest, forward=forward, rows=rows):
            rows.append(len(state["z_H"]))
            return forward(state, *rest)

        model.network.forward = counted
        carry = model.initial_carry(random_batch(_SLOTS))
        late = torch.full((_SLOTS,), 4, dtype=torch.int32)
        for step in range(8):
            carry = model(carry, random_batch(_SLOTS, seed=step), min_steps=late).carry
        calls[q_target] = sum(rows)
    assert calls["exact"] == 2 * 8 * _SLOTS
    assert calls["deferred"] == 8 * _SLOTS + 2 * _SLOTS, "after 4 and after 8 steps all slots stop"


def _draw(step: int, **changes) -> np.ndarray:
    options = {"seed": 3, "batch_size": 100_000, "halt_max_steps": 5, "probability": 0.25, **changes}
    return draw_min_steps(step=step, **options)


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
    assert not _draw(1, probability=0.0).any()
    assert set(_draw(1, probability=1.0, halt_max_steps=2).tolist()) == {2}
