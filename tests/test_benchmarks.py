"""Every benchmark as a program, tiny: it ends with a line of JSON, or one of what is wrong."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY

_KEYS = {
    "start --processes 1 --steps 4": ("help_seconds", "first_step_of_1_seconds", "step_of_1_seconds"),
    "optimizers": ("adam_atan2_speedup_over_loop", "average_over_traffic"),
    "parallel exchange": ("efficiency_default", "step_shared_over_ddp", "efficiency_local_steps_32"),
    "parallel scaling": ("weak_efficiency_2", "strong_over_apart_2"),
    "parallel memory --processes 1 2": ("kept_mib_1", "kept_mib_2_both", "peak_mib_2"),
    "checkpoint": ("stall_over_torch_save_hrm_27m",),
    "dataset": ("arc_build_seconds", "sudoku_examples_per_second"),
    "evaluation": ("act_speedup", "mean_steps"),
    "step --arch trm --contenders published exact": ("speedup_trm_bf16_exact", "of_peak_trm_bf16_published"),
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
    assert programs == {command.split()[0] for command in _KEYS}
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nbench:")[2]
    assert programs == set(re.findall(r'"(\w+) --', recipe))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("parallel --processes 0", "from 1"),
        ("parallel --line 100mbit 25", "exchange"),
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


@pytest.mark.slow
def test_published_sizes_run_to_their_end(tmp_path):
    tiny = "arch.hidden_size=16 arch.num_heads=2 arch.L_layers=1 arch.puzzle_emb_ndim=16 compile=false"
    environment = {"STEPS": "2", "PUZZLES": "20", "VARIANTS": "1", "WORDS": tiny}
    finished = _run("benchmarks/sizes.sh", str(tmp_path), "trm_sudoku_mlp", **environment)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    assert "s a step" in finished.stdout
