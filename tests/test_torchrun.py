"""Programs without torchrun, ranks that fail, and what compiled blocks compute. A real torchrun: system/."""

import json
from pathlib import Path

import pytest
import torch

from parallel.process_group import rank
from tests.float64 import float64
from tests.ranks import complete_program, run_program, run_ranks
from tests.tiny import OVERRIDES, random_batch, run_losses, run_of, tiny_config, tiny_model

pytestmark = pytest.mark.slow


def test_one_process_without_torchrun(tmp_path, sudoku_folder):
    """There is no store, no group, and nothing that says how many processes share the cores."""
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "max_steps=1")
    for program, arguments in (("pretrain", words), ("evaluate", ("checkpoint=run", "device=cpu"))):
        assert run_program(program, *arguments, folder=tmp_path, world_size=None).statuses == [0]
    metrics = json.loads((tmp_path / "run" / "evaluation" / "step_1" / "metrics.json").read_text())["all"]
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["lm_loss"] == pytest.approx(logged["eval/all/lm_loss"], rel=1e-5)


def test_help_is_printed_once_and_starts_nothing(tmp_path):
    finished = complete_program("pretrain", "--help", "all", folder=tmp_path, world_size=2)
    assert finished.stdout.count("cpu_threads") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {".output_pretrain"}


def _train_until_rank_1_fails(folder: Path, data: Path) -> None:
    import pretrain

    train_step = pretrain.train_step

    def fail(state, *arguments, **options):
        if rank() == 1 and state.step == 3:
            raise RuntimeError("rank 1 is broken")
        return train_step(state, *arguments, **options)

    pretrain.train_step = fail
    pretrain.train(run_of(tiny_config(data_path=str(data), checkpoint_path=str(folder / "run"))))


def test_a_rank_that_fails_alone_does_not_leave_the_others_hanging(tmp_path, sudoku_folder):
    """It ends, which torchrun waits for, and so do those that wait for it in a collective."""
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError.*rank 1: .*rank 1 is broken"):
        run_ranks(_train_until_rank_1_fails, 2, tmp_path, sudoku_folder)
    assert json.loads((tmp_path / "run" / "status").read_text()) == {"status": "failed", "step": 3}


def _train_where_rank_1_cannot_build(folder: Path, data: Path) -> None:
    import pretrain
    from training import model

    def fail(*_):
        raise ValueError("no memory for the table")

    if rank() == 1:
        model.build_model = fail
    with pytest.raises(SystemExit, match="1"):
        pretrain.train(run_of(tiny_config(data_path=str(data), checkpoint_path=str(folder / "run"))))


def test_a_model_that_one_rank_cannot_build_ends_all(tmp_path, sudoku_folder):
    run_ranks(_train_where_rank_1_cannot_build, 2, tmp_path, sudoku_folder)


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_compiled_blocks_have_the_gradients_of_eager_ones():
    """Also where the backward pass computes the activations of each block anew.

    As close to those in float64 as eager ones come: the compiler rounds elsewhere, not more.
    """
    weights = tiny_model("trm").state_dict()
    compiled = _gradients(weights, "bfloat16", is_compiled=True, recomputes_blocks=True, num_steps=3)
    with float64():  # now that the compiler has been imported, with dtypes as they are
        exact = _gradients(weights, "float32", is_compiled=False)
    rounded = _difference(_gradients(weights, "bfloat16", is_compiled=False), exact)
    assert 1e-3 < rounded < 0.1
    assert _difference(compiled, exact) < 1.5 * rounded


def _difference(gradients: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradients - exact).norm() / exact.norm())


def _gradients(
    weights: dict[str, torch.Tensor],
    forward_dtype: str,
    *,
    is_compiled: bool,
    recomputes_blocks: bool = False,
    num_steps: int = 1,
) -> torch.Tensor:
    """Of the last of some equal steps, of which the compiler makes no more graphs than of two."""
    from models import recompute_blocks
    from models.blocks import Level
    from models.compilation import compile_blocks

    model = tiny_model("trm", forward_dtype=forward_dtype).train()
    model.load_state_dict(weights)
    if recomputes_blocks:
        recompute_blocks(model)
    assert all(
        each.recomputes_blocks == recomputes_blocks for each in model.modules() if isinstance(each, Level)
    )
    names = list(model.state_dict())
    if is_compiled:
        compile_blocks(model)
    batch = random_batch(4)
    for step in range(num_steps):
        stance = "default" if step < 2 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            model.zero_grad()
            loss, _ = run_losses(model, model.initial_carry(batch), batch)[1]()
            loss.backward()
    assert list(model.state_dict()) == names, "compiling renames nothing"
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
