"""A stage of a pipeline that dies or hangs, under a real torchrun: all end, and say which one or where."""

import os
import re
import signal

from distributed.watchdog import EXIT_HANG
from tests.test_recovery import Launch

_WORDS = ("pipeline_parallel_degree=2", "arch.H_layers=2", "arch.L_layers=2", "arch.q_target=exact")
_WORDS += ("epochs=900", "eval_interval=900", "log_interval=1", "compile=false", "step_timeout_seconds=5")


def _lose_rank_2(run: Launch, mishap: signal.Signals) -> str:
    """Returns what a run on 4 ranks has said when all have ended."""
    run.wait_for(lambda: run.step >= 5, what="the run does not start")
    workers = run.workers()
    os.kill(workers[2], mishap)
    run.wait_for(lambda: run.process.poll() is not None, what="the run does not end")
    assert run.process.returncode == 1
    assert not any(os.path.exists(f"/proc/{worker}") for worker in workers.values())
    return run.output


def test_who_miss_a_stage_that_dies_say_where_they_are(tmp_path, sudoku_folder):
    with Launch(tmp_path, sudoku_folder, *_WORDS, num_ranks=4) as run:
        output = _lose_rank_2(run, signal.SIGKILL)
    told = re.findall(r"^error( \(.*\))?: lost the connection to another rank \(", output, re.MULTILINE)
    assert told
    assert set(told) <= {"", " (rank 1 (stage 0, replica 1))", " (rank 3 (stage 1, replica 1))"}, output
    assert re.search(r"rank      : 2 .*\n.*SIGKILL", output), "so torchrun says"


def test_a_stage_that_hangs_is_named(tmp_path, sudoku_folder):
    with Launch(tmp_path, sudoku_folder, *_WORDS, num_ranks=4) as run:
        output = _lose_rank_2(run, signal.SIGSTOP)
    told = re.search(
        r"^error \(rank \d \(stage \d, replica \d\)\): no (?:progress on|heartbeat from) rank \d for 5 s "
        r"\(step_timeout_seconds\)\. rank 2 \(stage 1, replica 0\): not responding, .*",
        output,
        re.MULTILINE,
    )
    assert told, output
    assert f"(exitcode: {EXIT_HANG})" in output
    (last,) = re.findall(
        r"^  traceback : error \(rank \d \(stage \d, replica \d\)\): .*\n=+$", output, re.MULTILINE
    )
    assert "rank 2 (stage 1, replica 0): not responding" in last, "what torchrun prints last is ours"
