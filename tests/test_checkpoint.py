"""Checkpoints: their content, which are kept, and how a start continues from them."""

import json
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

import checkpointing.writer
from checkpointing.files import choose_checkpoint, newest_checkpoint, verify_checkpoint
from checkpointing.finding import find_checkpoint
from optimizers.learning_rate import learning_rates
from report.run import read_run
from tests.checkpoints import (
    FINGERPRINT,
    assert_equal,
    blank_state,
    checkpoint_names,
    open_checkpoints,
    random_state,
    replicated_tensors,
    resume,
    run_config,
    save,
    saved_tensors,
    state_tensors,
)
from tests.ranks import run_ranks
from tests.tiny import tiny_arch, tiny_config
from training.run_config import name_run, words_to_resume
from training.run_folder import claim_run_folder


def test_a_missing_checkpoint_is_explained_by_those_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("demo", "hrm-demo/first", "hrm-demo/second")):
        run = Path("checkpoints") / name
        (run / "step_50").mkdir(parents=True)
        for folder in (run, run / "step_50"):
            (folder / "config.yaml").touch()
        os.utime(run, (number, number))
    runs = "checkpoints/hrm-demo/second, checkpoints/hrm-demo/first, checkpoints/demo"
    with pytest.raises(ValueError, match=f"The newest of checkpoints/ are {runs}. Models in weights/: arc_"):
        find_checkpoint("checkpoints/first")
    with pytest.raises(ValueError, match="checkpoints/demo/step_60 does not exist. .*demo has step_50.$"):
        find_checkpoint("checkpoints/demo/step_60")
    with pytest.raises(ValueError, match=f"are {runs}.$"):
        read_run(Path("first"))


@pytest.mark.parametrize("optimizer", ["adam_atan2", "adamw", "muon"])
def test_a_resumed_state_is_the_saved_one(run, optimizer):
    saved = random_state(7, optimizer=optimizer)
    with open_checkpoints(run, optimizer=optimizer) as checkpoints:
        checkpoints.save(saved)
    state = resume(run, optimizer=optimizer)
    assert state.step == 7
    assert state.metrics.own() == saved.metrics.own()
    assert_equal(state_tensors(state), state_tensors(saved))
    weights = safetensors.torch.load_file(run / "step_7" / "weights.safetensors")
    assert_equal(weights, saved.model.network.state_dict())
    content = json.loads((run / "step_7" / "state.json").read_text())
    assert content["dataset_fingerprint"] == FINGERPRINT
    assert content["versions"]["torch"] == torch.__version__


def test_what_changes_while_it_is_written_is_not_in_it(run, monkeypatch):
    may_write = threading.Event()
    write_part = checkpointing.writer._write_local

    def wait_and_write(*arguments):
        assert may_write.wait(30)
        return write_part(*arguments)

    monkeypatch.setattr(checkpointing.writer, "_write_local", wait_and_write)
    state = random_state(1)
    with open_checkpoints(run) as checkpoints:
        for step in (1, 2):  # the second save finds the memory of the first
            state.step = step
            expected = state_tensors(state)
            may_write.clear()
            checkpoints.save(state)
            for tensor in (*replicated_tensors(state).values(), *state.carry.tensors().values()):
                tensor.zero_() if tensor.dtype is torch.bool else tensor.add_(1)
            assert newest_checkpoint(run) is None or step == 2
            may_write.set()
            checkpoints._writer.wait()
            assert_equal(state_tensors(resume(run)), expected)


def test_a_save_that_is_not_asynchronous_is_there_at_once(run):
    checkpoints = open_checkpoints(run, checkpoint_async=False)
    checkpoints.save(random_state(3))
    verify_checkpoint(run / "step_3")


def test_a_step_that_is_there_is_not_saved_again(run):
    save(run, 3)
    before = {path.name: path.stat().st_mtime_ns for path in (run / "step_3").iterdir()}
    save(run, 3)
    assert checkpoint_names(run) == {"step_3"}
    assert {path.name: path.stat().st_mtime_ns for path in (run / "step_3").iterdir()} == before


def test_a_branch_also_saves_the_step_that_it_goes_on_from(run, tmp_path):
    """Its first evaluation may remain the best one."""
    save(run, 3)
    branch, state = tmp_path / "branch", blank_state()
    with open_checkpoints(branch, resume=str(run)) as checkpoints:
        checkpoints.resume(state)
        checkpoints.save(state)
    assert_equal(*(saved_tensors(folder / "step_3") for folder in (run, branch)))


def test_the_averages_of_a_branch_begin_with_the_weights_where_there_are_none(run, tmp_path, capsys):
    save(run, 3)
    state = resume(tmp_path / "branch", resume=str(run), ema=0.5)
    assert "The averages start as its weights" in capsys.readouterr().out
    assert_equal(dict(state.exports()["ema_weights"]), state.sections()["weights"])
    assert_equal(state.sections()["weights"], random_state(3).sections()["weights"])


