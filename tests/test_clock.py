"""What the time of a step goes into, which rank the others wait for, and the trace of a few steps."""

import contextlib
import gzip
import io
import json
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import training.clock
from distributed.world import is_main, rank
from tests.ranks import call_each, complete_program, run_ranks
from tests.tiny import OVERRIDES
from training.clock import StepClock, Stragglers, gather_timing, traced_steps

_CPU = torch.device("cpu")


def test_parts_and_the_rest():
    clock = StepClock(_CPU)
    assert clock.pop() == {}
    began = time.perf_counter()
    for _ in range(2):
        clock.start()
        with clock.measure("data_wait"):
            time.sleep(0.02)
        with clock.measure("sync"):
            time.sleep(0.03)
        time.sleep(0.05)
        clock.count_step()
    clock.stop()
    time.sleep(0.2)  # an evaluation: not counted
    clock.start()
    timing = clock.pop()
    elapsed = time.perf_counter() - began
    assert timing["steps"] == 2
    assert timing["data_wait_seconds"] >= 0.02
    assert timing["sync_seconds"] >= 0.03
    assert timing["compute_seconds"] >= 0.05
    assert 2 * timing["step_seconds"] <= elapsed - 0.2
    rest = timing["step_seconds"] - timing["data_wait_seconds"] - timing["sync_seconds"]
    assert timing["compute_seconds"] == pytest.approx(rest)
    assert clock.pop() == {}, "reading starts anew"


def _time_steps(*rows: list[float]) -> list[tuple[dict[str, float], str | None]]:
    """Times 40 steps a row, by a clock that is given the seconds of each rank: no busy machine counts."""
    shown, timings = 0.0, []
    training.clock.time = SimpleNamespace(perf_counter=lambda: shown)
    clock = StepClock(_CPU)
    for seconds_of_ranks in rows:
        for _ in range(40):
            clock.start()
            shown += seconds_of_ranks[rank()]
            clock.count_step()
        timings.append(gather_timing(clock, global_batch_size=30))
    return timings


def test_a_straggler_is_named_once():
    ((metrics, first), *later), *others = run_ranks(_time_steps, 3, *[[0.02, 0.02, 0.3]] * 4)
    assert metrics["slowest_rank"] == 2
    assert metrics["compute_seconds_slowest_rank"] == pytest.approx(0.3)
    assert metrics["compute_seconds_fastest_rank"] == pytest.approx(0.02)
    assert metrics["examples_per_second"] == pytest.approx(30 / metrics["step_seconds"])
    assert metrics["peak_memory_bytes"] > 10e6
    assert metrics["peak_memory_rank"] in range(3)
    told = [first, *(told for _, told in later)]
    assert told == [None, None, told[2], None]
    assert "rank 2 is a straggler: for 120 steps, " in told[2]
    assert others == [[({}, None)] * 4] * 2, "rank 0 alone logs"


@pytest.mark.parametrize(
    "rows",
    [
        [[0.02, 0.02, 0.06]] * 4,  # less than a person notices
        [[1.0, 1.0, 1.4]] * 4,
        [[0.3, 0.02], [0.02, 0.3]] * 5,  # another program slows now one rank, now the other
        [[0.3, 0.02], [0.3, 0.02], [0.02, 0.02]] * 5,
        [[0.3]] * 4,
    ],
)
def test_ordinary_noise_makes_no_straggler(rows):
    stragglers = Stragglers()
    assert [stragglers.add_row(row, steps=40) for row in rows] == [None] * len(rows)


@pytest.mark.parametrize(("steps", "row"), [(10, 10), (1, 100), (1000, 3)])
def test_a_straggler_needs_rows_and_steps(steps, row):
    """After a row in which it is not slow, the count begins again."""
    stragglers, slow = Stragglers(), [0.02, 0.3]
    rows = [slow] * (row - 1) + [[0.02, 0.02]] + [slow] * 2 * row
    told = [stragglers.add_row(times, steps=steps) for times in rows]
    assert [number for number, text in enumerate(told, 1) if text] == [2 * row]


