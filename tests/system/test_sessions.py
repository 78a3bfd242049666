"""Python sessions that train: what a run does when its session ends, and the notebook from first to last."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from runtime.reading import read_json
from tests.ranks import REPOSITORY
from tests.stress.processes import kill_all_with
from tests.tiny import OVERRIDES
from tests.waiting import PATIENCE, wait_for

_CELL_SECONDS = 600  # of a cell, on a busy machine; alone each takes less than two minutes


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_saves_and_ends_when_its_session_does(tmp_path, sudoku_folder, number):
    """By the stop button of a notebook, or because its kernel is killed."""
    words = [f"data_path={sudoku_folder}", *OVERRIDES, "epochs=100000", "eval_interval=100000"]
    path = f"checkpoint_path={tmp_path / 'run'}"
    code = "import pretrain, sys; pretrain.run(sys.argv[1:])"
    session = subprocess.Popen(
        [sys.executable, "-c", code, *words, path, "log_interval=1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: (log.exists() and log.stat().st_size > 0) or session.poll() is not None, "no row")
        session.send_signal(number)
        said, errors = session.communicate(timeout=PATIENCE)
        assert session.returncode == -number, errors
        wait_for(lambda: read_json(log.with_name("status"))["status"] == "stopped", "the run goes on")
    finally:
        session.kill()
        kill_all_with(path)
    if number == signal.SIGINT:
        assert "To continue, run the same command with checkpoint_path=" in said
        assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    """In a copy of the repository, as one that a person has cloned."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "records/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tmp_path / name)
    notebook = nbformat.read(tmp_path / "docs" / "quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "outputs are not for git"
    resources = {"metadata": {"path": str(tmp_path / "docs")}}
    nbclient.NotebookClient(notebook, timeout=_CELL_SECONDS, resources=resources).execute()
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    said = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream") for cell in cells
    ]
    assert "valid: True" in said[2]
    assert re.search(r"^(9\d\.\d|100\.0)% of the test puzzles are solved$", said[3], re.MULTILINE)
    assert "solved 1.000" in said[7]
    assert "\r" not in "".join(said)
    drawn = [[key for output in cell.outputs for key in output.get("data", ())] for cell in cells]
    assert all("text/html" in drawn[number] for number in (2, 5, 8))
    assert all("image/png" in drawn[number] for number in (4, 7, 9))
