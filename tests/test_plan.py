import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from dataset.plan import EvaluationPlan, Stage, TrainPlan
from dataset.sets import PuzzleSet
from tests.puzzle_sets import Groups, make_set


def random_groups(seed: int, *, groups: int, puzzles: int, examples: int, equal: bool = False) -> Groups:
    """Up to so many puzzles a group and examples a puzzle; `equal`: as many in all puzzles of a group."""
    random = np.random.Generator(np.random.Philox(seed))
    counts = random.integers(1, puzzles + 1, size=groups).tolist()
    if equal:
        return [[int(random.integers(1, examples + 1))] * count for count in counts]
    return [random.integers(1, examples + 1, size=count).tolist() for count in counts]


SHAPES = {
    "sudoku": ({"all": [[1]] * 13}, 4),
    "sudoku with variants": ({"all": [[1] * 5] * 12}, 8),
    "uniform, cut": ({"all": [[3, 3], [3]] * 4}, 8),
    "uniform, larger than the batch": ({"all": [[20, 20], [20]] * 2}, 8),
    "arc": ({"all": random_groups(1, groups=15, puzzles=4, examples=6, equal=True)}, 16),
    "anything": ({"all": random_groups(2, groups=15, puzzles=4, examples=6)}, 16),
    "larger than the batch": ({"all": random_groups(3, groups=6, puzzles=3, examples=30)}, 5),
    "batch of one": ({"all": random_groups(4, groups=6, puzzles=3, examples=3)}, 1),
    "batch over many epochs": ({"all": [[2], [1, 3]]}, 9),
    "one group": ({"all": [[1, 300]]}, 7),
    "two sets": (
        {
            "easy": random_groups(6, groups=9, puzzles=3, examples=4),
            "hard": random_groups(7, groups=5, puzzles=2, examples=5, equal=True),
        },
        11,
    ),
    "a set without a batch": ({"tiny": [[1]], "all": [[1]] * 20}, 12),
}
EPOCHS, INTERVAL = 12, 4


def make_plan(sets: dict[str, PuzzleSet], **changes) -> TrainPlan:
    epochs, interval = changes.pop("epochs", EPOCHS), changes.pop("eval_interval", INTERVAL)
    return TrainPlan(sets, [Stage((0,), epochs, interval)], **{"seed": 3, **changes})


def contents(plan: TrainPlan | EvaluationPlan, first_step: int = 0) -> list[tuple]:
    return [(b.set_name, b.rows.tolist(), b.puzzles.tolist()) for b in plan.batches(first_step)]


@pytest.fixture(params=SHAPES)
def case(request) -> tuple[dict[str, PuzzleSet], int]:
    sets, global_batch_size = SHAPES[request.param]
    return {name: make_set(groups) for name, groups in sets.items()}, global_batch_size


def naive_order(
    sets: dict[str, PuzzleSet], *, seed: int, global_batch_size: int, epochs: int, eval_interval: int
) -> Iterator[list[tuple]]:
    """The batches of each iteration as the public loop makes them, one visit after another."""
    for first in range(0, epochs, eval_interval):
        batches = []
        for stream, (name, data) in enumerate(sets.items()):
            visits = []
            for epoch in range(first, first + eval_interval):
                visits += naive_epoch(data, seed=seed, stream=stream, epoch=epoch)
            while visits:
                rows, puzzles = [], []
                while visits and len(rows) < global_batch_size:
                    puzzle, shuffled = visits.pop(0)
                    taken = shuffled[: global_batch_size - len(rows)]
                    rows += taken
                    puzzles += [puzzle] * len(taken)
                if len(rows) == global_batch_size:
                    batches.append((name, rows, puzzles))
        yield batches


def naive_epoch(data: PuzzleSet, *, seed: int, stream: int, epoch: int) -> Iterator[tuple[int, list[int]]]:
    """Puzzle and shuffled examples of each visit; the words are those of Philox, in this order."""
    philox = np.random.Philox(key=stream << 64 | seed, counter=[0, 0, 0, epoch])
    num_groups = len(data.group_indices) - 1
    group_words, puzzle_words = (philox.random_raw(num_groups).tolist() for _ in range(2))
    for group, word in zip(sorted(range(num_groups), key=group_words.__getitem__), puzzle_words, strict=True):
        first, end = data.group_indices[group : group + 2].tolist()
        puzzle = first + (word >> 11) * (end - first) // 2**53
        rows = list(range(*data.puzzle_indices[puzzle : puzzle + 2].tolist()))
        yield (
            puzzle,
            [row for _, row in sorted(zip(philox.random_raw(len(rows)).tolist(), rows, strict=True))],
        )


