"""Writes the report of a run: a self-contained HTML file with results, charts and solved puzzles."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.finding import Checkpoint
from dataset.drawing import SCRIPTS, THEME
from dataset.metadata import Dataset
from distributed import log
from distributed.world import is_main
from models import HaltingModel
from report.compute import compute_picture
from report.page_content import page_values
from report.run import read_run
from report.trace import TracedPuzzles, trace_of_run, trace_puzzles
from runtime.plugins import is_imported, paths_in, words_to_add
from runtime.writing import write_text
from training.run_folder import REPORT_FILE

NUM_PUZZLES = 400  # test puzzles to run the model on

_HERE = Path(__file__).parent


def write_report(
    folder: Path,
    *,
    output: Path | None = None,
    data: Sequence[Path] | None = None,
    num_puzzles: int = NUM_PUZZLES,
    traced: TracedPuzzles | None = None,
    evaluation: Path | None = None,
    device: torch.device | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Path:
    """Writes the report of a run as an HTML file, and returns its path.

    If `data` is None and the run's checkpoint or data are missing, the report has no solved puzzles. A note
    in the report says why.

    Args:
        folder: Run folder.
        output: File to write. If None, report.html in the run folder.
        data: Dataset folders to take the shown test puzzles from. If None, the data of the run.
        num_puzzles: Maximum number of test puzzles that the model solves, rounded up to a multiple of the
            number of test sets. A search model (LDT) or large puzzles may use fewer. If 0, the model does not
            run.
        traced: Test puzzles and the answers of the model to them. If given, `data` and `num_puzzles` have no
            effect.
        evaluation: Folder of the evaluation to report. If None, the newest one with default options, from
            evaluate.py or from the log of the run.
        device: Device of the model. If None, a GPU if there is one.
        warn: Function that is called with the text of each warning.

    Raises:
        ValueError: The folder does not exist, matplotlib is missing, or the page cannot be written. Without
            `evaluation`: the folder has no run. With `data`: the checkpoint or the data are missing, the
            model was trained on another vocabulary or another puzzle size, or it has no embedding for any
            puzzle.
    """
    check_packages()
    run = read_run(folder, evaluation=evaluation)
    path = output or folder / REPORT_FILE
    check_output(path)
    missing = []
    if traced is None and num_puzzles:
        try:
            traced = trace_of_run(folder, data=data, num_puzzles=num_puzzles, device=device)
        except ValueError as error:
            if data is not None:  # the caller asked for this data
                raise
            missing.append(f"This report has no solved puzzles and no halting steps: {error}")
    others = [path for path in paths_in(run.config) if not is_imported(path)]
    if others and traced is not None and traced.info.kind is None:
        plugins = f"If a plugin of the run defines it, and you trust the plugin, add {words_to_add(others)}."
        missing.append(f"The kind of the puzzles is unknown, so tokens are shown as numbers. {plugins}")
    notes = [*run.warnings, *missing]
    for text in notes:
        warn(text)
    write_page(path, render("run.html.jinja", notes=notes, **page_values(run, traced)))
    return path


def report_run(folder: Path, device: torch.device) -> None:
    """On rank 0, writes the report of a finished training into its run folder.

    An error is logged as a warning. On other ranks, does nothing. device: Device of this rank.
    """
    if is_main():
        try:
            log.info(f"wrote {write_report(folder, device=device, warn=log.warning)}")
        except Exception as error:  # The training is complete: do not fail the run.
            log.warning(f"report not written: {error}")


def write_evaluation_report(
    checkpoint: Checkpoint,
    model: HaltingModel,
    data: Dataset,
    evaluation: Path,
    *,
    seed: int,
    batch_size: int,
    puzzles: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes report.html into the run folder of a checkpoint. Only rank 0 calls it.

    The page shows the results of an evaluation, and solved puzzles. The function runs the model on about 400
    test puzzles (NUM_PUZZLES). With large puzzles or a search model (LDT), it uses fewer.

    checkpoint: Checkpoint that the model was loaded from.
    data: Dataset with the test puzzles.
    evaluation: Folder with the results of the evaluation to show.
    seed: Seed of the random noise of the model.
    batch_size: Number of puzzles that the model solves at a time.
    puzzles: {test set: indices of the puzzles to choose from, int64 [n]}. If None, all puzzles.
    """
    options = {"batch_size": batch_size, "path": checkpoint.path, "seed": seed, "puzzles": puzzles}
    traced = trace_puzzles(model.eval(), data, num_puzzles=NUM_PUZZLES, **options)
    path = write_report(checkpoint.run_folder, traced=traced, evaluation=evaluation, warn=log.warning)
    log.info(f"wrote {path}")


def write_picture(path: Path, scaling: Mapping[str, Any]) -> None:
    """Writes an SVG chart of accuracy over the number of network calls (thinking steps) per puzzle.

    If matplotlib is missing, only logs a warning. If `scaling` has no test sets, does nothing.

    scaling: Content of scaling.json, a result file of evaluate.py.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning(f"{path.name} not written: matplotlib is missing. Run pip install matplotlib.")
    elif scaling["sets"]:
        write_text(path, compute_picture(scaling))


def check_packages() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a report needs matplotlib. Run pip install matplotlib.")


def render(template: str, **values: Any) -> str:
    """Fills a jinja2 template of the folder report/, such as "run.html.jinja". Returns the HTML.

    values: Values of the template's variables. Special characters of HTML are escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, **options)
    css = THEME.read_text(encoding="utf-8") + (_HERE / "page.css").read_text(encoding="utf-8")
    js = "".join(path.read_text(encoding="utf-8") for path in (*SCRIPTS, _HERE / "page.js"))
    return environment.get_template(template).render(css=css, js=js, **values)


def check_output(path: Path) -> None:
    """Creates the folder of a file. Raises ValueError if the file cannot be written there."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write {path}. Pass a file in a writable folder.")


def write_page(path: Path, text: str) -> None:
    """Writes text to a file atomically. Raises ValueError if the file cannot be written."""
    try:
        write_text(path, text)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write {path} ({reason}). Choose another file.") from None
