"""Accuracy over compute: what a grid of steps and samples leaves behind, as a file, a table and a picture."""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config.schema import EvaluateConfig
from evaluation.passes import SetResult
from evaluation.results import INTERVAL_ENDS, wilson_interval, with_suffix, write_json
from evaluation.scores import Score
from evaluation.selection import ORACLE

SCALING_FILE, PICTURE_FILE = "scaling.json", "scaling.svg"

_RULES = "rules"  # the way to select that looks at the question, and is told apart from the others
_SETTINGS = ("halting", "noise", "init_noise", "damping", "seed")
_PANEL_INCHES, _MOST_COLUMNS = (4.2, 3.4), 3


def scaling_of(results: Mapping[str, SetResult], config: EvaluateConfig) -> dict[str, Any]:
    """Returns the content of scaling.json: what was asked for, and of every set that has labels its corners.

    A corner has its steps and samples, and for each way to select (`selected`; `by_rules` apart from them, as
    it looks at the question) and for the ceiling `any`: accuracies with their intervals, and the network
    calls that it takes per puzzle. Nothing in it depends on the number of processes.
    """
    sets = {}
    for name, result in results.items():
        if count := int(result.metrics.get("count", 0)):
            corners = [
                {"steps": steps, "samples": samples, **_corner(scores, count)}
                for (steps, samples), scores in result.scores.items()
            ]
            sets[name] = {"count": count, "corners": corners}
    return {**{name: getattr(config, name) for name in _SETTINGS}, "sets": sets}


def _corner(scores: Mapping[str, Score], count: int) -> dict[str, Any]:
    shares = {name: _shares(score, count) for name, score in scores.items()}
    corner = {"selected": {name: each for name, each in shares.items() if name not in (ORACLE, _RULES)}}
    if _RULES in shares:
        corner["by_rules"] = shares[_RULES]
    return {**corner, "any": shares[ORACLE]} if ORACLE in shares else corner


def _shares(score: Score, count: int) -> dict[str, float]:
    shares = {}
    for name, number in (("exact_accuracy", score.exact), ("valid_accuracy", score.valid)):
        if number is not None:
            shares[name] = number / count
            ends = wilson_interval(number / count, count)
            shares |= {with_suffix(name, end): each for end, each in zip(INTERVAL_ENDS, ends, strict=True)}
    if score.undecided is not None:
        shares["undecided"] = score.undecided / count
    return {**shares, "calls": score.calls / count}


def corner_metrics(scaling: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns {set: {metric: value}} of all corners, under names such as exact_accuracy@steps=64,samples=8.

    They are of the first way to select; ,select=vote follows in the names of the others, and any_ comes first
    in those of the ceiling.
    """
    metrics: dict[str, dict[str, float]] = {}
    for set_name, content in scaling["sets"].items():
        columns = metrics.setdefault(set_name, {})
        for corner in content["corners"]:
            where = f"@steps={corner['steps']},samples={corner['samples']}"
            for number, (name, shares) in enumerate(_rows(corner)):
                chosen = f",select={name}" if number and name != ORACLE else ""
                for metric, value in shares.items():
                    columns[f"{'any_' if name == ORACLE else ''}{metric}{where}{chosen}"] = value
    return metrics


def _rows(corner: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the ways to select by their names, those by rules and the ceiling last."""
    yield from corner["selected"].items()
    if "by_rules" in corner:
        yield _RULES, corner["by_rules"]
    if "any" in corner:
        yield ORACLE, corner["any"]


def scaling_table(scaling: Mapping[str, Any]) -> str:
    """Lays out a line for each corner of each set, with the exact accuracy by each way to select."""
    lines = []
    for set_name, content in scaling["sets"].items():
        names = [name for name, _ in _rows(content["corners"][0])]
        lines += [set_name, "steps  samples  calls/puzzle" + "".join(f"  {name:>15}" for name in names)]
        for corner in content["corners"]:
            cells = "".join(f"  {shares['exact_accuracy']:>15.4f}" for _, shares in _rows(corner))
            calls = next(shares for _, shares in _rows(corner))["calls"]
            lines.append(f"{corner['steps']:>5}  {corner['samples']:>7}  {calls:>12.6g}{cells}")
    return "\n".join(lines)


def write_scaling(folder: Path, scaling: Mapping[str, Any]) -> None:
    """Writes scaling.json, and beside it the picture, where matplotlib is there to draw it."""
    write_json(folder / SCALING_FILE, scaling)
    if scaling["sets"] and can_draw():
        draw_scaling(folder / PICTURE_FILE, scaling)


def can_draw() -> bool:
    """Tells whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_scaling(path: Path, scaling: Mapping[str, Any]) -> None:
    """Draws exact accuracy over network calls: a panel for each way to select, a line for each K.

    Bands are 95 % intervals, dotted lines the ceiling. Equal content gives equal bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = [
        (set_name, by, content["corners"])
        for set_name, content in scaling["sets"].items()
        for by, _ in _rows(content["corners"][0])
        if by != ORACLE
    ]
    num_columns = min(len(panels), _MOST_COLUMNS)
    num_rows = -(-len(panels) // num_columns)
    width, height = _PANEL_INCHES
    with matplotlib.rc_context({"svg.hashsalt": "scaling", "font.size": 9}):
        figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
        axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True).flat
        for axis, (set_name, by, corners) in zip(axes, panels, strict=False):
            _draw_panel(axis, corners, by)
            axis.set_title(by if len(scaling["sets"]) == 1 else f"{set_name}: {by}")
            axis.set_xlabel("network calls per puzzle")
            axis.set_ylabel("exact accuracy")
            axis.label_outer()
            axis.xaxis.set_tick_params(labelbottom=True)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        axes[0].legend(frameon=False, loc="best")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150)


def _draw_panel(panel, corners: list[dict[str, Any]], by: str) -> None:
    import matplotlib

    samples = sorted({corner["samples"] for corner in corners})
    colors = matplotlib.colormaps["viridis"].resampled(256)
    for number, num_samples in enumerate(samples):
        rows = [dict(_rows(corner)) for corner in corners if corner["samples"] == num_samples]
        color = colors(0.85 * number / max(len(samples) - 1, 1))
        calls = [row[by]["calls"] for row in rows]
        accuracy, low, high = (
            [row[by][name] for row in rows]
            for name in ("exact_accuracy", *(with_suffix("exact_accuracy", end) for end in INTERVAL_ENDS))
        )
        panel.fill_between(calls, low, high, color=color, alpha=0.15, linewidth=0)
        label = "1 sample" if num_samples == 1 else f"{num_samples} samples"
        panel.plot(calls, accuracy, marker="o", markersize=4, color=color, label=label)
        if num_samples > 1 and ORACLE in rows[0]:
            ceiling, label = [row[ORACLE]["exact_accuracy"] for row in rows], f"any of {num_samples}"
            panel.plot(
                [row[ORACLE]["calls"] for row in rows],
                ceiling,
                linestyle=":",
                linewidth=1.5,
                color=color,
                label=label,
            )
        if len(rows) == 1:  # a band needs two
            panel.vlines(calls, low, high, color=color, alpha=0.5)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
