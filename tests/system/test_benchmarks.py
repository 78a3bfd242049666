"""Every benchmark as a program, tiny, on cores of its own: it ends with a line of JSON."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from distributed.number_format import instruction_set
from tests.ranks import REPOSITORY, complete_program
from tests.test_benchmarks import KEYS


def _run(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("command", KEYS)
def test_a_benchmark_ends_with_a_line_of_json(command, tmp_path):
    name, *words = command.split()
    rounds = () if name in ("memory", "layout") else ("--rounds", "1")
    words = (f"benchmarks/{name}", *words, "--quick", *rounds)
    finished = complete_program(*words, folder=tmp_path, world_size=None, OMP_NUM_THREADS="1")
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["device"].endswith(f"({instruction_set(torch.device('cpu'))})")
    for key in KEYS[command]:
        assert math.isfinite(result[key]), key
        assert result[key] > 0, key


def test_without_bfloat16_instructions_steps_are_timed_in_float32():
    words = ("--quick", "--rounds", "1", "--arch", "trm", "--contenders", "exact")
    finished = _run(sys.executable, "-m", "benchmarks.step", *words, ATEN_CPU_CAPABILITY="avx2")
    assert finished.returncode == 0, finished.stderr
    assert "speedup_trm_fp32_exact" in json.loads(finished.stdout.splitlines()[-1])


def test_published_sizes_run_to_their_end(tmp_path):
    tiny = "arch.hidden_size=16 arch.num_heads=2 arch.L_layers=1 arch.puzzle_emb_ndim=16 compile=false"
    environment = {"STEPS": "2", "PUZZLES": "20", "VARIANTS": "1", "WORDS": tiny}
    finished = _run("benchmarks/sizes.sh", str(tmp_path), "trm_sudoku_mlp", **environment)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    assert "s a step" in finished.stdout
    assert f"({instruction_set(torch.device('cpu'))})" in finished.stdout


@pytest.mark.parametrize(("least", "status"), [("0", 0), ("5", 1)])
def test_a_cluster_is_measured_by_its_ranks(least, status):
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.exchange", "--quick")
    finished = _run(sys.executable, *words, "--at-least", least)
    assert finished.returncode == status, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["efficiency"] > 0
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == status, "once, in addition to torchrun's own words"
    assert all("is below --at-least 5" in line for line in errors)


@pytest.mark.parametrize(("least", "status"), [("0", 0), ("5", 1)])
def test_scaling_on_one_machine_needs_no_torchrun(least, status):
    words = ("-m", "benchmarks.scaling", "--quick", "--at-least", least)
    finished = _run(sys.executable, *words)
    assert finished.returncode == status, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1])["weak_efficiency_2"] > 0
    assert finished.stderr.count("is below --at-least 5") == status
