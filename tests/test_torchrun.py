"""The commands of the README under the real torchrun, and compilation: what takes seconds, not tenths."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.float64 import float64
from tests.ranks import REPOSITORY
from tests.tiny import OVERRIDES, random_batch, tiny_arch, tiny_model

pytestmark = pytest.mark.slow

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def _run(*command: str, folder: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"} | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def _torchrun(num_processes: int, program: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    launch = (*_TORCHRUN, "--nproc-per-node", str(num_processes))
    return _run(*launch, str(REPOSITORY / program), *arguments, **options)


@pytest.mark.parametrize("launch", ["python", 1, 2])
def test_train_and_evaluate(tmp_path, sudoku_folder, launch):
    def run(program: str, *arguments: str):
        if launch == "python":
            return _run(sys.executable, str(REPOSITORY / program), *arguments, folder=tmp_path)
        return _torchrun(launch, program, *arguments, folder=tmp_path)

    trained = run(
        "pretrain.py", "experiment=demo", f"data_path={sudoku_folder}", "epochs=4", "eval_interval=2"
    )
    assert trained.returncode == 0, trained.stderr
    (folder,) = (tmp_path / "checkpoints" / "hrm-sudoku").iterdir()
    evaluated = run("evaluate.py", f"checkpoint={folder}")
    assert evaluated.returncode == 0, evaluated.stderr
    metrics = json.loads((folder / "evaluation" / "step_6" / "metrics.json").read_text())["all"]
    logged = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged["step"] == 6
    assert metrics["lm_loss"] == pytest.approx(logged["eval/all/lm_loss"], rel=1e-2)


@pytest.mark.parametrize("arguments", [["lrr=1"], ["data_path=nowhere"]], ids=["config", "data"])
def test_a_mistake_is_one_line_on_all_ranks(tmp_path, arguments):
    started = time.monotonic()
    finished = _torchrun(4, "pretrain.py", *OVERRIDES, *arguments, folder=tmp_path)
    assert time.monotonic() - started < 60, "nobody waits for a rank that is gone"
    assert finished.returncode != 0
    assert len(re.findall(r"^error", finished.stderr, flags=re.MULTILINE)) == 1
    assert finished.stderr.count('pretrain.py", line') == 0, "no traceback of ours"
    assert not list(tmp_path.iterdir())


def test_help_answers_at_once(tmp_path):
    for program in ("pretrain.py", "evaluate.py"):
        finished = _run(sys.executable, str(REPOSITORY / program), "--help", folder=tmp_path)
        assert finished.returncode == 0
        assert "cpu_threads" in finished.stdout
    assert _torchrun(2, "pretrain.py", "--help", folder=tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_alone_does_not_leave_the_others_hanging(tmp_path, sudoku_folder):
    """An exception in the loop of one rank: torchrun ends, and nothing of the run stays behind."""
    script = tmp_path / "failing.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "import pretrain\n"
        "from config.schema import PretrainConfig\n"
        "from parallel.launch import launch\n"
        "from parallel.process_group import rank\n"
        "train_step = pretrain.train_step\n"
        "def fail(state, *arguments, **options):\n"
        "    if rank() == 1 and state.step == 3: raise RuntimeError('rank 1 is broken')\n"
        "    return train_step(state, *arguments, **options)\n"
        "pretrain.train_step = fail\n"
        "from training.run_folder import compose_run\n"
        "with launch(PretrainConfig, compose_run) as run:\n"
        "    pretrain.train(run)\n"
    )
    launch = (*_TORCHRUN, "--nproc-per-node", "2", str(script))
    finished = _run(*launch, f"data_path={sudoku_folder}", *OVERRIDES, f"checkpoint_path={tmp_path / 'run'}")
    assert finished.returncode != 0
    assert "rank 1 is broken" in finished.stderr
    time.sleep(1)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()]
    assert not any(str(script).encode() in command for command in commands)


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_compiled_blocks_have_the_gradients_of_eager_ones():
    """Also where the backward pass computes the activations of each block anew.

    As close to those in float64 as eager ones come: the compiler rounds elsewhere, not more.
    """
    weights = tiny_model().state_dict()
    compiled = _gradients(weights, "float32", is_compiled=True)
    with float64():  # now that the compiler has been imported, with dtypes as they are
        exact = _gradients(weights, "float32", is_compiled=False)
    rounded = _difference(_gradients(weights, "float32", is_compiled=False), exact)
    assert _difference(compiled, exact) < 4 * rounded
    rounded = _difference(_gradients(weights, "bfloat16", is_compiled=False), exact)
    assert 1e-3 < rounded < 0.1
    recomputed = _gradients(weights, "bfloat16", is_compiled=True, recomputes_blocks=True)
    assert _difference(recomputed, exact) < 1.5 * rounded


def _difference(gradients: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradients - exact).norm() / exact.norm())


def _gradients(
    weights: dict[str, torch.Tensor],
    forward_dtype: str,
    *,
    is_compiled: bool,
    recomputes_blocks: bool = False,
) -> torch.Tensor:
    from models.compilation import compile_blocks
    from models.layers import Level
    from models.losses import loss_and_metrics

    model = tiny_model(forward_dtype=forward_dtype).train()
    model.load_state_dict(weights)
    for module in model.modules():
        if isinstance(module, Level):
            module.recomputes_blocks = recomputes_blocks
    names = list(model.state_dict())
    if is_compiled:
        compile_blocks(model)
    batch = random_batch(4)
    loss, _ = loss_and_metrics(model(model.initial_carry(batch), batch), tiny_arch().loss)
    loss.backward()
    assert list(model.state_dict()) == names, "compiling renames nothing"
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
