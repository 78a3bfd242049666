"""Charts drawn by matplotlib, as SVG with the colors and the font of the page.

Callers choose a color by its role, such as `accent`. matplotlib draws placeholder colors. This module
replaces them by CSS variables, so that one SVG works on light and dark pages. Equal data give equal bytes.
"""

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from dataset.drawing import svg_file

ROLES = ("ink", "muted", "line", "accent", "second", "good", "bad", *(f"series{n}" for n in range(1, 9)))

_PLACEHOLDERS = {role: f"#0a0b{index:02x}" for index, role in enumerate(ROLES)}
_SIZE_INCHES = (5.2, 3.1)  # an inch is 72 points
_FRAME = (0.125, 0.2, 0.865, 0.765)  # left, bottom, width, height of the axes, as fractions of the figure
_SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 12.5,
    "axes.edgecolor": _PLACEHOLDERS["line"],
    "axes.labelcolor": _PLACEHOLDERS["muted"],
    "axes.labelsize": 12.5,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _PLACEHOLDERS["line"],
    "grid.linewidth": 0.8,
    "xtick.color": _PLACEHOLDERS["line"],
    "ytick.color": _PLACEHOLDERS["line"],
    "xtick.labelcolor": _PLACEHOLDERS["muted"],
    "ytick.labelcolor": _PLACEHOLDERS["muted"],
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}
_FRACTION = "{x:.3g}"  # format of tick labels
_MOST_POINTS = 240  # per line; longer lines are averaged
_PANELS_A_ROW, _LINE_HEIGHT, _EDGE = 3, 20, 12  # layout of `chart_file`; the last two in points


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart, with an optional shaded band.

    name       text in the legend. If empty, the legend does not list the line
    x, y       coordinates of the points
    role       name of a color of the page, such as "accent". `ROLES` contains all names
    low, high  lower and upper edge of the band at each x. If empty, there is no band
    is_faint   whether the line is thin and pale
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: str = "accent"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    has_dots: bool = False
    is_dashed: bool = False
    is_faint: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A finished chart for an HTML page.

    svg      SVG element as text
    legend   list of (text, name of a color)
    caption  text below the chart
    points   tooltips [x, y, text], with x and y in SVG units
    """

    title: str
    svg: str
    legend: list[tuple[str, str]]
    caption: str = ""
    points: list[list[Any]] = dataclasses.field(default_factory=list)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    share: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    integer_x: bool = False,
    y_range: tuple[float, float] | None = None,
    caption: str = "",
) -> Chart | None:
    """Draws lines into one chart. Returns None if there are no points.

    share: Whether the y values are fractions in [0, 1]. It selects the format of the numbers.
    log_y: Whether the y axis is logarithmic. Has no effect if any y value is 0 or negative.
    from_zero: Whether the y axis starts at 0.
    integer_x: Whether the x axis has only integer ticks.
    y_range: (lowest, highest) y of the axis. If None, matplotlib chooses it.
    """
    lines = [_thinned(line) for line in lines if len(line.x)]
    if not lines:
        return None

    def draw(axes) -> list[list[Any]]:
        for line in lines:
            color = _PLACEHOLDERS[line.role]
            if len(line.low):
                axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.14, linewidth=0)
            axes.plot(
                line.x,
                line.y,
                color=color,
                linewidth=1 if line.is_faint else 1.8,
                alpha=0.45 if line.is_faint else 1,
                linestyle=(0, (4, 3)) if line.is_dashed else "-",
                marker="o" if line.has_dots or len(line.x) == 1 else None,
                markersize=4,
            )
        axes.set_xlabel(x_label)
        if y_range is not None:
            axes.set_ylim(y_range)
        if log_x:
            axes.set_xscale("log", base=2 if min(min(line.x) for line in lines) >= 1 else 10)
        if log_y and all(value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
        _format_axes(axes, share=share, from_zero=from_zero, integer_x=integer_x, log_x=log_x)
        marks = []
        for line in lines:
            for x, y in zip(line.x, line.y, strict=True):
                text = fraction(y) if share else f"{y:.4g}"
                prefix = f"{line.name} " if line.name else ""
                marks.append([x, y, f"{prefix}{text} at {x:,.4g} {x_label}" if x_label else text])
        return marks

    legend = [(line.name, line.role) for line in lines if line.name]
    return _chart(title, draw, legend=legend, caption=caption)


def bar_chart(
    title: str, stacks: Sequence[tuple[str, str, Sequence[int]]], *, x_label: str, caption: str = ""
) -> Chart:
    """Draws a chart with stacked bars at x = 1, 2, ...

    stacks: For each part of the bars: (name in the legend, name of a color, heights at x = 1, 2, ...).
    """

    def draw(axes) -> list[list[Any]]:
        count = len(stacks[0][2])
        bottom, marks = [0] * count, []
        for name, role, heights in stacks:
            axes.bar(range(1, count + 1), heights, bottom=bottom, width=0.62, color=_PLACEHOLDERS[role])
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
            for index, height in enumerate(heights):
                if height:
                    marks.append([index + 1, bottom[index], f"{height} {name} at {x_label} {index + 1}"])
        axes.set_xlabel(x_label)
        axes.set_xlim(0.3, max(count, 2) + 0.7)
        _format_axes(axes, from_zero=True, integer_x=True)
        return marks

    return _chart(title, draw, legend=[(name, role) for name, role, _ in stacks], caption=caption)


def reliability_chart(title: str, bins: Sequence[tuple[float, float, int]], *, caption: str = "") -> Chart:
    """Draws how well predicted probabilities match the fractions of correct answers (reliability diagram).

    bins: List of (mean predicted probability, fraction of correct answers, number of answers).
    """

    def draw(axes) -> list[list[Any]]:
        most = max(count for _, _, count in bins)
        axes.plot([0, 1], [0, 1], color=_PLACEHOLDERS["muted"], linewidth=1, linestyle=(0, (2, 3)))
        predicted, right = [entry[0] for entry in bins], [entry[1] for entry in bins]
        axes.plot(predicted, right, color=_PLACEHOLDERS["accent"], linewidth=1.4, alpha=0.5)
        sizes = [24 + 220 * count / most for _, _, count in bins]
        axes.scatter(
            predicted, right, s=sizes, color=_PLACEHOLDERS["accent"], linewidth=0, alpha=0.9, zorder=3
        )
        axes.set_xlim(-0.04, 1.04)
        axes.set_ylim(-0.06, 1.08)
        axes.set_xlabel("probability predicted by the model")
        axes.xaxis.set_major_formatter(_FRACTION)
        _format_axes(axes, share=True)
        return [
            [mean, share, f"predicted {mean:.2f}, correct {share:.2f} of {count:,} answers"]
            for mean, share, count in bins
        ]

    legend = [("fraction of correct answers", "accent"), ("perfect calibration", "muted")]
    return _chart(title, draw, legend=legend, caption=caption)


def fraction(value: float) -> str:
    """Formats a fraction with three decimals: "0.873"."""
    return f"{value:.3f}"


def duration(seconds: float) -> str:
    """Formats a duration in its two largest units: "2 min 5 s"."""
    seconds, units = round(seconds), [(86400, "d"), (3600, "h"), (60, "min"), (1, "s")]
    for (size, unit), (smaller, next_unit) in zip(units, units[1:], strict=False):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {next_unit}" if rest else "")
    return f"{seconds} s"


def short(number: float) -> str:
    """Formats a count or a rate: "0.312" for 0.3119, "9,876" for 9876, "27.3 M" for 27275266."""
    # Numbers that three digits round up to the next unit belong to it: "1 M", not "1e+03 k".
    for limit, divisor, unit in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.3g} {unit}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _format_axes(
    axes, *, share: bool = False, from_zero: bool = False, integer_x: bool = False, log_x: bool = False
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    exact = "{x:g}"
    plain = FuncFormatter(lambda value, _: short(value) if value >= 1e4 else f"{value:,g}")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(exact)
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5) if high / low < 100 else ()))
        axes.yaxis.set_minor_formatter(exact)
        axes.tick_params(which="minor", length=0, labelcolor=_PLACEHOLDERS["muted"])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(_FRACTION if share else plain)
    if from_zero:
        axes.set_ylim(bottom=0)
    if log_x:
        if axes.get_xlim()[0] < 0.5:  # learning rates: their labels are long, so show few
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(exact)
        axes.xaxis.set_minor_formatter("")
    elif not share or integer_x or axes.get_xlim()[1] > 2:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=integer_x))
        axes.xaxis.set_major_formatter(plain)


def _chart(title: str, draw: Callable, *, legend: Sequence[tuple[str, str]], caption: str) -> Chart:
    """Lets `draw` draw on new matplotlib axes, and converts the drawing to an SVG chart.

    draw: Function that takes the axes. It returns a list of tooltips [x, y, text]. x and y are in data units.
    legend: Pairs (label, name of its color), from which repeats are removed. caption: Text below the chart.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": title}):
        figure = Figure(figsize=_SIZE_INCHES, dpi=72)
        axes = figure.add_axes(_FRAME)
        marks = draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        height = figure.get_size_inches()[1] * 72
        points = []
        for x, y, text in marks:
            right, up = axes.transData.transform((x, y))
            points.append([round(float(right), 1), round(float(height - up), 1), text])
    return Chart(title, _as_inline(file.getvalue(), title), list(dict.fromkeys(legend)), caption, points)