@pytest.mark.parametrize(("rate", "is_told"), [(1e-6, True), (None, False)])
def test_a_branch_tells_of_a_learning_rate_that_jumps(run, tmp_path, capsys, rate, is_told):
    """After a finished run, a longer one is no longer at the end of its schedule. A warm-up is no jump."""
    save(run, 3)
    warmup = {"lr_warmup_steps": 500}
    config = run_config(tmp_path / "branch", resume=str(run), **warmup)
    rate = rate or learning_rates(config, 3, total_steps=1000)["lr"]
    (run / "metrics.jsonl").write_text(f'{{"step": 3, "train/lr": {rate}}}\n')
    with open_checkpoints(tmp_path / "branch", resume=str(run), **warmup) as checkpoints:
        checkpoints.resume(blank_state(), total_steps=1000)
    told = "the learning rate changes from " in capsys.readouterr().out
    assert told == is_told


def _save_share(run: Path) -> None:
    save(run, 5)


def _load_share(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    state = resume(run)
    return state.carry.tensors(), {**state.metrics.own(), "steps": state.metrics.steps}


@pytest.mark.slow
def test_any_number_of_ranks_reads_its_share(run):
    """The metric sums are each rank's own again on as many ranks, else all of them rank 0's."""
    run_ranks(_save_share, 2, run)
    assert len(list((run / "step_5").glob("carry_*"))) == 2
    whole = resume(run)
    assert whole.metrics.own() == {"count": 2.0}
    assert_equal(whole.carry.tensors(), random_state(5).carry.tensors())
    assert [metrics["count"] for _, metrics in run_ranks(_load_share, 2, run)] == [0.5, 1.5]
    parts = run_ranks(_load_share, 4, run)
    for name, tensor in whole.carry.tensors().items():
        assert torch.equal(torch.cat([carry[name] for carry, _ in parts]), tensor), name
    assert [metrics["count"] for _, metrics in parts] == [2.0, 0.0, 0.0, 0.0]
    assert [metrics["steps"] for _, metrics in parts] == [1] * 4


@pytest.mark.slow
def test_resume_modes(run, tmp_path):
    assert choose_checkpoint(run, run_config(run)) is None
    assert choose_checkpoint(run, run_config(run, resume="never")) is None
    with pytest.raises(ValueError, match="resume=must, but .* has no checkpoint"):
        choose_checkpoint(run, run_config(run, resume="must"))
    save(run, 3, 8)
    for mode in ("auto", "must", str(run), str(run / "step_8")):
        assert choose_checkpoint(run, run_config(run, resume=mode)) == run / "step_8"
    with pytest.raises(ValueError, match=r"resume=never, but .* step_8\. .*another checkpoint_path"):
        choose_checkpoint(run, run_config(run, resume="never"))
    with pytest.raises(
        ValueError, match=r"step_3 is not the newest .* \(step_8\)\. .*another checkpoint_path"
    ):
        choose_checkpoint(run, run_config(run, resume=str(run / "step_3")))

    branch = tmp_path / "branch"
    for path, step in ((run, 8), (run / "step_8", 8), (run / "step_3", 3)):
        config = run_config(branch, resume=str(path), lr=0.5)
        assert choose_checkpoint(branch, config) == run / f"step_{step}"
    (tmp_path / "latest").symlink_to(run / "step_3")
    assert choose_checkpoint(branch, run_config(branch, resume=str(tmp_path / "latest"))) == run / "step_3"
    with pytest.raises(ValueError, match="nothing does not exist. Pass a run folder"):
        choose_checkpoint(branch, run_config(branch, resume=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="no checkpoint"):
        choose_checkpoint(branch, run_config(branch, resume=str(tmp_path)))
    assert resume(branch, resume=str(run / "step_3")).step == 3
    save(branch, 4)
    assert resume(branch, resume=str(run / "step_3")).step == 4, "the same command again goes on"
    named = run.rename(tmp_path / "step_9")
    assert choose_checkpoint(run, run_config(run, resume=str(named))) == named / "step_8"


def test_a_checkpoint_beyond_the_end_is_refused_before_anything_is_written(run, tmp_path, capsys):
    save(run, 8)
    (branch := tmp_path / "branch").mkdir()
    with pytest.raises(SystemExit):
        open_checkpoints(branch, resume=str(run)).resume(blank_state(), total_steps=5)
    assert "step_8 is at step 8, but this run ends at step 5" in capsys.readouterr().err
    assert not list(branch.iterdir())


def test_another_config_is_refused_with_advice_that_works(run):
    save(run, 3)
    assert not (run / "config.yaml").exists(), "the config of the checkpoint is compared"
    advice = rf"lr: 0\.001 -> 0\.5.* Choose another checkpoint_path\. .* init_from={run}/step_3\.$"
    with pytest.raises(ValueError, match=advice):
        claim_run_folder(run_config(run, lr=0.5))
    with pytest.raises(ValueError, match=r"arch\.hidden_size: .*Choose another checkpoint_path\.$"):
        claim_run_folder(run_config(run, arch=tiny_arch(hidden_size=64).model_dump()))


def test_the_advice_names_the_key_that_chooses_the_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for given, key, words in (
        ({"run_name": "a"}, "run_name", "run_name=a"),
        ({"checkpoint_path": "of me"}, "checkpoint_path", "'checkpoint_path=of me'"),
        ({"run_name": "a", "checkpoint_path": "b"}, "checkpoint_path", "checkpoint_path=b"),
    ):
        config = name_run(tiny_config(**given), experiment=None)
        assert words_to_resume(config) == words
        (run := Path(config.checkpoint_path)).joinpath("step_1").mkdir(parents=True)
        config = config.model_copy(update={"resume": "never"})
        assert words_to_resume(config) == f"{words} resume=auto"
        with pytest.raises(ValueError, match=f"Choose another {key}, or set resume=auto"):
            choose_checkpoint(run, config)
    assert tiny_config(run_name="a", checkpoint_path=None).folder_key == "run_name", "before a run has a name"


@pytest.mark.parametrize("ending", [".corrupt", ".corrupt-2"])
def test_a_renamed_checkpoint_says_why_it_was_renamed(run, ending):
    save(run, 3)
    renamed = (run / "step_3").rename(run / f"step_3{ending}")
    with pytest.raises(ValueError, match=r"was renamed, because .* rename it to step_3\.$"):
        choose_checkpoint(run.parent / "branch", run_config(run.parent / "branch", resume=str(renamed)))


def test_another_dataset_or_shape_is_refused(run, capsys):
    save(run, 3)
    with pytest.raises(SystemExit):
        resume(run, fingerprint="another")
    assert "another dataset than data_path. Choose another checkpoint_path." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        resume(run.parent / "branch", resume=str(run), fingerprint="another")
    assert f"Set init_from={run / 'step_3'} instead of resume, or data_path" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        resume(run.with_name("other"), resume=str(run), global_batch_size=12)
    assert "is (24, 16) in the checkpoint, but (12, 16) in this run" in capsys.readouterr().err


def test_a_checkpoint_is_found_through_links_and_as_the_working_folder(tmp_path, monkeypatch):
    """Results go into the run that a link leads to."""
    save(tmp_path / "run", 1).close()
    (tmp_path / "runs").mkdir()
    for name, goal in (("step_124", "run/step_1"), ("latest", "run/step_1"), ("link", "run")):
        (tmp_path / "runs" / name).symlink_to(tmp_path / goal)
        checkpoint = find_checkpoint(tmp_path / "runs" / name)
        assert (checkpoint.run_folder, checkpoint.name) == (tmp_path / "run", "step_1"), name
    for folder in ("run", "run/step_1"):
        monkeypatch.chdir(tmp_path / folder)
        checkpoint = find_checkpoint(".")
        assert (checkpoint.run_folder, checkpoint.name) == (tmp_path / "run", "step_1"), folder


def test_a_file_in_the_cache_of_the_hub_keeps_its_name(tmp_path):
    (tmp_path / "blobs").mkdir()
    torch.save({}, tmp_path / "blobs" / "0123")
    (tmp_path / "step_7").symlink_to(tmp_path / "blobs" / "0123")
    with pytest.raises(ValueError, match=f"^{tmp_path}/all_config.yaml is missing"):
        find_checkpoint(tmp_path / "step_7")


def test_the_log_is_cut_back_and_unfinished_checkpoints_are_removed(run):
    save(run, 3)
    (run / "step_4.tmp-abcd").mkdir()
    (run / "step_4.tmp-abcd" / "weights.safetensors").touch()
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n{"step": 5}\n')
    state = blank_state()
    assert open_checkpoints(run).resume(state)
    assert checkpoint_names(run) == {"step_3"}
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not open_checkpoints(run).resume(state), "the line of step 3 is still to be logged"


def test_the_newest_and_the_best_are_kept(run):
    """Which one is the best: test_best.py."""
    values = dict(enumerate((0.5, 0.2, 0.8, 0.6, 0.7), 1))
    save(run, *values, metrics=values, keep_checkpoints=2, keep_best="eval/all/lm_loss")
    assert checkpoint_names(run) == {"step_2", "step_4", "step_5"}
