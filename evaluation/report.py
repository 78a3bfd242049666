"""What an evaluation leaves behind: metrics.json, the saved outputs, and a table for the reader."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from evaluation.passes import SetResult

METRICS_FILE = "metrics.json"


def open_output_folder(folder: Path) -> Path:
    """Makes the folder before the work is done. ValueError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise ValueError(
            f"cannot write into {folder} ({error.strerror or error}): give another output_dir"
        ) from None
    return folder


def write_metrics(folder: Path, results: Mapping[str, SetResult]) -> None:
    """`{set: {metric: value, "count": n}}`, and the exact accuracy after each halting step."""
    content = {
        name: {
            **result.metrics,
            "count": int(result.metrics.get("count", 0)),
            **{
                f"exact_accuracy_after_step_{step}": value
                for step, value in enumerate(result.exact_accuracy_after_each_step, 1)
            },
        }
        for name, result in results.items()
    }
    unfinished = folder / f"{METRICS_FILE}.tmp"
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(folder / METRICS_FILE)


def write_outputs(folder: Path, results: Mapping[str, SetResult]) -> None:
    """`<set>__outputs.npz` for every set that has outputs: the real rows, in dataset order."""
    for name, result in results.items():
        if result.outputs:
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(folder / f"{name}__outputs.npz", **result.outputs)


def metrics_table(results: Mapping[str, SetResult], *, title: str) -> str:
    """A line for each metric and a column for each set; accuracies are fractions of 1."""
    names = list(dict.fromkeys(metric for result in results.values() for metric in result.metrics))
    rows = [(name, [result.metrics.get(name) for result in results.values()]) for name in names]
    steps = max((len(result.exact_accuracy_after_each_step) for result in results.values()), default=0)
    for step in range(steps):
        after = [result.exact_accuracy_after_each_step for result in results.values()]
        rows.append((f"exact after step {step + 1}", [values[step] if values else None for values in after]))
    width = max(map(len, (name for name, _ in rows)), default=0)
    lines = [title, "  ".join([" " * width, *(f"{name:>12}" for name in results)])]
    for name, values in rows:
        cells = [" " * 12 if value is None else f"{value:>12.6g}" for value in values]
        lines.append("  ".join([f"{name:<{width}}", *cells]))
    return "\n".join(lines)
