"""The examples of docs/extend.md as whole runs: a kind of puzzle in every program, and an optimizer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpointing.files import WEIGHTS
from checkpointing.tensors import load_joined
from dataset.files import open_split
from tests.own_files import write_plugins
from tests.ranks import REPOSITORY, complete_program
from tests.tiny import OVERRIDES, logged_rows


def _run(*words: str, folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the plugins, a dataset of jigsaw Sudokus, and a run on it."""
    folder = write_plugins(tmp_path_factory.mktemp("own")).parent
    build = ("-m", "dataset.build", "jigsaw", "--plugin", "mine/jigsaw.py")
    assert "wrote data/jigsaw" in _run(
        *build, "--output-dir", "data/jigsaw", "--generate", "300", folder=folder
    )
    words = (
        "plugins=[mine/jigsaw.py]",
        "data_path=data/jigsaw",
        "evaluators=[jigsaw]",
        "checkpoint_path=run",
    )
    complete_program("pretrain", *OVERRIDES, *words, "report=true", folder=folder, world_size=2)
    return folder


def test_a_kind_has_metrics_rules_and_variants(folder, monkeypatch):
    monkeypatch.chdir(folder)
    rows = logged_rows(folder / "run")
    assert 0 <= rows[-1]["eval/all/jigsaw/valid_accuracy"] <= 1
    from runtime.plugins import load_plugins

    load_plugins(["mine/jigsaw.py"])
    train = open_split(folder / "data" / "jigsaw", "train").sets["all"]
    inputs, labels = train.read(np.arange(16), np.arange(16))
    assert len({each.tobytes() for each in labels[:8]}) > 4, "variants of one puzzle, drawn at random"
    assert ((inputs == labels) | (inputs == 1)).all()


def test_a_kind_is_drawn_in_the_terminal_the_report_and_an_animation(folder):
    shown = _run(
        "-m", "dataset.show", "--plugin", "mine/jigsaw.py", "data/jigsaw", "--count", "1", folder=folder
    )
    assert re.search(r"^[.1-4]\|.*   [1-4]\|.*\n \+-\+ \+- +\+-\+ \+-$", shown, re.MULTILINE)
    _run("-m", "report", "--plugin", "mine/jigsaw.py", "run", folder=folder)
    assert "Jigsaw" in (folder / "run" / "report.html").read_text()
    words = ("plugins=[mine/jigsaw.py]", "checkpoint=run", "puzzle=1... ..2. .3.. ...4", "picture=answer.svg")
    answer = _run(str(REPOSITORY / "solve.py"), *words, "device=cpu", folder=folder)
    assert re.search(r"1\|\. \. \.   [1-4]\|[1-4] [1-4] [1-4]   [0-9]\|[0-9] [0-9] [0-9]", answer)
    heavy = re.search(r'<path d="([^"]+)" stroke="var\(--box\)"', (folder / "answer.svg").read_text())[1]
    assert heavy.count("h") + heavy.count("v") == 10, "the borders of regions that are no rectangles"


def test_the_kind_of_a_checkpoint_is_unknown_without_its_plugin(folder):
    complete_program("evaluate", "checkpoint=run", "device=cpu", folder=folder, world_size=1)
    words = ("checkpoint=run", "device=cpu", "evaluators=[jigsaw]")
    environment = os.environ | {"WANDB_MODE": "disabled"}
    command = [sys.executable, str(REPOSITORY / "evaluate.py"), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert "jigsaw" in done.stderr.splitlines()[-1]


def test_an_optimizer_is_the_same_on_one_process_on_shards_and_resumed(folder, sudoku_folder):
    words = (*OVERRIDES, "plugins=[mine/lion.py]", "optimizer=lion", "optimizer_options={beta2: 0.9}")
    words += ("lr=1e-4", f"data_path={sudoku_folder}", "report=false")

    def train(name: str, *more: str, world_size: int = 2) -> None:
        path = f"checkpoint_path={name}"
        complete_program("pretrain", *words, *more, path, folder=folder, world_size=world_size)

    sharded = ("data_parallel_shard_degree=-1", "sync=flat")
    train("one", world_size=1)
    train("shards", *sharded)
    one, shards = (logged_rows(folder / name)[-1]["train/lm_loss"] for name in ("one", "shards"))
    assert one == pytest.approx(shards, rel=1e-3)
    train("stopped", *sharded, "max_steps=9")
    train("stopped", *sharded)
    last = max((folder / "shards").glob("step_*"), key=lambda path: int(path.name[5:])).name
    full, resumed = (load_joined(folder / name / last, WEIGHTS) for name in ("shards", "stopped"))
    assert all(value.equal(resumed[name]) for name, value in full.items())
