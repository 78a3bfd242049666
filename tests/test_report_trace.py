"""The answers of a model after each thinking step, as a report counts and draws them."""

import base64
import dataclasses
import json
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from dataset.metadata import IGNORE_LABEL_ID
from report.trace import (
    accuracy_after_steps,
    clue_tokens,
    halting_histogram,
    pack,
    picture_data,
    reliability,
    trace_of_run,
)
from tests.arc_set import write_arc
from tests.report_runs import random_traces, write_run


def test_sums_are_those_of_a_plain_loop():
    traced = random_traces()
    n, steps, _ = traced.trace.preds.shape
    halted, right_after = [[0, 0] for _ in range(steps)], [0] * steps
    answers = []
    for puzzle in range(n):
        halt = next((k for k in range(steps) if traced.trace.q_halt[puzzle, k] > 0), steps - 1)
        for k in range(steps):
            is_right = (traced.trace.preds[puzzle, k] == 2).all()
            if puzzle < n - 1:  # the last one has no label
                halted[k][not is_right] += k == halt
                right_after[k] += bool(is_right)
                answers.append((1 / (1 + np.exp(-float(traced.trace.q_halt[puzzle, k]))), bool(is_right)))
    assert list(zip(*halting_histogram(traced), strict=True)) == [tuple(counts) for counts in halted]
    assert accuracy_after_steps(traced) == pytest.approx([count / (n - 1) for count in right_after])
    error, bins = 0.0, []
    for number in range(10):
        here = [(said, is_right) for said, is_right in answers if number <= 10 * said < number + 1]
        said, share = (sum(column) / len(here) for column in zip(*here, strict=True))
        bins.append((pytest.approx(said), pytest.approx(share), len(here)))
        error += len(here) / len(answers) * abs(said - share)
    assert reliability(traced) == (bins, pytest.approx(error))
    unlabelled = dataclasses.replace(traced, labels=np.full_like(traced.labels, IGNORE_LABEL_ID))
    assert reliability(unlabelled) is None
    assert accuracy_after_steps(unlabelled) == []


def test_the_easiest_come_first_and_too_many_are_thinned():
    content = picture_data(random_traces())
    keys = []
    for puzzle in content["puzzles"][:-1]:
        wrong = (np.array(puzzle["answers"]) != 2).sum(axis=1) if puzzle["has_label"] else np.zeros(3)
        from_here = next((k for k in range(3) if not wrong[k:].any()), None)
        is_known = puzzle["has_label"] and from_here is not None
        assert puzzle["stays_right_from"] == (from_here + 1 if is_known else None)
        keys.append((3 if from_here is None else from_here, wrong[-1]))
    assert keys == sorted(keys)
    packed, count = pack(content)
    assert count == 200
    smaller, fewer = pack(content, max_bytes=len(packed) // 3)
    assert len(smaller) <= len(packed) // 3
    kept = json.loads(zlib.decompress(base64.b64decode(smaller)))["puzzles"]
    assert fewer == len(kept) in (25, 50, 100)
    assert kept == content["puzzles"][:: 200 // fewer]


def test_symbols_that_every_answer_keeps_are_given():
    style = SimpleNamespace(first_of_field=2)
    inputs, labels = np.array([[2, 4, 4, 1]]), np.array([[2, 3, 4, 1]])
    puzzles = SimpleNamespace(info=SimpleNamespace(style=style), inputs=inputs, labels=labels)
    assert clue_tokens(puzzles) == [2]
    puzzles.labels = np.array([[2, 3, 1, 1]])  # an answer of another size is another grid
    assert clue_tokens(puzzles) == []


@pytest.mark.slow
def test_arc_grids_are_cropped_and_of_a_task_there_is_one_variant(tmp_path):
    tasks = {
        "abc": [([[1, 2, 3]], [[4], [5]]), ([[6]], [[7, 8]])],
        "def": [([[0] * 30] * 30, [[9] * 30] * 30)],
    }
    names = [f"{task}{view}" for task in tasks for view in ("", "|||t0|||0123456789", "|||t1|||0123456789")]
    data = write_arc(tmp_path / "data", tasks, sets={"all": names})
    run = write_run(tmp_path / "run", data)
    traced = trace_of_run(run, data=None, num_puzzles=400)
    puzzles = picture_data(traced)["puzzles"]
    by_name = {(puzzle["name"], puzzle["row"]): puzzle for puzzle in puzzles}
    assert {name for name, _ in by_name} <= set(names)
    first = by_name["abc", 0]
    assert (first["input"], first["input_columns"]) == ([3, 4, 5], 3)
    # With the end below and beside it; its corner counts nowhere.
    assert (first["label"], first["columns"]) == ([6, 1, 7, 1, 1, IGNORE_LABEL_ID], 2)
    assert [len(answer) for answer in first["answers"]] == [6] * 4
    largest = next(puzzle for puzzle in puzzles if len(puzzle["input"]) == 900)
    assert (largest["columns"], set(largest["label"])) == (30, {11})
    assert picture_data(traced)["colors"][11] == "#870c25"
