"""The two pages, written: the report of one run, and the comparison of several."""

from collections.abc import Callable, Sequence
from pathlib import Path

from report.compare import comparison_page
from report.page import PAGE_FILE, check_packages, check_place, run_page, write_page
from report.run import read_run
from report.thinking import Thinking, think_of_run

NUM_PUZZLES = 400  # that a model thinks about


def write_report(
    folder: Path,
    *,
    output: Path | None = None,
    data: Sequence[Path] | None = None,
    num_puzzles: int = NUM_PUZZLES,
    thinking: Thinking | None = None,
    evaluation: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Path:
    """Writes the report of a run, report.html in its folder unless `output` says where; returns its path.

    Without a checkpoint or its data the report is of what there is, and says what is missing; so does `warn`.
    thinking: what the model thought, if it is known already. evaluation: folder of the evaluation that is
    reported. ValueError, one line, where there is no run, or the page cannot be written.
    """
    check_packages()
    run = read_run(folder, evaluation=evaluation)
    path = output or folder / PAGE_FILE
    check_place(path)
    missing = []
    if thinking is None and num_puzzles:
        try:
            thinking = think_of_run(folder, data=data, num_puzzles=num_puzzles)
        except ValueError as error:
            if data is not None:  # which somebody asked for
                raise
            missing.append(f"no pictures and no halting steps: {error}")
    for text in (*run.warnings, *missing):
        warn(text)
    write_page(path, run_page(run, thinking, missing=missing))
    return path


def write_comparison(folders: Sequence[Path], *, output: Path, warn: Callable[[str], None]) -> Path:
    """Writes the page that compares runs; returns its path.

    ValueError, one line, where a folder has no run, or the page cannot be written.
    """
    check_packages()
    if len({each.resolve() for each in folders}) < len(folders):
        raise ValueError("the same run is given twice: give each run folder once")
    check_place(output)
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        for text in run.warnings:
            warn(text)
    write_page(output, comparison_page(runs))
    return output
