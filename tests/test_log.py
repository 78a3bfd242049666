"""What reaches the console and the files of the ranks, and what is said of a child that has failed."""

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from distributed import log
from distributed.child import why_it_failed
from distributed.errors import connection_errors
from distributed.world import rank
from tests.ranks import REPOSITORY, Finished, run_code, run_program, run_ranks
from tests.tiny import OVERRIDES

_IMPORTS = """
import faulthandler, logging, os, subprocess, sys, warnings
from pathlib import Path
from distributed import log
"""


def _run(code: str, folder: Path, **environment: str) -> Finished:
    """Runs Python code in a process of its own, in `folder`."""
    (folder / "code.py").write_text(_IMPORTS + code)
    return run_program(str(folder / "code"), folder=folder, **environment)


def _levels(text: str) -> list[str]:
    """The rank and level of each message of a file; AssertionError where one has no time."""
    pattern = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (rank \d+ \w+) "
    assert re.match(pattern, text)
    return re.findall(pattern, text, flags=re.MULTILINE)


def test_a_world_of_one(capsys):
    for _ in range(2):
        log.info("all is well\n  100 % done")
        log.warning("careful,\n  with 100 %")
        log.error(ValueError("this\n  is wrong"))
    shown = capsys.readouterr()
    assert shown.out == "all is well\n  100 % done\n" * 2
    assert shown.err == "warning: careful, with 100 %\nerror: this is wrong\nerror: this is wrong\n"


def _speak(folder: Path) -> tuple[str, str]:
    """Says and warns on each rank, and lets libraries warn, twice; returns what the console got."""
    import torch  # noqa: F401, brings the loggers that keep their records to themselves

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        log.capture_library_warnings()
        log.open_rank_file(folder)
        for _ in range(2):
            log.info("a step")
            log.warning(f"from {rank() * 10}")
            logging.getLogger("torch.distributed").warning("from torch's own logger")
            logging.getLogger("torch._dynamo.somewhere").warning("from a child of one")
            logging.getLogger("some.library").warning("from a\n  library, %d %%", 5)
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("from Python's warnings", stacklevel=1)
    return out.getvalue(), err.getvalue()


def test_warnings_of_every_rank_and_library(tmp_path):
    consoles = run_ranks(_speak, 2, tmp_path)
    assert [out for out, _ in consoles] == ["a step\na step\n", ""]
    for number, (_, err) in enumerate(consoles):
        *lines, of_python = err.splitlines()
        texts = (f"from {number * 10}", "from torch's own logger", "from a child of one")
        expected = [f"warning (rank {number}): {text}" for text in (*texts, "from a library, 5 %")]
        assert lines == expected
        assert of_python.startswith(f"warning (rank {number}): ")
        assert "UserWarning: from Python's warnings" in of_python

        text = (tmp_path / "logs" / f"rank_{number}.log").read_text()
        once = [f"rank {number} INFO", *[f"rank {number} WARNING"] * 5]
        assert _levels(text) == once * 2
        assert text.count("from torch's own logger") == text.count("INFO run: a step") == 2


def test_what_libraries_print(tmp_path):
    """Below a warning it stays their own; warnings that are errors."""
    code = """
library = logging.getLogger("library")
library.propagate, library.level = False, logging.DEBUG
library.addHandler(logging.StreamHandler())
library.handlers[0].setFormatter(logging.Formatter("LIBRARY %(message)s"))
log.capture_library_warnings()
library.debug("asked for")
library.warning("once")
try:
    1 / 0
except ZeroDivisionError:
    library.exception("failed")
warnings.simplefilter("error")
warnings.warn("careful")
"""
    run = _run(code, tmp_path)
    assert run.stdout == ""
    failed = "error: failed (ZeroDivisionError: division by zero)"
    assert run.stderr.splitlines()[:3] == ["LIBRARY asked for", "warning: once", failed]
    assert run.stderr.endswith("UserWarning: careful\n")
    assert run.statuses == [1]


@pytest.mark.slow
def test_the_exception_that_ends_a_rank_is_in_its_file(tmp_path):
    before = "2026-01-01 00:00:00,000 rank 1 INFO run: an earlier start\n"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text(before)
    # One interpreter, because the import of torch takes seconds. `run_program` would not call sys.excepthook.
    code = f"""{_IMPORTS}
os.chdir({str(tmp_path)!r})
raised = KeyError("deep")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Python 3.12 warns if a process with threads forks
    child = os.fork()
if child == 0:
    os.environ["RANK"], raised = "0", KeyboardInterrupt()
    os.dup2(os.open("stderr_0", os.O_WRONLY | os.O_CREAT), 2)
else:
    os.waitpid(child, 0)
def dive(): raise raised
log.open_rank_file(Path()); log.info("first"); dive()
"""
    run = run_code(code, RANK="1", WORLD_SIZE="2")
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1
    assert "KeyError: 'deep'" in run.stderr
    assert "warning" not in run.stderr
    text = (tmp_path / "logs" / "rank_1.log").read_text()
    assert text.startswith(before), "a restarted run appends"
    assert _levels(text) == ["rank 1 INFO", "rank 1 INFO", "rank 1 ERROR"]
    assert text.count("in dive\n") == text.count("\nKeyError: 'deep'\n") == 1
    assert (tmp_path / "stderr_0").read_text() == "interrupted\n"
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("\nKeyboardInterrupt\n") == 1