_MATRIX_PRODUCTS = 3  # of one step: one forward, two backward


def _train(folder: Path, first_step: int, num_steps: int) -> tuple[str, str]:
    """Traces a loop of `num_steps` steps; returns the console's text.

    Each step draws as often as its number says, so that a trace tells which steps it holds.
    """
    first, second = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        with traced_steps(folder, is_enabled=is_main(), first_step=first_step) as step_done:
            for number in range(1, num_steps + 1):
                for _ in range(number):
                    torch.empty(2).normal_()
                (first.detach() @ second).sum().backward()
                second.grad.mm(first.detach())
                step_done()
            print("out of the block")
    return out.getvalue(), err.getvalue()


def _operators(path: Path) -> Counter:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "cpu_op")


def test_the_trace_holds_exactly_three_steps(tmp_path):
    """Or fewer, where the run ends early; rank 0 alone has one. What cannot be traced is one warning."""
    cases = {"a": (0, 12, [5, 6, 7]), "b": (100, 7, [5, 6, 7]), "c": (0, 5, [5]), "d": (0, 4, [])}
    (tmp_path / "file").touch()
    runs = [(tmp_path / name, first_step, num_steps) for name, (first_step, num_steps, _) in cases.items()]
    shown, others = run_ranks(call_each, 2, _train, [*runs, (tmp_path / "file" / "profile", 0, 10)])
    assert others == [("out of the block\n", "")] * 5
    for (name, (first_step, _, traced)), (out, err) in zip([*cases.items()][:3], shown, strict=False):
        assert err == ""
        folder = tmp_path / name
        name = f"rank_0_steps_{first_step + traced[0]}_{first_step + traced[-1]}"
        assert {path.name for path in folder.iterdir()} == {f"{name}.json.gz", f"{name}.txt"}
        operators = _operators(folder / f"{name}.json.gz")
        assert operators["aten::normal_"] == sum(traced)
        assert operators["aten::mm"] == _MATRIX_PRODUCTS * len(traced)
        assert operators["MmBackward0"] == len(traced)
        table = (folder / f"{name}.txt").read_text().strip()
        assert table in out
        shares = [float(re.search(r" ([\d.]+)% ", row)[1]) for row in table.split("\n")[3:13]]
        assert shares == sorted(shares, reverse=True)
        assert f"{name}.json.gz" in out

    *_, nothing, (out, err) = shown
    said = "warning (rank 0): profile=true"
    assert nothing == (
        "out of the block\n",
        f"{said}: no step was traced. Tracing starts at step 5 of this launch, but it ended "
        "after 4 steps. Change profile_steps.\n",
    )
    assert not (tmp_path / "d").exists()
    (warning,) = err.splitlines()
    assert warning.startswith(f"{said} failed (NotADirectoryError: ")
    assert out.startswith("steps 5 to 7 of rank 0"), "the table needs no disk"


@pytest.mark.long
@pytest.mark.slow
def test_a_profiled_run(tmp_path, sudoku_folder):
    options = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "max_steps=9", "profile=true")
    finished = complete_program("pretrain", *options, folder=tmp_path)
    assert "steps 5 to 7 of rank 0:" in finished.stdout
    assert _operators(tmp_path / "run" / "profile" / "rank_0_steps_5_7.json.gz")["aten::mm"] > 0
    words = ("max_steps=14", "profile_steps=[2,3]", "profile_ranks=[1]", "profile_details=[shapes,stacks]")
    complete_program("pretrain", *options, *words, folder=tmp_path, world_size=2)
    path = tmp_path / "run" / "profile" / "rank_1_steps_11_12.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any("train_step" in event["name"] for event in events if event.get("cat") == "python_function")
    assert len(list(path.parent.iterdir())) == 4
