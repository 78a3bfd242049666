"""The best checkpoint of a run, by the log of its metrics."""

from pathlib import Path

from runtime.metrics_file import METRICS_FILE, is_step, read_rows

BEST_STEP, SELECTED_BY = "best/step", "best/selected_by"  # keys of a row of the log, beside best/<metric>


def best_checkpoint(run_folder: Path) -> tuple[Path, str]:
    """Returns the best checkpoint by a run's log, and the puzzles that chose it, "validation" or "test".

    Raises ValueError if there is none.
    """
    rows = [values for values, _ in read_rows(run_folder) if is_step(values.get(BEST_STEP))]
    if not rows:
        raise ValueError(
            f"{run_folder / METRICS_FILE} names no best checkpoint: a run with keep_best has one after its "
            "first evaluation"
        )
    folder = run_folder / f"step_{rows[-1][BEST_STEP]}"
    if not folder.is_dir():
        raise ValueError(
            f"{folder}, the best of its run, is not there: checkpoint_every_eval and keep_best keep it"
        )
    return folder, "validation" if rows[-1].get(SELECTED_BY) == "validation" else "test"