@pytest.mark.parametrize("is_full_disk", [False, True])
def test_a_file_that_cannot_be_written_is_one_warning(tmp_path, is_full_disk):
    if not is_full_disk:
        (tmp_path / "logs").touch()
    elif not os.path.exists("/dev/full"):
        pytest.skip("/dev/full plays the full disk")
    else:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rank_0.log").symlink_to("/dev/full")
    run = _run("log.open_rank_file(Path()); log.info('on'); log.info('and on'); log.warning('on')", tmp_path)
    assert (run.statuses, run.stdout) == ([0], "on\nand on\n")
    first, second = run.stderr.splitlines()
    assert first.startswith("warning: cannot write logs/rank_0.log (")
    assert second == "warning: on"


def test_forked_processes_and_faulthandler_write_into_the_same_file(tmp_path):
    code = """
log.open_rank_file(Path())
log.info("before")
if os.fork() == 0:
    log.info("the child")
    os._exit(0)
os.wait()
print("the watchdog", file=log.rank_file())
faulthandler.dump_traceback(file=log.rank_file())
log.warning("after, \\udcff")
"""
    run = _run(code, tmp_path)
    assert run.statuses == [0], run.stderr
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    parts = ("before", "the child", "the watchdog", "most recent call first", 'code.py"', "after, \\udcff")
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)
    assert text.count("before") == 1


def test_a_warning_has_its_line_beside_a_progress_bar(tmp_path):
    code = """
from tqdm import tqdm
with tqdm(total=10) as bar:
    bar.update()
    log.warning("careful")
    log.info("fine")
    bar.update()
"""
    run = _run(code, tmp_path)
    assert "warning: careful" in run.stderr.splitlines()
    assert run.stdout == "fine\n"
    assert "2/10" in run.stderr.splitlines()[-1], "the bar is drawn again below"


def test_without_a_terminal_progress_is_plain_lines_in_the_file_too(tmp_path):
    code = """
from pathlib import Path
from distributed.progress import Progress
log.open_rank_file(Path.cwd())
with Progress(desc="evaluating", total=3, unit="batches", shown=lambda: "accuracy 0.5") as bar:
    bar.mininterval = 0
    for number in (0, 1, 1, 1):
        bar.update(number)
"""
    run = _run(code, tmp_path)
    lines = run.stderr.splitlines()
    expected = [f"evaluating: {number} of 3 batches" for number in range(3)]
    assert [line.partition(" in ")[0] for line in lines[:3]] == expected
    assert all(line.endswith("accuracy 0.5") for line in lines)
    in_file = (tmp_path / "logs" / "rank_0.log").read_text().count("batches in")
    assert (run.stdout, len(lines)) == ("", in_file)


@pytest.mark.parametrize("kind", ["info", "warning"])
def test_a_reader_that_leaves_ends_nothing(tmp_path, kind):
    """As with `evaluate.py | head`: the program goes on, and its exit status is its own."""
    code = f"""
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, sys.{"stdout" if kind == "info" else "stderr"}.fileno())
for number in range(3):
    log.{kind}(str(number))
raise SystemExit(7)
"""
    assert _run(code, tmp_path) == Finished([7], "", "")


@pytest.mark.long
@pytest.mark.slow
def test_programs_do_without_standard_streams(tmp_path):
    """And with PYTHONSAFEPATH, by which Python leaves the folder of a program out of where it looks."""
    build = f"-m dataset.build sudoku --generate 40 --box 2x2 --output-dir {tmp_path}/data"
    words = (f"data_path={tmp_path}/data", "max_steps=1", f"checkpoint_path={tmp_path}/run", *OVERRIDES)
    train = shlex.join([str(REPOSITORY / "pretrain.py"), *words, "wandb_mode=disabled", "compile=false"])
    none = "<&- >&- 2>&-"
    for command, closed in ((build, none), (build, "| true"), (train, none)):
        line = f"set -o pipefail; {shlex.quote(sys.executable)} {command} {closed}"
        environment = os.environ | ({"PYTHONSAFEPATH": "1"} if command == train else {})
        options = {"env": environment, "cwd": REPOSITORY, "stderr": subprocess.PIPE, "text": True}
        ended = subprocess.run(["bash", "-c", line], **options)
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr
        assert "Exception" not in ended.stderr
    assert (tmp_path / "run" / "step_1" / "weights.safetensors").is_file()


def test_torchrun_shows_the_process_that_left_a_reason(tmp_path, monkeypatch):
    """torchrun shows the earliest failure. A process without a reason ended at int(time.time()) for it."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr("time.time", lambda: 1700000000.9)
    log.leave_last_words("error: lr is wrong")
    files = (path, tmp_path / "no")
    failures = {rank: ProcessFailure(rank, 1, 1, str(file)) for rank, file in enumerate(files)}
    assert "lr is wrong" in str(ChildFailedError("worker", failures).get_first_failure()[1].message)

    # Rank 1 was killed, and torchrun sees it in the next second.
    path.unlink()
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:1. Check the logs.")
    with pytest.raises(SystemExit), connection_errors(lambda: False):
        raise error
    monkeypatch.setattr("time.time", lambda: 1700000001.0)
    failures = {rank: ProcessFailure(rank, 1, -9, str(file)) for rank, file in enumerate(files)}
    assert ChildFailedError("worker", failures).get_first_failure()[0] == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("step 1\nerror: lr is too high\nerror (rank 1): another rank has ended\n", "lr is too high"),
        ("error (rank 3 (shard 1)): no data\n======\nRoot cause\n======\n", "no data"),
        ("python -m dataset.build sudoku: error: no such file\n", "no such file"),
        ("error_file: <none>\nstep 12\n------\n\n", "ended with status -9: step 12"),
        ("", "ended with status -9: no output"),
    ],
)
def test_the_first_error_or_how_it_ended_is_told(said, expected):
    assert why_it_failed(said, -9) == expected
