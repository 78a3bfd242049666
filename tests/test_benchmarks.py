"""Benchmarks: all are in `make bench`, and a mistake is one line. `system/test_benchmarks.py` runs them."""

import re

import pytest

from tests.ranks import REPOSITORY

KEYS = {
    "start --processes 1 --steps 4": ("help_seconds", "first_step_of_1_seconds", "step_of_1_seconds"),
    "optimizers": ("adam_atan2_speedup_over_loop", "average_over_traffic"),
    "parallel exchange": ("efficiency_default", "step_shared_over_ddp", "efficiency_local_steps_32"),
    "parallel scaling": ("weak_efficiency_2", "strong_over_apart_2"),
    "parallel memory --processes 1 2": ("kept_mib_1", "kept_mib_2_both", "peak_mib_2"),
    "parallel layout --layout pipeline_parallel_degree=2": ("masters", "stages"),
    "checkpoint": ("stall_over_torch_save_hrm_27m",),
    "dataset": ("arc_build_seconds", "sudoku_examples_per_second"),
    "evaluation": ("act_speedup", "mean_steps"),
    "step --arch trm --contenders published exact": ("speedup_trm_bf16_exact", "of_peak_trm_bf16_published"),
}


def test_all_of_them_are_in_make_bench():
    programs = {
        path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "def main(" in path.read_text()
    }
    assert programs == {command.split()[0] for command in KEYS}
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nbench:")[2]
    assert programs == set(re.findall(r'"(\w+) --', recipe))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("parallel --processes 0", "from 1"),
        ("parallel --processes 1 2", "scaling and memory"),
        ("parallel --line 100mbit 25", "exchange"),
        ("parallel --at-least 0.85", "torchrun"),
        ("dataset --threads many", "--threads"),
        ("start --threads auto", "--threads"),
        ("step --hidden 30 --heads 4", "--hidden 30"),
        ("start --round 3", "--round"),
    ],
)
def test_a_wrong_argument_is_one_line(command, message):
    name, *argv = command.split()
    module = __import__(f"benchmarks.{name}", fromlist=["main"])
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        module.main(argv)
