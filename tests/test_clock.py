"""What the time of a step goes into, and which rank the others wait for."""

import time
from types import SimpleNamespace

import pytest
import torch

import training.clock
from parallel.process_group import rank
from tests.ranks import run_ranks
from training.clock import StepClock, gather_timing

_CPU = torch.device("cpu")


def test_parts_and_the_rest():
    clock = StepClock(_CPU)
    assert clock.read() == {}
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
    timing = clock.read()
    elapsed = time.perf_counter() - began
    assert timing["steps"] == 2
    assert timing["data_wait_seconds"] >= 0.02
    assert timing["sync_seconds"] >= 0.03
    assert timing["compute_seconds"] >= 0.05
    assert 2 * timing["step_seconds"] <= elapsed - 0.2
    assert timing["compute_seconds"] == pytest.approx(
        timing["step_seconds"] - timing["data_wait_seconds"] - timing["sync_seconds"]
    )
    assert clock.read() == {}, "reading starts anew"


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
