"""Ranks that sleep, stop, hold the interpreter, fail, or take long with reason: who ends, saying what."""

import contextlib
import ctypes
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from distributed import watchdog as watchdog_module
from distributed.backend import process_group
from distributed.backstop import is_stopped
from distributed.collectives import barrier
from distributed.watchdog import Watchdog
from distributed.world import rank
from tests.ranks import _server
from tests.watched_ranks import SLACK, TICK, TIMEOUT, UNTIL_REPORTED, WatchedRanks, starting_ranks

pytestmark = pytest.mark.slow  # each waits for a timeout of a second or more


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., WatchedRanks]]:
    with starting_ranks(tmp_path) as start_ranks:
        yield start_ranks


def _say_so() -> None:
    time.sleep(3 * TICK)  # until a heartbeat tells of it too
    print("here", file=sys.stderr)


def _train(culprit: int, watchdog: Watchdog, *, mishap: Callable[[], None]) -> None:
    """Steps with a collective in each; something happens to a rank in step 3."""
    with process_group(torch.device("cpu")):
        for step in (1, 2, 3):
            if step == 3 and rank() == culprit:
                _say_so()
                mishap()
            barrier()
            watchdog.step_done(step)


_WAITING = (
    r"in step 3, tests/test_watchdog.py:\d+ \(_train\) > distributed/collectives.py:\d+ \(all_reduce_sum_\)"
)


def _sleep() -> None:
    time.sleep(1000)


def _train_with_a_status(path: Path, watchdog: Watchdog) -> None:
    if rank() == 0:
        watchdog.keep_record(path, on_hang=lambda: path.with_name("status").write_text("failed"))
    _train(1, watchdog, mishap=_sleep)


def test_a_rank_that_makes_no_progress_is_shown_by_all(start, tmp_path):
    ranks = start(functools.partial(_train_with_a_status, tmp_path / "heartbeat"), 3)
    reports = [ranks.report(number) for number in range(3)]
    assert len(set(reports)) == 1, "all know the same"
    assert (tmp_path / "status").read_text() == "failed"
    assert re.fullmatch(
        r"no progress on rank \d for 1.5 s \(step_timeout_seconds\)\. "
        rf"rank 1: in step 3, tests/test_watchdog.py:\d+ \(_sleep\); ranks 0, 2: {_WAITING}",
        reports[0],
    )
    logged = (ranks.folder / "logs" / "rank_2.log").read_text()
    assert logged.startswith(f"\nerror (rank 2): {reports[2]}\n")
    assert "in all_reduce_sum_" in logged
    recorded = pickle.loads((ranks.folder / "logs" / "flight_record_2").read_bytes())["entries"]
    assert recorded[-1]["profiling_name"] == "gloo:all_reduce"


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_missed_by_ranks_that_wait_in_a_collective(start):
    started = [start(functools.partial(_train, culprit, mishap=_stop), 3) for culprit in (0, 1)]
    for culprit, ranks in enumerate(started):
        others = [number for number in range(3) if number != culprit]
        for number in others:
            assert re.fullmatch(
                r"no .* for 1.5 s \(step_timeout_seconds\)\. "
                rf"rank {culprit}: not responding, in step 3, tests/.*; "
                rf"ranks {others[0]}, {others[1]}: {_WAITING}",
                ranks.report(number),
            )
        assert ranks.is_alive(culprit), "only others can end it"


def _hold_the_interpreter() -> None:
    """Waits for a lock without releasing the interpreter's; no signal ends the wait."""
    mutex = ctypes.create_string_buffer(128)  # zeros: of glibc, a mutex that nobody has locked
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def _evaluate(watchdog: Watchdog) -> None:
    watchdog.step_done(7)
    with watchdog.paused():
        _say_so()
        if rank() == 1:
            _stop()
        if rank() == 2:
            _hold_the_interpreter()
        if rank() == 3:
            raise RuntimeError("broken")
        _sleep()