def test_the_order_is_that_of_the_public_loop(case):
    sets, global_batch_size = case
    for seed in (3, 2**64 - 1):
        arguments = {"seed": seed, "global_batch_size": global_batch_size}
        plan = make_plan(sets, **arguments)
        expected = list(naive_order(sets, epochs=EPOCHS, eval_interval=INTERVAL, **arguments))
        assert contents(plan) == list(itertools.chain(*expected))
        assert plan.iteration_ends == list(itertools.accumulate(map(len, expected)))


def test_every_step_is_reached_without_the_ones_before(case):
    sets, global_batch_size = case
    plan = make_plan(sets, global_batch_size=global_batch_size)
    everything = contents(plan)
    assert plan.total_steps == len(everything)
    for step in range(plan.total_steps + 2):
        assert contents(plan, step) == everything[step:]


def test_a_length_in_steps_is_the_beginning_of_a_longer_run_without_a_seam(case):
    sets, global_batch_size = case
    whole = make_plan(sets, global_batch_size=global_batch_size, eval_interval=EPOCHS)
    everything, length = contents(whole), whole.total_steps - 1
    for steps in (1, length, whole.total_steps) if len(sets) == 1 else ():
        plan = make_plan(sets, global_batch_size=global_batch_size, train_steps=steps, eval_steps=2)
        assert contents(plan) == everything[:steps]
        assert plan.iteration_ends == [*range(2, steps, 2), steps]
        assert contents(plan, steps - 1) == everything[steps - 1 : steps]
        assert contents(plan, steps + 1) == []
    plan = make_plan(sets, global_batch_size=global_batch_size, train_steps=3 * length + 2)
    assert (plan.total_steps, len(contents(plan)), plan.iteration_ends) == (
        *[3 * length + 2] * 2,
        [3 * length + 2],
    )


def test_iterators_do_not_disturb_each_other():
    plan = make_plan(
        {"all": make_set(random_groups(0, groups=12, puzzles=3, examples=3))}, global_batch_size=9
    )
    everything = contents(plan)
    pairs = zip(plan.batches(), plan.batches(0), plan.batches(2), strict=False)
    for step, batches in enumerate(pairs):
        rows = [batch.rows.tolist() for batch in batches]
        assert rows == [everything[step][1], everything[step][1], everything[step + 2][1]]


def test_a_run_without_a_batch_is_refused():
    sets = {"all": make_set([[1]] * 5)}
    for epochs, longer in ((12, "eval_interval"), (4, "epochs and eval_interval")):
        problem = "4 epochs of 5 training puzzles do not fill one batch of 21. "
        expected = f"{problem}Lower global_batch_size, add puzzles, or raise {longer}.$"
        with pytest.raises(ValueError, match=expected):
            make_plan(sets, global_batch_size=21, epochs=epochs, eval_interval=4)
    assert make_plan(sets, global_batch_size=20).iteration_ends == [1, 2, 3]
    for length in ({}, {"train_steps": 5}):  # example: all training puzzles have the same input
        with pytest.raises(ValueError, match="validation_fraction holds out all training puzzles of a stage"):
            make_plan(sets, global_batch_size=4, held_out={"all": np.ones(5, bool)}, **length)


def test_an_evaluation_reads_everything_once_in_order():
    sets = {"all": make_set([[1, 2], [3]]), "more": make_set([[2], [2, 4]])}
    plan = EvaluationPlan(sets, global_batch_size=4)
    expected = [
        ("all", [0, 1, 2, 3], [0, 1, 1, 2]),
        ("all", [4, 5], [2, 2]),
        ("more", [0, 1, 2, 3], [0, 0, 1, 1]),
        ("more", [4, 5, 6, 7], [2, 2, 2, 2]),
    ]
    for step in range(len(expected) + 2):
        assert contents(plan, step) == expected[step:]


def test_epochs_grow_with_the_steps_of_each_stage():
    """Two epochs of 3 steps each, then four."""
    sets = {"all": make_set([[1]] * 12)}
    plan = TrainPlan(sets, [Stage((0,), 2, 1), Stage((0,), 4, 4)], seed=3, global_batch_size=4)
    assert [plan.epochs(step) for step in (0, 3, 6, 12, plan.total_steps)] == [0, 1, 2, 4, 6]
    steps = TrainPlan(sets, [Stage((0,), 1, 1)], seed=3, global_batch_size=4, train_steps=7)
    assert steps.epochs(7) == pytest.approx(7 / 3)
