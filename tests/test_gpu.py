"""The minutes of a GPU: every part runs before they are there, with torch and numpy alone."""

import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch._inductor import config as inductor

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.attention import KERNELS, LENGTHS
from benchmarks.gpu.static import Static
from benchmarks.gpu.steps import EXPERIMENTS, WAYS, compiling, count_flops, step_config
from benchmarks.gpu.tasks import NothingToDoError, Options, Task, run_task
from benchmarks.train_step.contenders import Ours
from benchmarks.train_step.flops import step_flops
from benchmarks.trainee import METADATA
from models import layers
from models.compilation import COMPILER_OPTIONS
from tests.absent import PACKAGES, environment_without
from tests.ranks import REPOSITORY

_CPU = torch.device("cpu")


@pytest.fixture
def options(tmp_path) -> Options:
    return Options("cpu", is_tiny=True, golden=tmp_path, data=tmp_path)


@pytest.mark.slow
def test_every_part_runs_without_packages(tmp_path, golden_folder):
    output = tmp_path / "gpu.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--seconds", "540"]
    command += ["--output", str(output), "--golden", str(golden_folder)]
    environment = environment_without(PACKAGES, tmp_path) | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert finished.returncode == 0, (finished.stderr, [row for row in rows if "error" in row])

    assert set(rows[0]["missing"]) >= set(PACKAGES) - {"huggingface_hub", "onnx", "optuna"}
    ended = {(row["part"], row["name"]) for row in rows if "took_seconds" in row}
    assert ended == {(task.part, task.name) for task in gpu.tasks()}
    timed = {row["name"]: row for row in rows if "examples_per_second" in row and row["part"] == "steps"}
    assert timed.keys() == {task.name for task in gpu.tasks() if task.part == "steps"}
    for name in EXPERIMENTS:
        assert timed[f"{name} graphs"]["losses"] == timed[f"{name} compiled"]["losses"]
    for name in ("hrm", "trm"):
        for way in ("levels_compiled", "autotuned_compiled"):
            assert timed[f"{name} {way}"]["losses"] == timed[f"{name} compiled"]["losses"]
    kernels = {(row["length"], row["attention"]) for row in rows if "attention" in row}
    assert kernels == set(itertools.product(LENGTHS, KERNELS))
    assert {row["attention"] for row in rows if "refused" in row} == {"efficient", "cudnn"}  # of CUDA
    assert {row["run"] for row in rows if row.get("passed")} >= {"hrm_a", "trm_a", "serrm_a", "urm_a"}
    assert any("exact_accuracy" in row for row in rows)
    assert rows[-1]["benchmark"] == "gpu"
    assert not rows[-1]["failed"]
    assert rows[-1]["speedup_over_published_trm_graphs"] > 0
    assert 0 < rows[-1]["attention_900_over_default"] <= 1
    assert rows[-1]["attention_900_fastest"] in KERNELS


def test_operations_are_counted_as_by_hand(options):
    """torch counts what a step computes; in a CPU's backward pass one product less than on paper."""
    config = step_config("trm", options)
    sizes = {"vocab_size": METADATA.vocab_size, "seq_len": METADATA.seq_len}
    expected = step_flops(config.arch, batch_size=config.global_batch_size, **sizes)
    contender = Ours("ours", config, METADATA, _CPU)
    assert count_flops(contender.step) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["hrm", "serrm"])
def test_a_replayed_step_is_the_step(options, name):
    config = step_config(name, options)
    ours, replayed = (kind("ours", config, METADATA, _CPU) for kind in (Ours, Static))
    for _ in range(6):
        assert torch.equal(ours.step().loss, replayed.step().loss)
    assert torch.equal(ours.state.flat.weights, replayed.state.flat.weights)
    if name == "hrm":
        tables = [each.state.model.network.puzzle_emb.weights for each in (ours, replayed)]
        assert tables[0].any()
        assert torch.equal(*tables)


@pytest.mark.parametrize(
    ("way", "compiled", "is_autotuned"),
    [
        ("compiled", layers.Block, False),
        ("levels_compiled", layers.Level, False),
        ("autotuned_compiled", layers.Block, True),
    ],
)
def test_a_way_compiles_what_it_says(options, monkeypatch, way, compiled, is_autotuned):
    """A compiler that compiles nothing sees what it would get, and under which settings."""
    seen = set()

    def compile_nothing(module: torch.nn.Module, **how) -> None:
        assert how["options"] == COMPILER_OPTIONS
        seen.add((type(module), inductor.max_autotune))

    monkeypatch.setattr(torch.nn.Module, "compile", compile_nothing)
    with compiling(way):
        Ours(WAYS[way], step_config("hrm", options), METADATA, _CPU)
    assert seen == {(compiled, is_autotuned)}
    assert not inductor.max_autotune


# ----------------------------------------------------------------------------------------------- single tasks
def _tells_and_fails(options: Options, seconds: float, tell) -> None:
    tell(value=1)
    raise RuntimeError("of several\nlines")


def _dies(options: Options, seconds: float, tell) -> None:
    os._exit(3)


def _hangs(options: Options, seconds: float, tell) -> None:
    tell(value=2)
    subprocess.run(["sleep", "60"])


def _has_nothing_to_do(options: Options, seconds: float, tell) -> None:
    raise NothingToDoError("not here")


@pytest.mark.slow
def test_what_a_task_told_stays_however_it_ends(options):
    def rows_of(function, seconds=60.0):
        rows = list(run_task(Task("part", "name", 1.0, function), options, seconds=seconds))
        return [{key: row[key] for key in row if key not in ("part", "name")} for row in rows]

    first, error = rows_of(_tells_and_fails)
    assert first == {"value": 1}
    assert error["error"] == "RuntimeError: of several lines"
    assert error["where"].startswith("tests/test_gpu.py:")
    assert rows_of(_dies) == [{"error": "its process ended with status 3"}]
    assert rows_of(_has_nothing_to_do) == [{"skipped": "not here"}]
    began = time.monotonic()
    assert rows_of(_hangs, seconds=3.0) == [{"value": 2}, {"error": "took longer than 3 s"}]
    assert time.monotonic() - began < 30


def test_a_wrong_argument_is_one_line(capsys, tmp_path):
    for words in (["--data", str(tmp_path)], ["--only", "speed"], ["--seconds", "0"]):
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--device", "cpu", *words])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words[0] in line
