"""Benchmarks: all are in `make bench`, and a mistake is one line. `system/test_benchmarks.py` runs them."""

import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import exchange, harness, worlds
from benchmarks.step import Contender, choose_rounds
from distributed.number_format import choose_format
from tests.ranks import REPOSITORY

_FORMAT = {"bfloat16": "bf16", "float32": "fp32"}[choose_format(torch.device("cpu")).name]
KEYS = {
    "start --processes 1 --steps 4": ("help_seconds", "first_step_of_1_seconds", "step_of_1_seconds"),
    "optimizers": ("adam_atan2_speedup_over_loop", "average_over_traffic"),
    "exchange": ("efficiency_default", "step_shared_over_ddp", "efficiency_local_steps_32"),
    "scaling": ("weak_efficiency_2", "strong_over_apart_2"),
    "memory --processes 1 2": ("kept_mib_1", "kept_mib_2_both", "peak_mib_2"),
    "layout --layout pipeline_parallel_degree=2": ("masters", "stages"),
    "checkpoint": ("stall_over_torch_save_hrm_27m",),
    "dataset": ("arc_build_seconds", "sudoku_examples_per_second"),
    "evaluation": ("act_speedup", "mean_steps"),
    "step --arch trm --contenders published exact": (
        f"speedup_trm_{_FORMAT}_exact",
        f"of_peak_trm_{_FORMAT}_published",
    ),
}


def test_all_of_them_are_in_make_bench():
    files = (REPOSITORY / "benchmarks").glob("*.py")
    programs = {path.stem for path in files if "def main(" in path.read_text()}
    assert programs == {command.split()[0] for command in KEYS}
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nbench:")[2]
    assert programs == set(re.findall(r'"(\w+) --', recipe))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exchange --processes 0", "from 1"),
        ("exchange --processes 1", "Pass --processes 2"),
        ("exchange --at-least 0.85", "only under torchrun"),
        ("scaling --processes 1 --at-least 0.85", "from 2 to"),
        ("scaling --processes 1 --at-least nan", "a number such as 0.85"),
        ("scaling --processes 100000 --at-least 0.85", "from 2 to"),
        ("dataset --threads many", "--threads"),
        ("exchange --processes 1 --threads 4097", "from 1 to 4096"),
        ("start --threads auto", "--threads"),
        ("scaling --threads auto --processes 1 --at-least 0.85", "--threads auto"),
        ("step --hidden 30 --heads 4", "--hidden 30"),
        ("start --round 3", "--round"),
        ("memory --rounds 3 --device cuda", "--rounds 3"),
        ("layout --rounds 3 --device cuda", "--rounds 3"),
    ],
)
def test_a_wrong_argument_is_one_line(command, message):
    name, *argv = command.split()
    module = __import__(f"benchmarks.{name}", fromlist=["main"])
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z") as raised:
        module.main(argv)
    assert ".." not in str(raised.value)


@pytest.mark.parametrize(("rate", "rows"), [(1e12, [2592, 2048]), (1e9, [1907, 59])])
def test_a_slow_matrix_product_gets_fewer_rows(rate, rows):
    shapes = []

    def rate_of(*shape: int, min_run_time: float) -> float:
        shapes.append(shape)
        return rate

    options = SimpleNamespace(batch=32, length=81, hidden=128, quick=False)
    contender = SimpleNamespace(_options=options, _device=torch.device("cpu"), _rate_of=rate_of)
    assert Contender.product_rate(contender) == rate
    assert shapes[0] == (256, 256, 256)
    assert [m for m, _, _ in shapes[1:]] == rows
    assert all(2 * m * k * n / rate <= 0.5 for m, k, n in shapes)


def test_slow_steps_are_timed_in_fewer_rounds():
    assert [choose_rounds(seconds) for seconds in (0.1, 4.5, 100.0)] == [20, 5, 3]


def test_a_message_for_each_parameter_is_as_long_as_its_gradient(monkeypatch):
    in_bfloat16 = (*exchange._EXCHANGES["alone"], "arch.forward_dtype=bfloat16")
    monkeypatch.setitem(exchange._EXCHANGES, "alone", in_bfloat16)
    ranks = exchange._Exchange(torch.device("cpu"), SimpleNamespace(quick=True, puzzles=1), ["alone"])
    (flat,) = ranks._alone.state.weights.flats
    sent = []
    monkeypatch.setattr(ranks._alone, "step", lambda: None)
    monkeypatch.setattr(exchange.dist, "all_reduce", sent.append)
    ranks.turns["per_parameter"]()
    assert sum(message.nbytes for message in sent) == sum(
        view.nbytes for view in flat.gradient_views.values()
    )


def test_the_public_code_is_measured_without_a_training_state_of_ours(monkeypatch):
    options = SimpleNamespace(batch=2, length=9, hidden=16, heads=2, layers=1)
    device = torch.device("cpu")
    ours = Contender(device, "exact", "trm", "float32", options)
    monkeypatch.setattr(worlds, "build_first_state", None)
    published = Contender(device, "published", "trm", "float32", options)
    weights = ours._trainer.state.model.network.state_dict()
    assert all(
        weights[name].equal(weight) for name, weight in published._trainer.network.state_dict().items()
    )
    assert ours.count_operations() == published.count_operations() > 0


def test_the_other_ranks_of_a_machine_are_no_other_programs(monkeypatch):
    used = iter([(0.0, 0.0), (9.0, 3.0), (10.0, 3.0)])  # by all programs, by this rank
    monkeypatch.setattr(harness, "cpu_seconds", lambda: next(used))
    monkeypatch.setattr(harness, "gather_objects", lambda mine: [mine, (mine[0], 4.0), ("elsewhere", 9.0)])
    load = harness.Load()
    load._began -= 2
    load.count_ranks()
    assert load.other_cores() == pytest.approx((10 - 3 - 4) / 2, rel=0.01)
