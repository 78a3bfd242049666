"""Checkpoints: whole or not there, noticed where damaged, and the run goes on from them bit by bit."""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import training.checkpoint_writer
from config.schema import PretrainConfig
from evaluation.checkpoint_folder import (
    CorruptCheckpointError,
    checkpoints_in,
    manifest_text,
    newest_checkpoint,
    step_of,
    verify_checkpoint,
)
from models.halting import Carry
from parallel.process_group import rank
from tests.ranks import run_program, run_ranks
from tests.test_pretrain import _STALL, _TIMINGS
from tests.tiny import FACTS, OVERRIDES, tiny_config, unwatched
from training.checkpoint import Checkpoints
from training.checkpoint_writer import write_tensors
from training.resumption import choose_checkpoint
from training.state import TrainState, build_train_state

_DATA = "the fingerprint"


def _config(run: Path, **changes) -> PretrainConfig:
    return tiny_config(checkpoint_path=str(run), **changes)


def _checkpoints(run: Path, *, fingerprint: str = _DATA, **changes) -> Checkpoints:
    run.mkdir(exist_ok=True)
    return Checkpoints(run, config=_config(run, **changes), fingerprint=fingerprint)


def _blank_state(**changes) -> TrainState:
    return build_train_state(tiny_config(**changes), FACTS, device=torch.device("cpu"))


