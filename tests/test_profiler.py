"""The profile of real training steps: which steps are in the trace, and that no failure ends the run."""

import contextlib
import gzip
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from parallel.process_group import is_main
from tests.ranks import run_program, run_ranks
from tests.tiny import OVERRIDES
from training.profiler import StepProfiler

_MATRIX_PRODUCTS = 3  # of one step: one forward, two backward


def _train(folder: Path, steps: range, num_steps: int) -> tuple[str, str]:
    """Profiles a loop that was to go through `steps` and ends after `num_steps`; returns the console's text.

    Each step draws as often as its number says, so that a trace tells which steps it holds.
    """
    torch.manual_seed(0)
    first, second = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        with StepProfiler(folder, enabled=is_main(), steps=steps) as profiler:
            for number in range(1, num_steps + 1):
                for _ in range(number):
                    torch.empty(2).normal_()
                (first.detach() @ second).sum().backward()
                second.grad.mm(first.detach())
                profiler.step()
            print("out of the block")
            torch.ones(8, 8).logsumexp(0)  # what a run does after its last step
    return out.getvalue(), err.getvalue()


def _operators(path: Path) -> Counter:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "cpu_op")


@pytest.mark.parametrize(
    ("steps", "num_steps", "traced"),
    [
        (range(0, 12), 12, [5, 6, 7]),
        (range(0, 7), 7, [5, 6, 7]),
        (range(0, 6), 6, [5, 6]),  # the run is short
        (range(0, 12), 5, [5]),  # the run is stopped early
    ],
)
def test_the_trace_holds_exactly_the_active_steps(tmp_path, steps, num_steps, traced):
    ((out, err),) = run_ranks(_train, 1, tmp_path / "profile", steps, num_steps)
    assert err == ""
    name = f"rank_0_steps_{traced[0]}_{traced[-1]}"
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {f"{name}.json.gz", f"{name}.txt"}
    operators = _operators(tmp_path / "profile" / f"{name}.json.gz")
    assert operators["aten::normal_"] == sum(traced)
    assert operators["aten::mm"] == _MATRIX_PRODUCTS * len(traced)
    assert operators["MmBackward0"] == len(traced)
    if num_steps == len(steps):
        assert operators["aten::logsumexp"] == 0
    assert f"{name}.json.gz" in out


def test_top_operators(tmp_path):
    ((out, _),) = run_ranks(_train, 1, tmp_path, range(100, 200), 10)
    table, _, rest = out.partition("trace: ")
    assert rest.splitlines()[1] == "out of the block", "shown as soon as it is over"
    title, _, shown = table.partition("\n")
    assert title == "steps 105 to 107 of rank 0:"
    assert (tmp_path / "rank_0_steps_105_107.txt").read_text().strip() == shown.strip()
    rows = shown.split("\n")[3:13]
    shares = [float(re.search(r" ([\d.]+)% ", row)[1]) for row in rows]
    assert len(shares) == 10
    assert shares == sorted(shares, reverse=True)
    calls = {row.split()[0]: int(row.split()[-1]) for row in rows}
    assert calls["aten::normal_"] == 5 + 6 + 7


@pytest.mark.parametrize("num_steps", [0, 4])
def test_too_few_steps_are_one_warning(tmp_path, num_steps):
    ((out, err),) = run_ranks(_train, 1, tmp_path / "profile", range(0, 100), num_steps)
    assert err == ("warning: profile=true: nothing was traced, step 5 is the first that would have been\n")
    assert out == "out of the block\n"
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    ((out, err),) = run_ranks(_train, 1, tmp_path / "file" / "profile", range(0, 10), 10)
    (warning,) = err.splitlines()
    assert warning.startswith("warning: profiling fails, the run goes on without it (NotADirectoryError: ")
    assert out.startswith("steps 5 to 7 of rank 0"), "the table needs no disk"
    assert out.endswith("out of the block\n")


def _train_without_a_profiler(folder: Path) -> tuple[str, str]:
    def profile(**_):
        raise RuntimeError("no such library")

    torch.profiler.profile = profile
    return _train(folder, range(0, 10), 10)


def test_a_profiler_that_does_not_start_is_one_warning(tmp_path):
    ((out, err),) = run_ranks(_train_without_a_profiler, 1, tmp_path)
    (warning,) = err.splitlines()
    assert "profiling fails" in warning
    assert "no such library" in warning
    assert out == "out of the block\n"
    assert not list(tmp_path.iterdir())


def test_a_profiler_that_fails_is_left_alone(tmp_path, monkeypatch, capsys):
    steps = []

    class Profile:
        def step(self):
            steps.append(len(steps) + 1)
            if len(steps) == 3:
                raise RuntimeError("busy")

    monkeypatch.setattr("training.profiler._start_profile", Profile)
    with StepProfiler(tmp_path, enabled=True, steps=range(0, 10)) as profiler:
        for _ in range(10):
            profiler.step()
    assert steps == [1, 2, 3]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "profiling fails" in warning
    assert "busy" in warning


def test_only_rank_0_is_profiled(tmp_path):
    (out, _), (out_of_1, err_of_1) = run_ranks(_train, 2, tmp_path, range(0, 8), 8)
    assert "steps 5 to 7 of rank 0" in out
    assert (out_of_1, err_of_1) == ("out of the block\n", "")
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_happens_where_it_is_not_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.profiler", None)  # to import it would fail
    with StepProfiler(tmp_path, enabled=False, steps=range(0, 10)) as profiler:
        for _ in range(10):
            profiler.step()
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_profiled_run(tmp_path, sudoku_folder):
    finished = run_program(
        "pretrain",
        f"data_path={sudoku_folder}",
        *OVERRIDES,
        "checkpoint_path=run",
        "max_steps=9",
        "profile=true",
        folder=tmp_path,
        world_size=2,
    )
    assert finished.statuses == [0, 0], finished.stderr
    assert "steps 5 to 7 of rank 0:" in finished.stdout
    (trace,) = (tmp_path / "run" / "profile").glob("*.gz")
    assert trace.name == "rank_0_steps_5_7.json.gz"
    assert _operators(trace)["aten::mm"] > 0