def test_silent_ranks_are_missed_during_evaluation_too(start):
    ranks = start(_evaluate, 4)
    report = ranks.report(0)
    assert re.match(r"no heartbeat from rank [12] for 1.5 s \(step_timeout_seconds\)\. ", report)
    silent = r"not responding, evaluating or saving, tests/test_watchdog.py[^;]*"
    assert re.search(rf"\. (ranks 1, 2: {silent}|rank 1: {silent}; rank 2: {silent}); ", report)
    assert "rank 3: ended with RuntimeError" in report
    assert re.search(r"rank 0: evaluating or saving, tests/test_watchdog.py:\d+ \(_sleep\)", report)
    # Rank 2 has no thread of Python's that could end it.
    assert ranks.status(2) == -signal.SIGKILL
    assert re.search(
        r"(?m)^error: process \d+ ran no Python code for \d+ s\. It is killed\.", ranks.stderr(2)
    )
    assert "in _hold_the_interpreter" in ranks.stderr(2)


def _wait_for_a_rank_that_saves(watchdog: Watchdog) -> None:
    """Ranks 0 and 2 wait for rank 1; 2 can know why only from 0. Rank 3 has left."""
    watchdog.step_done(1)
    if rank() == 1:
        with watchdog.paused():
            time.sleep(UNTIL_REPORTED)
    elif rank() != 3:
        time.sleep(UNTIL_REPORTED)


def _evaluate_briefly(watchdog: Watchdog) -> None:
    watchdog.step_done(1)
    with watchdog.paused():
        time.sleep(UNTIL_REPORTED)


def test_ranks_that_save_or_wait_for_that_or_have_left_are_no_hang(start, free_port):
    """Also if rank 0 serves the store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or mpirun."""
    ranks = start(_wait_for_a_rank_that_saves, 4)
    of_mpirun = start(_evaluate_briefly, 2, port=free_port, is_served=False)
    for number in range(4):
        assert ranks.status(number) == 0, ranks.stderr(number)
        assert not ranks.stderr(number)
    assert [of_mpirun.status(number) for number in (0, 1)] == [0, 0], of_mpirun.stderr(0)


def _train_slowly(watchdog: Watchdog) -> None:
    for step in range(1, 4):
        watchdog.step_done(step)
        _say_so()
        for _ in range(2):  # time is left of this step when the process goes on
            time.sleep(TICK)


def _train_while_the_agent_is_stopped(agent: int, watchdog: Watchdog) -> None:
    os.getppid = lambda: agent
    with watchdog.paused():
        _say_so()
        time.sleep(4 * TIMEOUT)
    watchdog.step_done(1)


def test_ranks_go_on_if_all_of_them_or_only_torchrun_was_stopped_for_a_while(start, serve_store):
    """A scheduler suspends a whole job, for longer than any limit.

    Ctrl-Z in a terminal stops torchrun, but not the ranks, which have sessions of their own.
    """
    ranks = start(_train_slowly, 2)
    ranks.wait_until_all_say("here")
    ranks.send(signal.SIGSTOP)
    end = time.monotonic() + 1.3 * (TIMEOUT + watchdog_module._BACKSTOP_TICKS * TICK)
    agent, port = serve_store()
    of_agent = start(functools.partial(_train_while_the_agent_is_stopped, agent), 2, port=port)
    of_agent.wait_until_all_say("here")
    os.kill(agent, signal.SIGSTOP)
    of_agent.wait_until_all_say("is suspended")
    time.sleep(2 * TIMEOUT)
    os.kill(agent, signal.SIGCONT)
    time.sleep(max(0, end - time.monotonic()))
    ranks.send(signal.SIGCONT)
    for each in (of_agent, ranks):
        assert [each.status(number) for number in (0, 1)] == [0, 0], each.stderr(0)
    assert of_agent.stderr(0).count(f"torchrun (process {agent}) is suspended") == 1


