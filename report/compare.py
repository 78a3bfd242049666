"""The page that compares runs: a table, and curves over steps, examples, operations and seconds.

Runs form a group if their configs differ only in the seed and in keys that do not change the training, such
as names and loggers. The page also shows group means.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from evaluation.names import written_name
from report.charts import Chart, Line, line_chart
from report.page import check_output, check_packages, render, write_page
from report.run import Curve, RunRecord, read_run
from report.table import NOTE, Group, build_table, group_runs, without_repeats

_AXES = ("training steps", "examples", "petaflops", "seconds")
_OF_SETS = (  # title, metric of a test set, options of the chart
    ("Puzzles solved, test", "exact_accuracy", {"share": True, "from_zero": True}),
    ("Cells right, test", "accuracy", {"share": True}),
)
_METRICS = (  # title, metric, options of the chart
    ("Loss, training", "train/lm_loss", {"log_y": True}),
    ("Thinking steps until halting, training", "train/steps", {}),
    ("Gradient norm", "train/grad_norm", {"log_y": True}),
    ("Examples per second", "train/examples_per_second", {"from_zero": True}),
)


def write_comparison(folders: Sequence[Path], *, output: Path, warn: Callable[[str], None]) -> Path:
    """Writes an HTML page that compares runs, and returns its path.

    Args:
        folders: Run folders, without repetitions.
        output: HTML file to write.
        warn: Function that is called with the text of each warning.

    Raises:
        ValueError: A folder has no run, matplotlib is missing, or the page cannot be written.
    """
    check_packages()
    check_output(output)
    runs = [read_run(folder) for folder in folders]
    for text in (text for run in runs for text in run.warnings):
        warn(text)
    write_page(output, _comparison_page(without_repeats(runs, warn)))
    return output


def _comparison_page(runs: Sequence[RunRecord]) -> str:
    groups = group_runs(runs)
    table = build_table(groups)
    formats = {"Markdown": table.to_markdown(), "LaTeX": table.to_latex(), "CSV": table.to_csv()}
    hashes = {group.settings.get("data") for group in groups} - {None, "unknown"}  # of a rebuilt folder
    differs = "data_path" in groups[0].settings or len(hashes) > 1
    other_data = ". The runs use different data, so their accuracies are not comparable" if differs else ""
    grouped = f" in {len(groups)} groups" if len(groups) > 1 else " in one group"
    count = f"{len(runs)} runs" + (grouped if len(groups) < len(runs) else "")
    return render(
        "comparison.html.jinja",
        title="Runs side by side",
        subtitle=f"{count}. Runs that differ only in the seed form a group. Thick lines show its mean"
        + other_data,
        axes=[(axis, comparison_charts(groups, axis)) for axis in _AXES],
        table=table,
        groups=groups,
        note=NOTE,
        formats=formats,
        notes=[note for run in runs for note in run.warnings],
        runs=[(group, run) for group in groups for run in group.runs],
    )


def comparison_charts(groups: Sequence[Group], axis: str) -> list[Chart]:
    """Draws a chart for each metric, with one curve for each run.

    A test metric has a chart for each test set. Metrics that no run has logged are left out. If a group has
    several runs, the chart also has a curve of their mean, at the training steps that all runs have logged.

    axis: Unit of the x axis: "training steps", "examples" (steps times batch size), "petaflops" (1e15
    floating-point operations since the start) or "seconds".
    """
    drawn = []
    runs = [run for group in groups for run in group.runs]
    other_metrics = dict.fromkeys(name for run in runs for name in run.other_metrics)
    of_networks = [(f"{written_name(name)}, training", f"train/{name}", {}) for name in other_metrics]
    sets = dict.fromkeys(name for run in runs for name in run.eval_sets())
    of_sets = [
        (title + (f", {name}" if len(sets) > 1 else ""), f"eval/{name}/{metric}", options)
        for title, metric, options in _OF_SETS
        for name in sets
    ]
    for title, metric, options in (*of_sets, *_METRICS, *of_networks):
        has_dots, lines = metric.startswith("eval/"), []
        for group in groups:
            curves = [curve for run in group.runs if (curve := _curve(run, metric, axis))]
            if len(curves) > 1:
                lines += [Line("", *_columns(curve), group.role, is_faint=True) for curve in curves]
                common = [step for step in curves[0] if all(step in curve for curve in curves)]
                points = {step: zip(*(curve[step] for curve in curves), strict=True) for step in common}
                curves = [{step: tuple(map(fmean, values)) for step, values in points.items()}]
            lines += [Line(group.label, *_columns(curve), group.role, has_dots=has_dots) for curve in curves]
        drawn.append(line_chart(title, lines, x_label=axis, **options))
    return [chart for chart in drawn if chart]


def _columns(points: dict[int, tuple[float, float]]) -> Curve:
    return [x for x, _ in points.values()], [y for _, y in points.values()]


def _curve(run: RunRecord, metric: str, axis: str) -> dict[int, tuple[float, float]]:
    """Returns {training step: (x, y)}. If a value of x is unknown, returns {}."""
    steps, values = run.curve(metric)
    along = steps
    if axis == "seconds":
        seconds = run.seconds()
        along = [seconds[step] for step in steps] if any(seconds.values()) else []
    elif axis == "examples":
        size = run.config.get("global_batch_size")
        along = [step * size for step in steps] if isinstance(size, int) else []
    elif axis == "petaflops":
        logged = dict(zip(*run.curve("train/petaflops"), strict=True))
        along = [logged[step] for step in steps] if logged.keys() >= set(steps) else []
    return dict(zip(steps, zip(along, values, strict=False), strict=False))
