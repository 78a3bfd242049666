"""Charts of accuracy over network calls. A network call is one thinking step of one sample.

The numbers come from scaling.json, a result file of evaluate.py. It contains the accuracy for several numbers
of thinking steps and of samples.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from evaluation.selection import ORACLE
from report.charts import Chart, Line, chart_file, line_chart


def compute_chart(
    title: str, settings: Sequence[Mapping[str, Any]], by: str, *, has_oracle: bool, **options: Any
) -> Chart | None:
    """Draws accuracy over the mean number of network calls per puzzle.

    The chart has a line for each number of samples. Returns None if there are no points.

    settings: Accuracies on one test set, the list "corners" of scaling.json. Example of an entry: {"steps":
    16, "samples": 4, "ways": {"vote": {"exact_accuracy": 0.9, "calls": 60, ...}, ...}}.
    by: Rule that selects one of the samples, a key of "ways", such as "vote" for the most frequent answer.
    has_oracle: Whether dashed lines show the fraction of puzzles with at least one correct sample.
    options: More arguments of `line_chart`.
    """
    lines = []
    for index, samples in enumerate(sorted({setting["samples"] for setting in settings})):
        rows = [setting["ways"] for setting in settings if setting["samples"] == samples]
        columns = ("calls", "exact_accuracy", "exact_accuracy_low", "exact_accuracy_high")
        calls, shares, low, high = ([row[by][column] for row in rows] for column in columns)
        label, role = "1 sample" if samples == 1 else f"{samples} samples", f"series{index % 8 + 1}"
        lines.append(Line(label, calls, shares, role, low=low, high=high, has_dots=True))
        if has_oracle and samples > 1 and ORACLE in rows[0]:
            oracle = [row[ORACLE]["exact_accuracy"] for row in rows]
            lines.append(Line(f"any of {samples}", calls, oracle, role, is_dashed=True))
    return line_chart(title, lines, x_label="network calls per puzzle", share=True, log_x=True, **options)


def compute_picture(scaling: Mapping[str, Any]) -> str:
    """Returns an SVG file as text: accuracy over the mean number of network calls per puzzle.

    For each test set, the file has a chart for each rule that selects one of the samples.

    scaling: Content of scaling.json, with at least one test set.
    """
    sets = scaling["sets"]
    panels = [
        (by if len(sets) == 1 else f"{set_name}: {by}", content["corners"], by)
        for set_name, content in sets.items()
        for by in content["corners"][0]["ways"]
        if by != ORACLE
    ]
    ends = [
        shares[f"exact_accuracy{end}"]
        for _, settings, _ in panels
        for setting in settings
        for shares in setting["ways"].values()
        for end in ("_low", "_high")
    ]
    y_range, drawn = (min(ends) - 0.02, max(ends) + 0.02), []
    for title, settings, by in panels:
        chart = compute_chart(title, settings, by, has_oracle=True, y_range=y_range)
        names = [
            f'<tspan fill="var(--{role})">{"- - " if name.startswith("any") else ""}{name}</tspan>'
            for name, role in chart.legend
        ]
        drawn.append(((escape(title), "&#160;&#160; ".join(names)), chart))
    return chart_file(drawn, title="accuracy over network calls")
