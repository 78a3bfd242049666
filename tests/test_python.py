"""Runs, evaluations and a loop of one's own from Python: docs/python.md."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

import evaluate
import pretrain
from tests.ranks import REPOSITORY, complete_program

_PAGE = REPOSITORY / "docs" / "python.md"


@pytest.mark.slow
def test_runs_from_python_and_the_loop_of_the_page_compute_the_same(
    tmp_path, sudoku_folder, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = ["experiment=demo", f"data_path={sudoku_folder}", "epochs=2", "eval_interval=2", "device=cpu"]
    trained = pretrain.run([*words, "checkpoint_path=trained"], processes=2)
    assert trained.folder == Path("trained")
    assert "done: trained is at training step 3 of 3" in capsys.readouterr().out
    evaluated = evaluate.run([f"checkpoint={trained.folder}", "device=cpu"])
    assert evaluated.folder == tmp_path / "trained" / "evaluation" / "step_3"
    logged = trained.metrics["all"]["lm_loss"]
    assert logged == trained.rows[-1]["eval/all/lm_loss"]
    assert evaluated.metrics["all"]["lm_loss"] == pytest.approx(logged, rel=1e-2)

    with pytest.raises(ValueError, match=r"^trained holds a run .* choose another run_name, .*step_3$"):
        pretrain.run([*words, "checkpoint_path=trained", "seed=1"])

    loop = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)[-1]
    (tmp_path / "loop.py").write_text(loop)
    loop_words = (*words, "checkpoint_path=looped")
    said = complete_program(str(tmp_path / "loop"), *loop_words, folder=tmp_path, world_size=2)
    assert "eval/all/lm_loss" in said.stdout
    of_runs = [tmp_path / run / "step_3" / "ema_weights.safetensors" for run in ("trained", "looped")]
    weights, own = map(load_file, of_runs)
    assert all(value.equal(own[name]) for name, value in weights.items())


@pytest.mark.parametrize("run", [pretrain.run, evaluate.run])
def test_a_mistake_of_the_words_starts_nothing(run):
    with pytest.raises(ValueError, match="lr_minimum"):
        run(["data_path=.", "lr_minimum=1"])
    with pytest.raises(ValueError, match="checkpoint: give one"):
        evaluate.run(["checkpoint=[one,two]"])