def _random_state(step: int) -> TrainState:
    """A state in which every number is another one, as far as it depends on this rank for the carry."""
    state = _blank_state()
    state.step = step
    generator = torch.Generator().manual_seed(step)
    for tensor in state.replicated_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    carry = {}
    for name, tensor in state.carry.tensors().items():
        drawn = torch.randint(0, 2**31, (24, *tensor.shape[1:]), generator=generator)
        carry[name] = drawn.to(tensor.dtype)[state.slots]
    state.carry = Carry.from_tensors(carry)
    state.metrics.add({"count": torch.tensor(rank() + 0.5)})
    state.dense_optimizer.param_groups[0]["step"] = step
    return state


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    tensors = {**state.replicated_tensors(), **state.carry.tensors()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name


def _save(run: Path, *steps: int, metrics: dict[int, float] | None = None, **changes) -> Checkpoints:
    """A run that saves at some steps, and has the value `metrics` says of eval/all/lm_loss at some."""
    with _checkpoints(run, **changes) as checkpoints:
        for step in steps:
            checkpoints.save(_random_state(step))
            if metrics and step in metrics:
                line = {"step": step, changes["keep_best"]: metrics[step]}
                checkpoints.note_metrics(step, line)
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
    assert not checkpoints.last_save_failed
    return checkpoints


def _resume(run: Path, **changes) -> TrainState:
    state = _blank_state()
    _checkpoints(run, **changes).resume(state)
    return state


def _names(run: Path) -> set[str]:
    return {path.name for path in run.glob("step_*")}


def _flip_bit(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


# ---------------------------------------------------------------------------------------------------- content


def test_a_resumed_state_is_the_saved_one(run):
    saved = _random_state(7)
    with _checkpoints(run) as checkpoints:
        checkpoints.save(saved)
    state = _resume(run)
    assert state.step == state.dense_optimizer.param_groups[0]["step"] == 7
    assert state.metrics.state() == saved.metrics.state()
    _assert_equal(_tensors(state), _tensors(saved))
    _assert_equal(
        safetensors.torch.load_file(run / "step_7" / "weights.safetensors"), saved.model.network.state_dict()
    )
    content = json.loads((run / "step_7" / "state.json").read_text())
    assert content["dataset_fingerprint"] == _DATA
    assert (
        content["config_sha256"] == hashlib.sha256((run / "step_7" / "config.yaml").read_bytes()).hexdigest()
    )
    assert content["versions"]["torch"] == torch.__version__


def test_tensor_files_are_those_of_safetensors(tmp_path):
    dtypes = (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.float64, torch.uint8)
    tensors = {f"t{place}": torch.arange(6).view(2, 3).to(dtype) for place, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "nothing": torch.zeros(0, 4)}
    entry = write_tensors(tmp_path / "ours", tensors)
    content = (tmp_path / "ours").read_bytes()
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _assert_equal(safetensors.torch.load_file(tmp_path / "ours"), tensors)
    assert len(content) == len(safetensors.torch.save(tensors)), "the same layout"


def test_what_changes_while_it_is_written_is_not_in_it(run, monkeypatch):
    may_write = threading.Event()
    write_part = training.checkpoint_writer._write_part

    def wait_and_write(*arguments):
        assert may_write.wait(30)
        return write_part(*arguments)

    monkeypatch.setattr(training.checkpoint_writer, "_write_part", wait_and_write)
    state = _random_state(1)
    with _checkpoints(run) as checkpoints:
        for step in (1, 2):  # the second save finds the memory of the first
            state.step = step
            expected = _tensors(state)
            may_write.clear()
            checkpoints.save(state)
            for tensor in (*state.replicated_tensors().values(), *state.carry.tensors().values()):
                tensor.zero_() if tensor.dtype is torch.bool else tensor.add_(1)
            assert newest_checkpoint(run) is None or step == 2
            may_write.set()
            checkpoints._writer.wait()
            _assert_equal(_tensors(_resume(run)), expected)


def test_a_save_that_is_not_asynchronous_is_there_at_once(run):
    checkpoints = _checkpoints(run, checkpoint_async=False)
    checkpoints.save(_random_state(3))
    verify_checkpoint(run / "step_3")


def test_a_step_that_is_there_is_not_saved_again(run):
    _save(run, 3)
    before = {path.name: path.stat().st_mtime_ns for path in (run / "step_3").iterdir()}
    _save(run, 3)
    assert _names(run) == {"step_3"}
    assert {path.name: path.stat().st_mtime_ns for path in (run / "step_3").iterdir()} == before


def test_the_stall_is_told_once(run):
    with _checkpoints(run) as checkpoints:
        assert checkpoints.read_stall() == {}
        checkpoints.save(_random_state(3))
        assert 0 < checkpoints.read_stall()["checkpoint_stall_seconds"] < 30
        assert checkpoints.read_stall() == {}


def _save_share(run: Path) -> None:
    _save(run, 5)


def _load_share(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    state = _resume(run)
    return state.carry.tensors(), state.metrics.state()


@pytest.mark.slow
def test_any_number_of_ranks_reads_its_share(run):
    """The metric sums are each rank's own again on as many ranks, else all of them rank 0's."""
    run_ranks(_save_share, 2, run)
    assert len(list((run / "step_5").glob("carry_*"))) == 2
    whole = _resume(run)
    assert whole.metrics.state() == {"count": 2.0, "steps_summed": 1}
    _assert_equal(whole.carry.tensors(), _random_state(5).carry.tensors())
    assert [metrics["count"] for _, metrics in run_ranks(_load_share, 2, run)] == [0.5, 1.5]
    parts = run_ranks(_load_share, 4, run)
    for name, tensor in whole.carry.tensors().items():
        assert torch.equal(torch.cat([carry[name] for carry, _ in parts]), tensor), name
    assert [metrics["count"] for _, metrics in parts] == [2.0, 0.0, 0.0, 0.0]
    assert [metrics["steps_summed"] for _, metrics in parts] == [1] * 4


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"global_batch_size": 12}, "has 24 slots, this run 12"),
        (
            {"arch": tiny_config().arch.model_copy(update={"L_layers": 2}).model_dump()},
            "does not fit this run",
        ),
    ],
    ids=["batch", "arch"],
)
def test_another_shape_is_refused(run, capsys, change, part):
    _save(run, 5)
    state = _blank_state(**change)
    other = run.with_name("other")
    with pytest.raises(SystemExit):
        _checkpoints(other, resume=str(run), **change).resume(state)
    assert part in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- resuming


