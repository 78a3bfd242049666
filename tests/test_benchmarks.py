"""Every benchmark as a program, tiny: it ends with a line of JSON, or one of what is wrong."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from tests.ranks import REPOSITORY

_KEYS = {
    "start --processes 1 --steps 4": ("help_seconds", "first_step_of_1_seconds", "step_of_1_seconds"),
    "optimizers dense": ("adam_atan2_speedup_over_loop", "average_over_traffic"),
    "optimizers table": ("time_1m_over_1k_rows", "ours_over_plain_0", "ours_over_rows_0.9"),
    "parallel collectives": ("share_of_step_gradients",),
    "parallel exchange": ("efficiency_default", "step_shared_over_ddp", "efficiency_local_steps_32"),
    "parallel scaling": ("weak_efficiency_2", "strong_over_apart_2"),
    "parallel memory --processes 1 2": ("kept_mib_1", "kept_mib_2_both", "peak_mib_2"),
    "checkpoint": ("stall_over_torch_save_hrm_27m",),
    "dataset": ("arc_build_seconds", "sudoku_examples_per_second"),
    "evaluation": ("act_speedup", "mean_steps"),
    "step --arch trm --contenders published exact exact_small_pages": (
        *("speedup_trm_bf16_exact", "of_peak_trm_bf16_published", "speedup_trm_bf16_exact_small_pages"),
    ),
}


def _run(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("command", _KEYS)
def test_a_benchmark_ends_with_a_line_of_json(command):
    name, *words = command.split()
    finished = _run(sys.executable, "-m", f"benchmarks.{name}", *words, "--quick", "--rounds", "1")
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    for key in _KEYS[command]:
        assert math.isfinite(result[key]), key
        assert result[key] > 0, key


def test_all_of_them_are_in_make_bench():
    programs = {
        path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "def main(" in path.read_text()
    }
    assert programs - {"__main__"} == set(BENCHMARKS) == {command.split()[0] for command in _KEYS}


@pytest.mark.slow
def test_make_bench_prints_a_row_of_each():
    finished = _run(sys.executable, "-m", "benchmarks", "--quick", "--only", "dataset")
    assert finished.returncode == 0, finished.stderr
    row = finished.stdout.splitlines()[-1]
    assert row.startswith("| `dataset --rounds 2 --quick` | 20")
    assert "`arc_megabytes` " in row


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("parallel --processes 0", "from 1"),
        ("parallel --line 100mbit 25", "exchange"),
        ("optimizers --processes 5", "768"),
        ("dataset --threads many", "--threads"),
        ("step --hidden 30 --heads 4", "--hidden 30"),
        ("start --round 3", "--round"),
    ],
)
def test_a_wrong_argument_is_one_line(command, message, capsys):
    name, *argv = command.split()
    module = __import__(f"benchmarks.{name}", fromlist=["main"])
    with pytest.raises(SystemExit) as ended:
        module.main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


_TINY = "arch.hidden_size=16 arch.num_heads=2 arch.L_layers=1 arch.puzzle_emb_ndim=16 compile=false"
_SCRIPTS = {
    "sizes": (
        ["trm_sudoku_mlp"],
        {"STEPS": "2", "PUZZLES": "20", "VARIANTS": "1", "WORDS": _TINY},
        "s a step",
    ),
    "reasoning": (
        ["hrm_4x4"],
        {"STEPS": "2", "SEEDS": "2", "PUZZLES": "40", "GRID_STEPS": "2,4", "SAMPLES": "1,2"},
        "exact_accuracy",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _SCRIPTS)
def test_a_script_runs_to_its_end(name, tmp_path):
    words, environment, said = _SCRIPTS[name]
    finished = _run(str(Path("benchmarks", f"{name}.sh")), str(tmp_path), *words, **environment)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    assert said in finished.stdout
