"""Asked to stop by a signal, all ranks stop after one and the same step, saved."""

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.signals import SIGNALS, Interruption, stop_signals
from distributed.world import rank
from tests.ranks import REPOSITORY, call_each, complete_program, run_ranks, send_signal, start_program
from tests.tiny import OVERRIDES, logged_rows
from tests.waiting import read, wait_for


def _ask_after_a_signal(number: int) -> list[bool]:
    _handle_signals_as_a_new_process()
    answers = []
    with Interruption() as interruption:
        for step in range(4):
            if step == 2 and rank() == 1:
                os.kill(os.getpid(), number)
            answers.append(interruption.all_reduce_request())
    return answers


def _handle_signals_as_a_new_process() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def test_all_ranks_agree():
    found = run_ranks(call_each, 3, _ask_after_a_signal, [(number,) for number in SIGNALS])
    assert found == [[[False, False, True, True]] * len(SIGNALS)] * 3


def test_afterwards_signals_are_what_they_were():
    before = [signal.getsignal(number) for number in stop_signals()]
    with Interruption():
        assert [signal.getsignal(number) for number in stop_signals()] != before
    assert [signal.getsignal(number) for number in stop_signals()] == before
    assert signal.set_wakeup_fd(-1) == -1


def _signal_at_the_end(ends_by_error: bool) -> bool:
    _handle_signals_as_a_new_process()
    with contextlib.suppress(RuntimeError), Interruption() as interruption:
        if ends_by_error:
            raise RuntimeError
        interruption.record_requests(torch.tensor(1))
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def test_once_all_stop_or_this_rank_fails_a_late_signal_ends_nothing():
    """torchrun sends one to each rank when it starts all again, also to those that know it from others."""
    assert run_ranks(call_each, 2, _signal_at_the_end, [(False,), (True,)]) == [[True, True]] * 2


@pytest.mark.slow
def test_a_step_without_end_is_ended_but_a_save_or_an_evaluation_only_by_two_signals(tmp_path):
    processes = []
    for is_paused, count in ((True, 1), (True, 2), (False, 1)):
        lines = ["import os, signal, time", "from distributed import signals", "signals._GRACE_SECONDS = 0.1"]
        lines += [f"with signals.Interruption(lambda: {is_paused}):"]
        lines += [" os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1)"] * count
        name = f"{is_paused}_{count}"
        (tmp_path / f"{name}.py").write_text("\n".join([*lines, " time.sleep(3)"]))
        processes.append(start_program(str(tmp_path / name), folder=tmp_path))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 125, 125]


def _train(data: Path, run: Path, **options: Any) -> None:
    words = (f"data_path={data}", *OVERRIDES, "epochs=2", "eval_interval=1", f"checkpoint_path={run}")
    words += ("arch.halt_exploration_prob=0.1", "sanity_check=false")
    complete_program("pretrain", *words, folder=run.parent, world_size=2, **options)


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_from_that_step(tmp_path, sudoku_folder):
    """Rank 1 gets a signal in a step, in the evaluation after a step, and in the last evaluation."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    stops = (
        (signal.SIGTERM, "training.step", "train_step", 5, 5),
        (signal.SIGUSR1, "training.evaluation", "evaluate_split", 1, 8),
        (signal.SIGINT, "training.evaluation", "evaluate_split", 2, 16),  # the first one is after step 8
    )
    for count, (number, module, name, call, step) in enumerate(stops, 1):
        _train(sudoku_folder, run, spoil=functools.partial(send_signal, number, module, name, call))
        for each in range(2):
            log = (run / "logs" / f"rank_{each}.log").read_text()
            assert f"is at training step {step} of 16" in log
            assert log.count(f"To continue, run the same command with checkpoint_path={run}.") == count
        assert json.loads((run / "status").read_text()) == {"status": "stopped", "step": step}
        assert max(int(path.name[5:]) for path in run.glob("step_*")) == step
    for path in (run, whole):
        _train(sudoku_folder, path)
    assert json.loads((run / "status").read_text()) == {"status": "finished", "step": 16}
    ours, theirs = (path / "step_16" / "weights.safetensors" for path in (run, whole))
    assert ours.read_bytes() == theirs.read_bytes()
    assert logged_rows(run) == logged_rows(whole)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("signals", "is_ignored"), [("SIGTERM,SIGINT", True), ("SIGTERM,SIGHUP", False)])
def test_torchrun_under_nohup(tmp_path, sudoku_folder, signals, is_ignored):
    """torchrun handles a signal of its option also under nohup. The traceback at its end is announced."""
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "epochs=100000", "eval_interval=100000")
    words += ("checkpoint_path=run", "log_interval=1", "wandb_mode=disabled", "compile=false")
    options = ("--standalone", "--nproc-per-node=2", f"--signals-to-handle={signals}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, REPOSITORY / "pretrain.py", *words]
    with (tmp_path / "output.txt").open("w") as file:
        process = subprocess.Popen(
            ["nohup", *torchrun], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    rows = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: read(rows), "no row", output=tmp_path / "output.txt")
        process.send_signal(signal.SIGHUP)
        if is_ignored:
            count = len(read(rows).splitlines())
            wait_for(lambda: len(read(rows).splitlines()) > count + 20, "it has stopped")
            process.terminate()
        assert process.wait(120) == 1
    finally:
        process.kill()
    assert json.loads(read(tmp_path / "run" / "status"))["status"] == "stopped"
    before, announced, after = read(tmp_path / "output.txt").partition("If torchrun received the signal, ")
    assert "To continue, run the same command with checkpoint_path=run." in before
    assert "Traceback" not in before
    first, traceback, last = after.partition("\nTraceback ")
    assert first == "it ends with a traceback (SignalException). It is not an error."
    assert "SignalException: Process " in last.splitlines()[-1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_is_closed_stops_a_run_unless_it_is_under_nohup(tmp_path, sudoku_folder, is_ignored):
    """The end is saved, though nothing can be written any more to where stdout and stderr lead."""

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if is_ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    ours, its = os.openpty()
    last = "max_steps=40" if is_ignored else "max_steps=100000"
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "epochs=100000", "eval_interval=100000", last)
    words += ("checkpoint_path=run", "log_interval=1", "wandb_mode=disabled", "compile=false")
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / "pretrain.py", *words],
        **{"cwd": tmp_path, "stdin": its, "stdout": its, "stderr": its},
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(its)
    rows = tmp_path / "run" / "metrics.jsonl"
    try:
        while not (rows.exists() and rows.stat().st_size):
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 4096)  # or the terminal would be full
            assert process.poll() is None
        os.close(ours)
        assert process.wait(120) == 0
    finally:
        process.kill()
    status = json.loads((tmp_path / "run" / "status").read_text())
    assert status["status"] == ("max_steps" if is_ignored else "stopped")
    assert (status["step"] == 40) == is_ignored
    assert (tmp_path / "run" / f"step_{status['step']}").is_dir()