def test_resume_modes(run, tmp_path):
    assert choose_checkpoint(run, _config(run)) is None
    assert choose_checkpoint(run, _config(run, resume="never")) is None
    with pytest.raises(ValueError, match="resume=must, but .* has no checkpoint"):
        choose_checkpoint(run, _config(run, resume="must"))
    _save(run, 3, 8)
    for mode in ("auto", "must", str(run), str(run / "step_8")):
        assert choose_checkpoint(run, _config(run, resume=mode))[0] == run / "step_8"
    with pytest.raises(ValueError, match="resume=never, but .* step_8: .*run_name"):
        choose_checkpoint(run, _config(run, resume="never"))
    with pytest.raises(ValueError, match="step_3 is not the newest .* step_8: .*run_name"):
        choose_checkpoint(run, _config(run, resume=str(run / "step_3")))

    branch = tmp_path / "branch"
    for path, step in ((run, 8), (run / "step_8", 8), (run / "step_3", 3)):
        config = _config(branch, resume=str(path), lr=0.5)
        assert choose_checkpoint(branch, config)[0] == run / f"step_{step}"
    with pytest.raises(ValueError, match="no folder"):
        choose_checkpoint(branch, _config(branch, resume=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="no checkpoint"):
        choose_checkpoint(branch, _config(branch, resume=str(tmp_path)))
    assert _resume(branch, resume=str(run / "step_3")).step == 3
    _save(branch, 4)
    assert _resume(branch, resume=str(run / "step_3")).step == 4, "the same command again goes on"


def test_another_config_is_refused_even_if_the_folder_lost_its_own(run):
    _save(run, 3)
    with pytest.raises(ValueError, match="lr: 0.001 -> 0.5"):
        choose_checkpoint(run, _config(run, lr=0.5))


def test_another_dataset_is_refused(run, capsys):
    _save(run, 3)
    with pytest.raises(SystemExit):
        _resume(run, fingerprint="another")
    assert "another dataset" in capsys.readouterr().err


def test_the_log_is_cut_back_and_leftovers_are_removed(run):
    _save(run, 3)
    (run / "step_4.tmp-abcd").mkdir()
    (run / "step_4.tmp-abcd" / "weights.safetensors").touch()
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n{"step": 5}\n')
    state = _blank_state()
    assert _checkpoints(run).resume(state)
    assert _names(run) == {"step_3"}
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not _checkpoints(run).resume(state), "the line of step 3 is still to be logged"


def test_the_wandb_run_is_the_same_again(run, tmp_path):
    run.mkdir()
    (run / "wandb_run_id").write_text("abcd")
    _save(run, 3)
    (run / "wandb_run_id").unlink()
    _resume(run)
    assert (run / "wandb_run_id").read_text() == "abcd"
    _resume(tmp_path / "branch", resume=str(run))
    assert not (tmp_path / "branch" / "wandb_run_id").exists(), "a branch is another run"


# ----------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    _save(run, 3)
    return run / "step_3"


@pytest.mark.parametrize("name", ["weights", "optimizer", "carry", "state", "config", "manifest"])
def test_every_flipped_bit_is_noticed(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "step_3")
    (path,) = folder.glob(f"{name}*")
    size, draw = path.stat().st_size, random.Random(0)
    verify_checkpoint(folder)
    drawn = [0, size - 1, *(draw.randrange(size) for _ in range(20))]
    places = range(0, size, 3) if name == "manifest" else drawn
    for place in places:
        bit = draw.randrange(8)
        _flip_bit(path, place, bit)
        with pytest.raises(CorruptCheckpointError, match="corrupt"):
            verify_checkpoint(folder)
        _flip_bit(path, place, bit)
    content = path.read_bytes()
    for length in (0, 1, size // 2, size - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptCheckpointError, match="corrupt"):
            verify_checkpoint(folder)
    path.write_bytes(content + b"\n")
    with pytest.raises(CorruptCheckpointError, match="corrupt"):
        verify_checkpoint(folder)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match="corrupt"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/file", ".."])
def test_names_in_a_manifest_lead_nowhere_else(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "step_3")
    (tmp_path / "outside").write_text("x")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files[name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    (folder / "manifest.json").write_text(manifest_text(files))
    with pytest.raises(CorruptCheckpointError, match="corrupt"):
        verify_checkpoint(folder)


def test_damaged_ones_are_set_aside_and_the_one_before_is_used(run, capsys):
    _save(run, 1, 2, 3, 4, 5, keep_checkpoints=None)
    (run / "step_5" / "manifest.json").unlink()
    _flip_bit(run / "step_4" / "state.json", 10)
    (run / "step_3" / "weights.safetensors").write_bytes(b"")
    assert _resume(run).step == 2
    errors = capsys.readouterr().err
    for step in (3, 4, 5):
        assert f"step_{step} is corrupt" in errors
    assert _names(run) == {"step_1", "step_2", "step_3.corrupt", "step_4.corrupt", "step_5.corrupt"}
    _save(run, 3, keep_checkpoints=None)
    _flip_bit(run / "step_3" / "state.json", 10)
    assert _resume(run).step == 2
    assert "step_3.corrupt-2" in _names(run)


def test_no_whole_one_is_for_a_person_to_decide(run):
    _save(run, 1, 2)
    for step in (1, 2):
        _flip_bit(run / f"step_{step}" / "config.yaml", 0)
    for mode in ("auto", "must"):
        with pytest.raises(ValueError, match="step_2 is corrupt .* no whole one before it"):
            choose_checkpoint(run, _config(run, resume=mode))
    assert _names(run) == {"step_1", "step_2"}


def test_another_runs_checkpoints_are_left_as_they_are(run, tmp_path, capsys):
    _save(run, 1, 2)
    _flip_bit(run / "step_2" / "config.yaml", 0)
    branch = tmp_path / "branch"
    assert choose_checkpoint(branch, _config(branch, resume=str(run)))[0] == run / "step_1"
    assert "step_2 is corrupt" in capsys.readouterr().err
    assert _names(run) == {"step_1", "step_2"}
    with pytest.raises(ValueError, match="corrupt"):
        choose_checkpoint(branch, _config(branch, resume=str(run / "step_2")))


# ---------------------------------------------------------------------------------------------------- keeping


def test_the_newest_are_kept(run):
    _save(run, 1, 2, 3, 4, 5, keep_checkpoints=3)
    assert _names(run) == {"step_3", "step_4", "step_5"}
    _save(run, 6, keep_checkpoints=None)
    assert _names(run) == {"step_3", "step_4", "step_5", "step_6"}


@pytest.mark.parametrize(("name", "best"), [("eval/all/lm_loss", 2), ("eval/all/exact_accuracy", 3)])
def test_the_best_is_kept(run, name, best):
    values = {1: 0.5, 2: 0.2, 3: 0.8, 4: 0.6, 5: float("nan"), 6: 0.6}
    _save(run, *values, metrics=values, keep_checkpoints=2, keep_best=name)
    assert _names(run) == {f"step_{best}", "step_5", "step_6"}


def test_of_equally_good_ones_the_newest_is_kept_and_one_that_was_best_goes(run):
    values = {1: 0.9, 2: 0.1, 3: 0.9, 4: 0.1, 5: 0.1}
    _save(run, *values, metrics=values, keep_checkpoints=2, keep_best="eval/all/accuracy")
    assert _names(run) == {"step_3", "step_4", "step_5"}


def test_the_best_is_remembered_by_a_later_start(run):
    name, values = "eval/all/accuracy", {1: 0.9, 2: 0.1, 3: 0.2}
    _save(run, *values, metrics=values, keep_checkpoints=2, keep_best=name)
    state = _blank_state()
    with _checkpoints(run, keep_checkpoints=2, keep_best=name) as checkpoints:
        checkpoints.resume(state)
        for step in (4, 5, 6):
            state.step = step
            checkpoints.save(state)
    assert _names(run) == {"step_1", "step_5", "step_6"}


def test_an_unknown_metric_is_told(run, capsys):
    checkpoints = _checkpoints(run, keep_best="eval/all/acuracy")
    checkpoints.note_metrics(1, {"train/lm_loss": 0.5})
    assert not capsys.readouterr().err
    checkpoints.note_metrics(1, {"eval/all/accuracy": 0.5})
    assert "keep_best=eval/all/acuracy" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- killed


def _kill_at_event(number: int) -> None:
    """Kills this process before the nth thing that it does to checkpoints from now on."""
    left = number

    def count(event: str, arguments: tuple) -> None:
        nonlocal left
        is_open = event == "open" and "step_" in str(arguments[0])
        if is_open or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _kill_everywhere(folder: Path) -> list[tuple[int, int]]:
    """(newest checkpoint, how many there are) after a kill at each event of a save, until it survives."""
    base, found = folder / "base", []
    _save(base, 1, 2, keep_checkpoints=2)
    expected = {step: _tensors(_random_state(step)) for step in (2, 3)}
    state = _random_state(3)
    while True:
        run = shutil.copytree(base, folder / f"run_{len(found)}")
        pid = os.fork()
        if pid == 0:
            with _checkpoints(run, keep_checkpoints=2) as checkpoints:
                _kill_at_event(len(found) + 1)
                checkpoints.save(state)
                checkpoints._writer.wait()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        for checkpoint in checkpoints_in(run):
            verify_checkpoint(checkpoint)
        newest = step_of(newest_checkpoint(run))
        found.append((newest, len(checkpoints_in(run))))
        _assert_equal(_tensors(_resume(run, keep_checkpoints=2)), expected[newest])
        assert not list(run.glob("*.tmp-*"))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found


@pytest.mark.slow
def test_killed_at_any_instant_there_is_a_whole_newest(tmp_path):
    (found,) = run_ranks(_kill_everywhere, 1, tmp_path)
    newest = [step for step, _ in found]
    assert newest == sorted(newest), "first the one before, then the new one"
    assert newest.count(2) >= 8, "while the new one is written"
    assert newest.count(3) >= 8, "while the old one is removed"
    assert min(count for _, count in found) == 2, "never fewer than before"
    assert found[-1] == (3, 2)


def _train(folder: Path, data: Path) -> None:
    """What the program does, but in the group that there is already."""
    import pretrain

    os.chdir(folder)
    sys.argv = ["pretrain.py", *_arguments(data)]
    config = PretrainConfig.model_validate_json(pretrain.ask_for_config())
    pretrain.train(config, torch.device("cpu"), unwatched())


def _train_until_killed(folder: Path, data: Path, step: int) -> None:
    import training.step

    train_step = training.step.train_step

    def train_or_die(state, *arguments, **options):
        if state.step == step:
            while newest_checkpoint(Path("run")) is None:  # it is being written
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(state, *arguments, **options)

    training.step.train_step = train_or_die
    _train(folder, data)


def _arguments(data: Path, *more: str) -> tuple[str, ...]:
    return (f"data_path='{data}'", *OVERRIDES, "checkpoint_path=run", "checkpoint_interval=7", *more)


def _run(folder: Path, data: Path, *more: str, world_size: int = 1, status: int = 0):
    folder.mkdir(exist_ok=True)
    finished = run_program("pretrain", *_arguments(data, *more), folder=folder, world_size=world_size)
    assert finished.statuses == [status] * world_size, finished.stderr
    return finished


def _files(run: Path) -> dict[str, Any]:
    """What must not depend on interruptions: the tensors and state of the last checkpoint, and the log."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in (run / "step_32").glob("*.safetensors")}
    files["state"] = json.loads((run / "step_32" / "state.json").read_text())
    del files["state"]["config_sha256"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    left_out = {*_TIMINGS, _STALL}
    files["log"] = [{name: value for name, value in line.items() if name not in left_out} for line in lines]
    return files


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, sudoku_folder) -> dict[int, dict[str, Any]]:
    """32 steps, by number of ranks; checkpoints are written while they go on, most within an epoch."""
    files = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp("uninterrupted")
        _run(folder, sudoku_folder, "keep_checkpoints=null", world_size=world_size)
        assert _names(folder / "run") == {f"step_{step}" for step in (7, 14, 16, 21, 28, 32)}
        files[world_size] = _files(folder / "run")
    return files


def test_written_in_the_background_or_not_is_the_same(tmp_path, sudoku_folder, uninterrupted):
    _run(tmp_path, sudoku_folder, "checkpoint_async=false")
    assert _files(tmp_path / "run") == uninterrupted[1]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "world_size"), [(12, 1), (18, 2), (30, 2)])
def test_killed_and_started_again_is_the_same_run(tmp_path, sudoku_folder, uninterrupted, step, world_size):
    with pytest.raises(AssertionError, match="status -9"):
        run_ranks(_train_until_killed, world_size, tmp_path, sudoku_folder, step)
    assert step_of(newest_checkpoint(tmp_path / "run")) < step
    finished = _run(tmp_path, sudoku_folder, world_size=world_size)
    assert "going on from" in finished.stdout
    assert _files(tmp_path / "run") == uninterrupted[world_size]


@pytest.mark.slow
def test_a_damaged_newest_one_costs_only_time(tmp_path, sudoku_folder, uninterrupted):
    """On two ranks alike; then on one again, which has the same examples and noise."""
    _run(tmp_path, sudoku_folder, "max_steps=21")
    _flip_bit(tmp_path / "run" / "step_21" / "optimizer.safetensors", -5)
    finished = _run(tmp_path, sudoku_folder, "max_steps=21", world_size=2)
    assert "step_21 is corrupt" in finished.stderr
    assert f"going on from run{os.sep}step_16" in finished.stdout
    assert (tmp_path / "run" / "step_21.corrupt").is_dir()
    _run(tmp_path, sudoku_folder)
    ours = _files(tmp_path / "run")
    assert [line["step"] for line in ours["log"]] == [1, 10, 16, 20, 21, 30, 32]
    assert ours["log"][-1] == pytest.approx(uninterrupted[1]["log"][-1], rel=1e-5)


# --------------------------------------------------------------------------------------------------- failures


def _limit_files(size: int) -> None:
    """From here on no file of this process can grow beyond `size`: as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _fill_the_disk_for_a_while(run: Path, rank_with_full_disk: int) -> tuple[list[set[str]], list]:
    names, failed = [], []
    with _checkpoints(run, keep_checkpoints=2) as checkpoints:
        for step in (1, 2, 3, 4, 5):
            if rank() == rank_with_full_disk:
                _limit_files(2000 if step in (3, 4) else resource.RLIM_INFINITY)
            checkpoints.save(_random_state(step))
            checkpoints._writer.wait()
            names.append(_names(run))
            failed.append(checkpoints._writer.failure)
    return names, [*failed, checkpoints.last_save_failed]


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_ends_nothing(run, full):
    results = run_ranks(_fill_the_disk_for_a_while, 2, run, full)
    names, failed = results[0]
    assert names == [
        {"step_1"},
        {"step_1", "step_2"},
        {"step_1", "step_2"},
        {"step_1", "step_2"},
        {"step_2", "step_5"},
    ]
    assert [failure is not None for failure in failed[:5]] == [False, False, True, True, False]
    assert f"rank {full}: OSError: [Errno 27]" in failed[2]
    assert [failed[5] for _, failed in results] == [False, False]


def _train_on_a_full_disk(folder: Path, data: Path) -> int | str | None:
    if rank() == 0:
        _limit_files(20_000)
    try:
        _train(folder, data)
    except SystemExit as error:
        return error.code
    return 0


def test_the_run_ends_with_an_error_if_its_last_save_failed(tmp_path, sudoku_folder):
    """Training goes on to the end."""
    assert run_ranks(_train_on_a_full_disk, 2, tmp_path, sudoku_folder) == [1, 1]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 32
    assert not _names(tmp_path / "run")


def test_a_folder_that_is_gone_ends_nothing(run, capsys):
    with _checkpoints(run) as checkpoints:
        run.rmdir()
        run.touch()
        checkpoints.save(_random_state(1))
    assert checkpoints.last_save_failed
    assert "COULD NOT BE SAVED" in capsys.readouterr().err


def test_a_copy_for_which_there_is_no_memory_ends_nothing(run, monkeypatch, capsys):
    def fail(*_, **__):
        raise MemoryError("no memory")

    state = _random_state(1)
    monkeypatch.setattr(torch, "empty", fail)
    with _checkpoints(run) as checkpoints:
        checkpoints.save(state)
    assert checkpoints.last_save_failed
    assert "rank 0: MemoryError: no memory" in capsys.readouterr().err
    assert not list(run.iterdir())


def _lose_a_part(run: Path) -> tuple[bool, set[str]]:
    """Rank 1 never says that it has written, as if it had died, or its node had."""
    training.checkpoint_writer._PART_LIMIT = timedelta(seconds=0.3)
    if rank() == 1:
        training.checkpoint_writer._tell_rank_0 = lambda *_: None
    with _checkpoints(run) as checkpoints:
        checkpoints.save(_random_state(1))
    return checkpoints.last_save_failed, _names(run)


@pytest.mark.slow
def test_a_rank_that_is_gone_is_not_waited_for_forever(run):
    assert run_ranks(_lose_a_part, 2, run) == [(True, set())] * 2


def test_an_exception_waits_for_the_save_under_way(run):
    with contextlib.suppress(RuntimeError), _checkpoints(run) as checkpoints:
        checkpoints.save(_random_state(1))
        raise RuntimeError("evaluation fails")
    verify_checkpoint(run / "step_1")