def _serve_store(sender: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    _sleep()


def _evaluate_for_long(watchdog: Watchdog) -> None:
    with watchdog.paused():
        _say_so()
        _sleep()


@pytest.fixture
def serve_store() -> Iterator[Callable[[], tuple[int, int]]]:
    """Starts a process that serves a store. Returns its process id and the port of the store."""
    servers = []

    def serve() -> tuple[int, int]:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        servers.append(_server.Process(target=_serve_store, args=(sender,)))
        servers[-1].start()
        return servers[-1].pid, receiver.recv()

    yield serve
    for server in servers:
        server.kill()
        server.join()


def test_a_store_that_does_not_answer_any_more(start, serve_store):
    """No call to a store returns whose process is stopped; of a killed one every call is an error."""
    started = []
    for mishap in (signal.SIGSTOP, signal.SIGKILL):
        process, port = serve_store()
        started.append(start(_evaluate_for_long, 2, port=port))
        started[-1].wait_until_all_say("here")
        os.kill(process, mishap)
    for ranks, number in itertools.product(started, (0, 1)):
        assert re.fullmatch(
            r"the key-value store on rank 0's node did not respond for 1.5 s \(step_timeout_seconds\)\. "
            r"Rank 0 or its node has .*\. "
            rf"rank {number}: evaluating or saving, tests/test_watchdog.py:\d+ \(_sleep\)",
            ranks.report(number),
        )


def _break_the_watchdog(watchdog: Watchdog) -> None:
    watchdog.step_done(1)
    if rank() == 1:
        watchdog_module._location = None
    time.sleep(UNTIL_REPORTED if rank() == 1 else SLACK)  # the watchdog ends rank 0 before that


def test_a_mistake_of_the_watchdog_is_told_and_ends_nothing(start):
    """Rank 0 makes no progress for too long, but must not miss rank 1."""
    ranks = start(_break_the_watchdog, 2)
    assert "rank 1: no longer watched" in ranks.report(0)
    assert ranks.status(1) == 0, ranks.stderr(1)
    assert ranks.stderr(1).count("TypeError") == 1
    assert "warning (rank 1): the watchdog failed" in ranks.stderr(1)


def _train_until_rank_1_is_killed(path: Path, watchdog: Watchdog) -> None:
    if rank() == 0:
        watchdog.keep_record(path)
        watchdog.step_done(1)
        assert json.loads(path.read_text())["step"] == 1  # at once: a machine may be lost before any tick
    _train(1, watchdog, mishap=lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_failure_is_remembered_until_the_first_step_of_the_next_start(start, tmp_path, monkeypatch, capsys):
    """In a file, which outlives all processes and their store; a run that ends well leaves none."""
    record = tmp_path / "heartbeat"
    ranks = start(functools.partial(_train_until_rank_1_is_killed, record), 2)
    assert [ranks.status(1), ranks.status(0)] == [-signal.SIGKILL, 1]
    remembered = json.loads(record.read_text())
    assert remembered["step"] == 2
    assert time.time() - remembered["time"] < SLACK

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    record.write_text(json.dumps({"time": time.time() - 60, "step": 9}))
    with contextlib.suppress(KeyError), Watchdog(init_timeout_seconds=1, step_timeout_seconds=1) as watchdog:
        watchdog.keep_record(record)
        raise KeyError("before the first step")  # the failure before counts
    with Watchdog(init_timeout_seconds=1, step_timeout_seconds=1) as watchdog:
        watchdog.keep_record(record)
        assert watchdog.pop_recovery() == {}
        watchdog.step_done(7)
        assert "3 steps done again" in capsys.readouterr().out
        assert not record.exists()
        assert watchdog.pop_recovery()["recovery_seconds"] == pytest.approx(60, abs=SLACK)
        assert watchdog.pop_recovery() == {}


def test_a_world_of_one_is_not_watched(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(watchdog_module.threading, "Thread", None)
    with Watchdog(init_timeout_seconds=0.01, step_timeout_seconds=0.01) as watchdog:
        watchdog.step_done(1)
        with watchdog.paused():
            watchdog.step_done(2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these names of processes")
def test_a_process_of_any_name_is_seen_to_run():
    """Linux cuts a name after 15 bytes, even in the middle of a letter."""
    libc, name = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    libc.prctl(16, name)  # PR_GET_NAME
    libc.prctl(15, b"\xd0\xbf\xd0")  # PR_SET_NAME
    try:
        assert not is_stopped(os.getpid())
    finally:
        libc.prctl(15, name)
