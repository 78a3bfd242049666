"""Is what the GPU computes right: the tests that need one, and the golden vectors."""

import importlib.util
import os
import subprocess
import sys

import torch

from benchmarks.gpu.tasks import NothingToDoError, Options, Tell
from benchmarks.harness import REPOSITORY
from tests import golden

_TESTS = "tests/test_cuda.py"
_LAST_WORDS = 3000  # characters


def run_tests(options: Options, seconds: float, tell: Tell) -> None:
    if options.device == "cpu":
        raise NothingToDoError(f"{_TESTS} needs CUDA")
    if importlib.util.find_spec("pytest") is None:
        raise NothingToDoError(f"{_TESTS} needs pytest")
    # Without pyproject.toml, whose options are of plugins that may not be there.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(REPOSITORY)]
    command += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning", _TESTS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path[1:]])}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    tell(passed=done.returncode == 0, output=(done.stdout + done.stderr)[-_LAST_WORDS:].strip())


def replay_golden(options: Options, seconds: float, tell: Tell) -> None:
    """Trains as the public code did, in float32 without TF32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    runs = golden.find_runs(options.golden)
    if not runs:
        raise NothingToDoError(f"there are no golden vectors in {options.golden}")
    for run in runs:
        try:
            golden.replay(run, device=torch.device(options.device))
            tell(run=run.name, passed=True)
        except AssertionError as error:
            tell(run=run.name, passed=False, difference=str(error))
