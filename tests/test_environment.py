"""What every program sets before torch loads, and how many cores it may use."""

from runtime.environment import num_cores

import ast
import os
import signal
import sys
import types

import pytest

from runtime import environment
from tests.ranks import REPOSITORY, run_code

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    "program",
    [
        *("pretrain.py", "evaluate.py", "solve.py", "search.py", "share/__main__.py", "report/__main__.py"),
        *("records/__main__.py", "records/comparison.py", "report/dashboard.py"),
    ],
)
def test_it_is_the_first_import_of_every_program(program):
    tree = ast.parse((REPOSITORY / program).read_text())
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    others = [each for each in imports if each.split()[1].partition(".")[0] not in sys.stdlib_module_names]
    assert others[0] == "import runtime.environment"


def test_a_working_folder_that_was_removed_is_one_line(tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r}); os.rmdir(os.getcwd()); import runtime.environment"
    run = run_code(code)
    line = "error: the working folder does not exist (No such file or directory). Change to another folder, "
    assert (run.returncode, run.stdout, run.stderr) == (1, "", line + "and start again.\n")


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_what_a_stream_cannot_encode_is_an_escape(environment):
    run = run_code(r"import runtime.environment; print('\u03b1 \udcc3')", **environment)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\\u03b1 \\udcc3\n", "")


@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("solve.py", None, "solve: loading PyTorch\n"),
        ("report/__main__.py", "0", "report: loading PyTorch\n"),
        ("pretrain.py", "1", ""),
        ("tests/own_tasks.py", None, ""),
        ("../other/solve.py", None, ""),
        (None, None, ""),
    ],
)
def test_a_program_prints_a_line_on_stderr_before_torch_loads(monkeypatch, capsys, path, rank, expected):
    monkeypatch.chdir(REPOSITORY / "docs")  # a notebook may run there
    main = types.SimpleNamespace(__file__=None if path is None else str(REPOSITORY / path))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    environment._announce()
    assert capsys.readouterr() == ("", expected)


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("solve.py", "0", ["interrupted"]),
        ("dataset/build/__main__.py", "0", ["interrupted"]),
        ("pretrain.py", "1", []),
        ("../mine.py", "0", ["Traceback (most recent call last):", "KeyboardInterrupt"]),
    ],
)
def test_a_program_that_ctrl_c_ends_prints_one_line(path, rank, expected):
    code = (
        f"import dataset, signal; __file__ = {str(REPOSITORY / path)!r}; signal.raise_signal(signal.SIGINT)"
    )
    run = run_code(code, RANK=rank)
    assert [line for line in run.stderr.splitlines() if not line.startswith(" ")] == expected
    assert (run.returncode, run.stdout) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "10000 1"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None None"), ({"GOMP_SPINCOUNT": "7"}, "7 None")],
)
def test_threads_that_wait_go_to_sleep_unless_the_user_has_said_how(chosen, expected):
    code = "import runtime.environment, os; print(*map(os.environ.get, ('GOMP_SPINCOUNT', 'KMP_BLOCKTIME')))"
    shown = run_code(code, **chosen)
    assert shown.stdout.strip() == expected, shown.stderr


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/job/step\n", {"job/cpu.max": "100000 100000\n", "job/step/cpu.max": "max 100000\n"}, 1),
        ("0::/job\n", {"job/cpu.max": "50000 100000\n"}, 1),
        ("0::/job\n", {"job/cpu.max": "9900000000 100000\n"}, _CORES),
        ("0::/elsewhere\n", {"cpu.max": "150000 100000\n"}, 1),  # a container sees its own group as the root
        ("3:cpu,cpuacct:/a\n2:memory:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n"}, 1),
        ("3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n"}, _CORES),
        ("0::/job\n", {"job/cpu.max": "what\n"}, _CORES),
        ("0::/job\n", {}, _CORES),
        (None, {}, _CORES),
    ],
)
def test_quotas_of_control_groups_count(tmp_path, own, files, expected):
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith("quota_us"):
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert num_cores(tmp_path / "groups", tmp_path / "own") == expected
