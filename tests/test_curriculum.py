"""Runs in stages: which examples come when, how a stage changes the model; the learning rate."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataset.mixture import open_datasets
from dataset.plan import Stage, TrainPlan
from models import HaltingModel
from models.carry import Reasoning
from optimizers.learning_rate import scheduled_lr
from tests.tiny import draws_of, random_batch, tiny_config, tiny_model
from training.schedule import Schedule


def _reasoning(model: HaltingModel, cycles: dict[str, int]) -> Reasoning:
    """Returns how step 2 of 8 of a stage with these cycles reasons."""
    stage = Stage((0,), epochs=1, eval_interval=1, cycles=cycles)
    plan = SimpleNamespace(total_steps=8, stage_of=lambda _: stage, iteration_ends=[8])
    return Schedule(tiny_config(), plan).reasoning(2, model.reasoning)


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
    model, batch = tiny_model(**options).eval(), random_batch(2)
    calls = {"H_level": 0, "L_level": 0}
    for name in calls:
        level = getattr(model.network, name)
        level.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    reasoning = _reasoning(model, cycles)
    assert reasoning.progress == 0.25
    with torch.no_grad():
        model(model.refill(model.initial_carry(batch), batch, reasoning), reasoning)
    assert (calls["H_level"], calls["L_level"]) == expected


def test_a_stage_runs_its_own_loops():
    model, batch = tiny_model("ldt"), random_batch(2)
    reasoning = _reasoning(model, {"loops": 5})
    carry = model.refill(model.initial_carry(batch), batch, reasoning, rng=draws_of(2))
    assert model(carry, reasoning, draws_of(2)).prediction.digit.shape[1] == 5 != model.reasoning.loops


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        ({}, [4, 8]),
        ({"checkpoint_interval": 3}, [3, 4, 6, 8]),
        ({"checkpoint_every_eval": False}, [8]),
        ({"checkpoint_every_eval": False, "checkpoint_interval": 3, "max_steps": 7}, [3, 6, 7]),
    ],
)
def test_the_last_step_is_saved_and_alone_where_a_config_says_so(keys, saved):
    schedule = Schedule(tiny_config(**keys), SimpleNamespace(total_steps=8, iteration_ends=[4, 8]))
    assert [step for step in range(9) if schedule.is_checkpoint(step)] == saved


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        ({}, False),
        ({"checkpoint_every_eval": False}, True),
        ({"checkpoint_every_eval": False, "checkpoint_interval": 3}, True),
        ({"checkpoint_every_eval": False, "checkpoint_interval": 2}, False),
        ({"checkpoint_every_eval": False, "keep_best": None}, False),
        ({"checkpoint_every_eval": False, "max_steps": 4}, False),
        ({"checkpoint_every_eval": True, "local_steps": 3}, False),
    ],
)
def test_a_best_step_without_a_checkpoint_is_one_warning(keys, is_told, capsys):
    schedule = Schedule(tiny_config(**keys), SimpleNamespace(total_steps=8, iteration_ends=[4, 8]))
    schedule.warn_of_unsaved_best()
    warned = capsys.readouterr().err
    assert warned.count("\n") == is_told
    if is_told:
        assert (
            "checkpoint_every_eval=false: the step that keep_best=exact_accuracy marks as the best" in warned
        )


def _plan(folders: list[Path], *stages: Stage) -> TrainPlan:
    sets = open_datasets(folders, read_everything=False).splits["train"].sets
    return TrainPlan(sets, stages, seed=3, global_batch_size=2)


def _rows(batches) -> list[tuple[str, list[int], list[int]]]:
    return [(batch.set_name, batch.rows.tolist(), batch.puzzles.tolist()) for batch in batches]


def test_stages_follow_one_another_from_any_step(folders):
    stages = [
        Stage((1,), epochs=3, eval_interval=3, cycles={"H_cycles": 1}),
        Stage((0, 1), epochs=2, eval_interval=1),
        Stage((0,), epochs=4, eval_interval=2),
    ]
    plan = _plan(folders, *stages)
    everything = _rows(plan.batches())
    assert len(everything) == plan.total_steps == plan.iteration_ends[-1]
    assert len(plan.iteration_ends) == 1 + 2 + 2
    for first_step in range(plan.total_steps + 1):
        assert _rows(plan.batches(first_step)) == everything[first_step:]

    folder_of_group = np.array([0, 0, 0, 1, 1])
    whole = open_datasets(folders, read_everything=False).splits["train"].sets["all"]
    for step, (name, _, puzzles) in enumerate(everything, 1):
        groups = whole.group_indices.searchsorted(puzzles, side="right") - 1
        folders_here = {1} if name == "more" else set(folder_of_group[groups].tolist())
        assert folders_here <= set(plan.stage_of(step).folders), step
    assert plan.stage_of(1) is stages[0]
    assert plan.stage_of(plan.iteration_ends[0]) is stages[0]
    assert plan.stage_of(plan.iteration_ends[0] + 1) is stages[1]
    assert plan.stage_of(plan.total_steps) is stages[2]

    # The main training is the same with and without what comes before it, and no two stages draw alike.
    alone = _rows(_plan(folders, stages[2]).batches())
    assert everything[-len(alone) :] == alone
    twice = _rows(_plan(folders, stages[2], stages[2]).batches())
    assert twice[: len(alone)] != alone


def test_shares_of_the_main_training_change_its_cycles_and_not_its_data(folders):
    before, main = Stage((1,), epochs=3, eval_interval=3), Stage((0,), epochs=12, eval_interval=4)
    shallow, medium = (dataclasses.replace(main, cycles={"H_cycles": cycles}) for cycles in (1, 2))
    sets = open_datasets(folders, read_everything=False).splits["train"].sets
    options = {"seed": 3, "global_batch_size": 2}
    plain = TrainPlan(sets, [before, main], **options)
    plan = TrainPlan(sets, [before, main], **options, parts=[(0.3, shallow), (0.35, medium)])
    assert (plan.total_steps, plan.iteration_ends) == (plain.total_steps, plain.iteration_ends)
    assert _rows(plan.batches()) == _rows(plain.batches())
    first = plan.iteration_ends[0]
    num_main = plan.total_steps - first
    expected = [before] * first + [shallow] * round(0.3 * num_main)
    expected += [medium] * (round(0.65 * num_main) - round(0.3 * num_main))
    expected += [main] * (plan.total_steps - len(expected))
    assert len({id(stage) for stage in expected}) == 4
    assert all(plan.stage_of(step) is stage for step, stage in enumerate(expected, 1))
    for last in range(len(expected) + 1):
        counts = [expected[:last].count(stage) for stage in (before, shallow, medium, main)]
        assert plan.num_steps(last) == [*zip((before, shallow, medium, main), counts, strict=True)]
    assert plan.main is main
    assert all(plain.stage_of(step) is main for step in range(first + 1, plan.total_steps + 1))


def _rates(**options) -> list[float]:
    return [scheduled_lr(step, base=2.0, total_steps=100, **options) for step in range(1, 101)]


def test_shares_may_add_up_to_all_steps():
    shares = [0.34, 0.56, 0.1]
    assert 0.34 + 0.56 + 0.1 > 1  # rounded
    curriculum = [{"share": share, "H_cycles": 1} for share in shares]
    assert [stage.share for stage in tiny_config(curriculum=curriculum).curriculum] == shares


def test_warm_up_is_linear_and_reaches_the_peak():
    rates = _rates(warmup_steps=10, min_ratio=1.0)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10:] == pytest.approx([2.0] * 90)


def test_cosine_ends_exactly_at_the_last_step():
    rates = _rates(warmup_steps=10, min_ratio=0.1)
    assert rates[9] == pytest.approx(2.0)
    assert rates[54] == pytest.approx(2.0 * 0.55)
    assert rates[99] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("warmup_steps", [0, 100, 200])
def test_no_warm_up_and_nothing_but_warm_up(warmup_steps):
    rates = _rates(warmup_steps=warmup_steps, min_ratio=0.5)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[-1] == pytest.approx({0: 1.0, 100: 2.0, 200: 1.0}[warmup_steps])
