"""Finds the best checkpoint of a run in metrics.jsonl."""

from pathlib import Path

from runtime.metrics_file import METRICS_FILE, is_step, read_rows

BEST_STEP, SELECTED_BY = (
    "best/step",
    "best/selected_by",
)  # keys in a row of metrics.jsonl, next to best/<metric>


def best_checkpoint(run_folder: Path) -> tuple[Path, str]:
    """Returns (folder of the best checkpoint of a run, split that selected it: "validation" or "test").

    Raises ValueError if metrics.jsonl names no best checkpoint, or if its folder is missing.
    """
    rows = [values for values, _ in read_rows(run_folder) if is_step(values.get(BEST_STEP))]
    if not rows:
        raise ValueError(
            f"{run_folder / METRICS_FILE} names no best checkpoint. A run with keep_best=<metric> names one "
            "after its first evaluation."
        )
    folder = run_folder / f"step_{rows[-1][BEST_STEP]}"
    if not folder.is_dir():
        raise ValueError(
            f"best checkpoint not found: {folder}. Train with checkpoint_every_eval=true and "
            "keep_best=<metric> to keep it."
        )
    return folder, "validation" if rows[-1].get(SELECTED_BY) == "validation" else "test"