def _as_inline(svg: str, title: str) -> str:
    head, _, body = svg[svg.index("<svg") :].partition(">")
    head = re.sub(r' (xmlns(:xlink)?|width|height|version)="[^"]*"', "", head)
    head = head.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"')
    for dropped in (
        r"(?s)<metadata>.*?</metadata>",
        r' id="(figure|patch|line2d|text|axes|legend|matplotlib|xtick|ytick|Path|FillB)[^"]*"',
        r" ?font-family: [^;\"]*;?",
        r"(?s)<defs>\s*<style.*?</style>\s*</defs>",  # would apply to the whole page
        r"(?s)<!--.*?-->\s*",
    ):
        body = re.sub(dropped, "", body)
    for role, placeholder in _PLACEHOLDERS.items():
        body = body.replace(placeholder, f"var(--{role})")
    return f"{head}>{body}"


def chart_file(panels: Sequence[tuple[Sequence[str], Chart]], *, title: str) -> str:
    """Returns one SVG file as text that contains several charts, three in a row.

    panels: List of (lines of SVG text above the chart, chart).
    """
    head, content = _LINE_HEIGHT * max(len(lines) for lines, _ in panels) + 4, []
    width, height = (72 * inches for inches in _SIZE_INCHES)
    for index, (lines, chart) in enumerate(panels):
        left, top = index % _PANELS_A_ROW * width, index // _PANELS_A_ROW * (height + head)
        content.append(f'<g transform="translate({left + _EDGE:g} {top + _EDGE:g})"><g font-size="12.5">')
        for row, line in enumerate(lines):
            look = 'fill="var(--muted)"' if row else 'fill="var(--ink)" font-weight="600"'
            content.append(f'<text x="{_EDGE}" y="{_LINE_HEIGHT * row + 14}" {look}>{line}</text>')
        inside = chart.svg[chart.svg.index(">") + 1 : chart.svg.rindex("</svg>")].strip()
        content.append(f'</g><g transform="translate(0 {head})">{inside}</g></g>')
    return svg_file(
        "\n".join(content),
        width=min(len(panels), _PANELS_A_ROW) * width + 2 * _EDGE,
        height=-(-len(panels) // _PANELS_A_ROW) * (height + head) + 2 * _EDGE,
        title=title,
    )


def _thinned(line: Line) -> Line:
    if len(line.x) <= _MOST_POINTS:
        return line
    size = -(-len(line.x) // _MOST_POINTS)

    def mean(values: Sequence[float]) -> list[float]:
        parts = [values[start : start + size] for start in range(0, len(values), size)]
        return [sum(part) / len(part) for part in parts]

    columns = {name: mean(getattr(line, name)) for name in ("x", "y", "low", "high")}
    return dataclasses.replace(line, **columns)
