"""Everything that works on a processor with bfloat16 instructions works on one without.

Two variables limit torch and oneDNN to AVX2. MKL ignores them, so that times measured with them mean nothing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.number_format import instruction_set
from tests.ranks import REPOSITORY

_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}

pytestmark = pytest.mark.skipif(
    instruction_set(torch.device("cpu")) in ("avx2", "neon", "unknown"), reason="the processor has no AVX-512"
)


def _run(*command: str | Path, cache: Path) -> str:
    """Runs a command in the repository with AVX2, and returns its output.

    cache: Folder of compiled code. From the usual folder, torch would later run this code as if it were for
    AVX-512, and crash.
    """
    environment = os.environ | _AVX2 | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


def test_the_demo_learns_with_avx2(tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    size = ("--box", "2x2", "--generate", "4000", "--num-test", "1000", "--num-aug", "8")
    _run(sys.executable, "-m", "dataset.build", "sudoku", "--output-dir", data, *size, cache=tmp_path)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    words = ("experiment=demo", f"data_path={data}", f"checkpoint_path={run}")
    said = _run(*torchrun, "pretrain.py", *words, cache=tmp_path)
    assert "arch.forward_dtype=auto: float32, because torch finds no bfloat16 instructions (avx2)" in said
    said = _run(*torchrun, "evaluate.py", f"checkpoint={run}", "evaluators=[sudoku]", cache=tmp_path)
    assert float(re.search(r"^solved \(exact_accuracy\) +([01][.\d]*)", said, re.MULTILINE)[1]) > 0.97
    assert re.search(r"^number format \(forward_dtype\) +float32$", said, re.MULTILINE)
    said = _run(sys.executable, "solve.py", f"checkpoint={run}", "puzzle=1... ..2. .3.. ...4", cache=tmp_path)
    assert "valid" in said


def test_the_fast_tests_pass_with_avx2(tmp_path):
    tests = ("-m", "pytest", "-q", "-n", "2", "--ignore", "tests/system", "-m", "not slow")
    assert re.search(r"\d+ passed", _run(sys.executable, *tests, cache=tmp_path))
