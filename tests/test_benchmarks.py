"""The benchmarks as programs: they end with a line of JSON and refuse mistakes. Never how fast they are."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import collectives, gradient_sync, optimizers, scaling, sparse_optimizer
from benchmarks.harness import num_cores
from benchmarks.train_step import __main__ as train_step
from tests.ranks import REPOSITORY, Finished, run_program

_KEYS = {
    "start": ["help_seconds", "first_step_seconds_2_processes"],
    "gradient_sync": ["flat_over_ddp", "flat_over_per_parameter", "shared_over_ddp", "shared_over_copy"],
    "scaling": ["weak_efficiency_2", "weak_over_apart_2", "strong_over_apart_2"],
    "collectives": [],
    "sparse_optimizer": ["time_1m_over_1k_rows"],
    "optimizers": ["adam_atan2_over_loop", "ema_over_loop", "adam_atan2_over_traffic"],
    "checkpoint": ["stall_over_torch_save"],
    "memory": ["kept_mib_1", "kept_mib_2_optimizer_sharding", "kept_mib_2_puzzle_emb_sharding"],
    "evaluation": ["act_speedup"],
    "dataset": [
        *("arc_build_seconds", "arc_megabytes"),
        *("sudoku_examples_per_second", "arc_examples_per_second"),
    ],
    "train_step": [
        *("speedup_hrm_bf16", "speedup_hrm_bf16_eager", "speedup_hrm_bf16_exact"),
        "fraction_of_matmul_peak_hrm_bf16",
    ],
}
_WORDS = {
    "scaling": ("--processes", "1", "2"),
    "memory": ("--processes", "1", "2"),
    "checkpoint": (),
    "evaluation": (),
    "optimizers": (),
    "dataset": (),
    # Compiling takes a minute. Of TRM: where the batch is halved.
    "train_step": (*("--arch", "hrm", "--dtype", "bfloat16", "--contenders", "published", "ours"),),
}


def _run(name: str, *words: str, folder: Path, world_size: int | None = None) -> Finished:
    """Runs a benchmark from within the repository, where some of them start programs."""
    path = REPOSITORY / "benchmarks" / name
    program = path / "__main__" if path.is_dir() else path
    return run_program(str(program), *words, folder=folder, world_size=world_size, OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_KEYS))
def test_benchmark_ends_with_a_line_of_json(tmp_path, name):
    words = _WORDS.get(name, ("--processes", "2"))
    rounds = () if name == "memory" else ("--rounds", "1")
    finished = _run(name, "--quick", *rounds, *words, folder=tmp_path)
    assert finished.statuses == [0], finished.stderr
    told = [line for line in finished.error_lines if "No CUDA runtime is found" not in line]  # by torch
    assert told == [] or name == "evaluation"  # which trains first, with a progress bar
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    for key in _KEYS[name]:
        if name == "scaling" and num_cores() < 2:
            assert result.get(key) is None
        else:
            assert math.isfinite(result[key])
            assert result[key] > 0
    for sample in result["seconds"].values():
        assert sample["p10"] <= sample["median"] <= sample["p90"]


@pytest.mark.slow
def test_benchmark_under_torchrun(tmp_path):
    finished = _run("collectives", "--quick", folder=tmp_path, world_size=2)
    assert finished.statuses == [0, 0], finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1])["world_size"] == 2
    assert len(finished.stdout.splitlines()) > 5
    assert finished.stdout.count("collective ") == 1, "rank 0 prints for all"


@pytest.mark.parametrize(
    ("benchmark", "words", "message"),
    [
        (gradient_sync, ["--processes", "0"], "from 1"),
        (gradient_sync, ["--puzzles", "two"], "--puzzles"),
        (collectives, ["--device", "tpu"], "cpu"),
        (collectives, ["--round", "3"], "--round"),
        (sparse_optimizer, ["--processes", "5"], "768"),
        (sparse_optimizer, ["--threads", "many"], "--threads"),
        (optimizers, ["--processes", "2"], "unrecognized arguments: --processes 2"),
        (train_step, ["--hidden", "30", "--heads", "4"], "--hidden 30"),
        (train_step, ["--contenders", "ours"], "must name published"),
        (scaling, ["--processes", "2", "4"], "must contain 1"),
        (scaling, ["--processes", "1", "3"], "--puzzles 8 is not divisible by --processes 3"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys, benchmark, words, message):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_efficiency_is_over_one_process_and_never_over_shared_cores():
    rows = [scaling.Row(*row) for row in (("weak", 1, 8), ("weak", 2, 8), ("strong", 2, 4), ("weak", 3, 8))]
    seconds = dict(zip(rows, map(np.array, ([1.0, 1.0], [1.25, 1.25], [0.5, 1.0], [2.0, 2.0])), strict=True))
    of_medians, of_rounds = zip(*(scaling.efficiency(seconds, row, cores=2) for row in rows[:3]), strict=True)
    assert of_medians == pytest.approx([1, 0.8, 0.5 / 0.75])
    assert (of_rounds[2].p10, of_rounds[2].p90) == pytest.approx((0.55, 0.95))
    assert scaling.efficiency(seconds, rows[3], cores=2) is None


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["collectives", "scaling"])
def test_a_device_that_is_not_there_is_one_line(tmp_path, name):
    finished = _run(name, "--quick", "--device", "cuda", folder=tmp_path)
    assert finished.statuses == [1]
    (line,) = finished.error_lines
    assert "no CUDA device" in line


@pytest.mark.slow
def test_a_machine_with_torch_and_numpy_is_enough():
    """But for those about runs."""
    names = sorted(_KEYS.keys() - {"checkpoint", "evaluation", "start", "train_step"})
    modules = ", ".join(f"benchmarks.{name}" for name in (*names, "train_step.__main__"))
    code = (
        "import sys\n"
        "absent = 'pydantic yaml omegaconf hydra wandb coolname tqdm safetensors'\n"
        "sys.modules.update(dict.fromkeys(absent.split()))\n"
        f"import {modules}\n"
        "import torch\n"
        "from benchmarks.trainee import TINY, Trainee, build_config, random_batch\n"
        "cpu = torch.device('cpu')\n"
        "batch = random_batch(2, seed=0, device=cpu)\n"
        "Trainee(build_config(global_batch_size=2, sizes=TINY), cpu).step(batch)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
