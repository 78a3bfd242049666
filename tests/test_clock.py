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
from parallel.process_group import is_main, rank
from tests.ranks import complete_program, run_ranks
from tests.tiny import OVERRIDES
from training.clock import StepClock, gather_timing, traced_steps

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
    assert timing["compute_seconds"] == pytest.approx(
        timing["step_seconds"] - timing["data_wait_seconds"] - timing["sync_seconds"]
    )
    assert clock.pop() == {}, "reading starts anew"


def _time_steps(seconds_of_ranks: list[float]) -> tuple[dict[str, float], str | None]:
    """Five steps, by a clock that shows what it is told: a busy machine may make any rank a straggler."""
    shown = 0.0
    training.clock.time = SimpleNamespace(perf_counter=lambda: shown)
    clock = StepClock(_CPU)
    for _ in range(5):
        clock.start()
        shown += seconds_of_ranks[rank()]
        clock.count_step()
    return gather_timing(clock, global_batch_size=30)


def test_a_straggler_is_named():
    (metrics, told), *others = run_ranks(_time_steps, 3, [0.02, 0.02, 0.3])
    assert metrics["slowest_rank"] == 2
    assert metrics["compute_seconds_slowest_rank"] == pytest.approx(0.3)
    assert metrics["compute_seconds_fastest_rank"] == pytest.approx(0.02)
    assert metrics["examples_per_second"] == pytest.approx(30 / metrics["step_seconds"])
    assert metrics["peak_memory_bytes"] > 10e6
    assert "rank 2 is a straggler" in told
    assert others == [({}, None)] * 2, "rank 0 alone logs"


@pytest.mark.parametrize("seconds", [[0.02, 0.02], [0.02, 0.06], [1.0, 1.4]])
def test_equal_ranks_have_no_straggler(seconds):
    """Nor those that differ by less than a person notices, or than half."""
    (_, told), *_ = run_ranks(_time_steps, 2, seconds)
    assert told is None


_MATRIX_PRODUCTS = 3  # of one step: one forward, two backward


def _train(folder: Path, first_step: int, num_steps: int) -> tuple[str, str]:
    """Traces a loop of `num_steps` steps; returns the console's text.

    Each step draws as often as its number says, so that a trace tells which steps it holds.
    """
    torch.manual_seed(0)
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


@pytest.mark.parametrize(
    ("first_step", "num_steps", "traced"), [(0, 12, [5, 6, 7]), (100, 7, [5, 6, 7]), (0, 5, [5])]
)
def test_the_trace_holds_exactly_three_steps(tmp_path, first_step, num_steps, traced):
    """Or fewer, where the run ends early; rank 0 alone has one."""
    (out, err), others = run_ranks(_train, 2, tmp_path / "profile", first_step, num_steps)
    assert (err, others) == ("", ("out of the block\n", ""))
    name = f"rank_0_steps_{first_step + traced[0]}_{first_step + traced[-1]}"
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {f"{name}.json.gz", f"{name}.txt"}
    operators = _operators(tmp_path / "profile" / f"{name}.json.gz")
    assert operators["aten::normal_"] == sum(traced)
    assert operators["aten::mm"] == _MATRIX_PRODUCTS * len(traced)
    assert operators["MmBackward0"] == len(traced)

    table = (tmp_path / "profile" / f"{name}.txt").read_text().strip()
    assert table in out
    shares = [float(re.search(r" ([\d.]+)% ", row)[1]) for row in table.split("\n")[3:13]]
    assert shares == sorted(shares, reverse=True)
    assert f"{name}.json.gz" in out


def test_what_cannot_be_traced_is_one_warning(tmp_path):
    ((out, err),) = run_ranks(_train, 1, tmp_path / "profile", 0, 4)
    assert out == "out of the block\n"
    assert err == "warning: profile=true: nothing was traced, the run has 4 steps\n"
    assert not (tmp_path / "profile").exists()

    (tmp_path / "file").touch()
    ((out, err),) = run_ranks(_train, 1, tmp_path / "file" / "profile", 0, 10)
    (warning,) = err.splitlines()
    assert warning.startswith("warning: profile=true fails, the run goes on without it (NotADirectoryError: ")
    assert out.startswith("steps 5 to 7 of rank 0"), "the table needs no disk"


@pytest.mark.slow
def test_a_profiled_run(tmp_path, sudoku_folder):
    options = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "max_steps=9", "profile=true")
    finished = complete_program("pretrain", *options, folder=tmp_path, world_size=2)
    assert "steps 5 to 7 of rank 0:" in finished.stdout
    assert _operators(tmp_path / "run" / "profile" / "rank_0_steps_5_7.json.gz")["aten::mm"] > 0
