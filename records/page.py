"""Renders the pages of the records: tables in records/README.md and README.md, and docs/curve.svg."""

import statistics
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.harness import REPOSITORY
from records.record import FOLDER, MOST_P, best_entry, logs_of, read_entries, read_rows
from records.rungs import RUNGS, Rung
from records.seeds import final_evaluation
from report.charts import Line, chart_file, duration, line_chart

BEGIN, END = "<!-- records: python -m records --table -->", "<!-- end of records -->"

# records/README.md has all rungs.
_README_RUNGS = ("demo", "sudoku_extreme_search", "maze_15x15")
_CURVES_OF, _PICTURE = "sudoku_9x9_medium", "docs/curve.svg"  # shown in README.md
_COLUMNS = ("rung", "puzzles", "goal", "accuracy", "lowest", "p", "seconds", "processor-hours", "PF")
_COLUMNS += ("thinking longer", "machine", "made by")
_SHORT_COLUMNS = {name: name for name in ("rung", "puzzles", "goal", "accuracy")}  # {column: its title}
_SHORT_COLUMNS |= {"seconds": "seconds on two cores", "machine": "machine"}
_TRAINED, _NEIGHBOURS = "train/exact_accuracy", 3  # records on each side, to smooth a faint line


def pages(*, root: Path = REPOSITORY, folder: Path = FOLDER) -> dict[Path, str]:
    """Returns the new contents of README.md, records/README.md and docs/curve.svg: {path: text}.

    Both pages change only between two marker lines. Raises ValueError if a page does not have these lines. If
    the rung that docs/curve.svg shows has no record, the result does not contain this file.

    root: Folder of the repository. folder: Folder records/, from which the results are read.
    """
    records = {rung: read_entries(folder / name) for name, rung in RUNGS.items()}
    rows = [row for rung, entries in records.items() for row in _rows(rung, entries)]
    sections = [(rung, entries) for rung, entries in records.items() if entries]
    short = []
    for rung_name in _README_RUNGS:
        entries = records[RUNGS[rung_name]]
        (row,) = _rows(RUNGS[rung_name], [best_entry(entries)] if entries else [])
        short.append([row[_COLUMNS.index(column)] for column in _SHORT_COLUMNS])
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)
    environment.globals |= {"logs_of": logs_of, "machine": _machine}
    template = environment.get_template("table.md.jinja")
    contents = {}
    for page, text in (
        ("records/README.md", template.render(columns=_COLUMNS, rows=rows, sections=sections)),
        ("README.md", template.render(columns=_SHORT_COLUMNS.values(), rows=short, sections=())),
    ):
        path = root / page
        before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{path} lacks the lines {BEGIN} and {END}. Add them where the table belongs.")
        contents[path] = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
    if entries := records[RUNGS[_CURVES_OF]]:
        contents[root / _PICTURE] = draw_curves(RUNGS[_CURVES_OF], best_entry(entries), folder / _CURVES_OF)
    return contents


def _rows(rung: Rung, entries: list[dict[str, Any]]) -> list[list[str]]:
    head = [f"`{rung.name}`", rung.what, f"{_metric(rung)} {rung.goal:g} in {duration(rung.seconds)}"]
    if not entries:
        return [[*head, "no record yet", *[""] * (len(_COLUMNS) - len(head) - 1)]]
    return [
        [
            *head,
            _accuracy(rung, entry),
            f"{entry[f'{rung.metric}_min']:.3f}",
            _p(entry),
            _seconds(rung, entry),
            _number(entry, "processor_hours_max"),
            _number(entry, "petaflops"),
            _thinking_longer(rung, entry),
            _machine(entry),
            f"[{Path(entry['recipe']).name}](../{entry['recipe']}), `{entry['commit']}`, {entry['date']}",
        ]
        for entry in entries
    ]


def _accuracy(rung: Rung, entry: dict[str, Any]) -> str:
    metric = entry["metric"]
    text = f"{entry[f'{metric}_mean']:.3f}"
    if entry[f"{metric}_deviation"] is not None:
        low, high = entry[f"{metric}_interval"]
        text += f" +- {entry[f'{metric}_deviation']:.3f} [{max(low, 0):.3f}, {min(high, 1):.3f}]"
    text += f", {entry['seeds']} seed{'s' if entry['seeds'] > 1 else ''}"
    return text + (": missed" if entry[f"{metric}_mean"] < rung.goal else "")


def _seconds(rung: Rung, entry: dict[str, Any]) -> str:
    text = f"{entry['seconds_max']:.0f}" + (" (beside other load)" if entry["is_busy"] else "")
    return text + (": missed" if entry["seconds_max"] > rung.seconds else "")


def _machine(entry: dict[str, Any]) -> str:
    instruction_set = entry["instruction_set"]
    instruction_set = "instruction set unknown" if instruction_set == "unknown" else instruction_set
    return f"{entry['cpu']} ({instruction_set}), {entry['forward_dtype']}"


def _p(entry: dict[str, Any]) -> str:
    p = entry["goal_p"]
    if p is None:
        return "one seed"
    return ("< 0.001" if p < 0.001 else f"{p:.3f}") + ("" if p < MOST_P else ": not held")


def _thinking_longer(rung: Rung, entry: dict[str, Any]) -> str:
    settings = [run["test_time"][-1] for run in entry["runs"] if run.get("test_time")]
    if len(settings) < entry["seeds"]:
        return ""
    metric = rung.metric if rung.metric in settings[0] else "exact_accuracy"
    mean = statistics.fmean(setting[metric] for setting in settings)
    steps, samples = settings[0]["steps"], settings[0]["samples"]
    more = f"{steps} steps" + (f", {samples} samples" if samples > 1 else "")
    return f"{mean:.3f} ({'' if metric == rung.metric else metric + ', '}{more})"


def _number(entry: dict[str, Any], key: str) -> str:
    return "" if entry.get(key) is None else f"{entry[key]:.3g}"


def _metric(rung: Rung) -> str:
    return rung.metric.replace("_accuracy", "").rpartition("/")[2]


def draw_curves(rung: Rung, entry: dict[str, Any], folder: Path) -> str:
    """Returns an SVG file as text: test accuracy over training minutes, for each seed.

    A dashed line shows the goal. Faint lines show the smoothed accuracy on training puzzles.

    entry: Results of the task, an entry of record.json in `folder`.
    """
    lines, faint, last = [], [], 0.0
    for run in entry["runs"]:
        rows = [row for row in read_rows(folder, entry, run["seed"]) if "seconds" in row]
        shares = {row["seconds"] / 60: final_evaluation([row], rung.metric) for row in rows}
        tested = {minute: share for minute, share in shares.items() if share is not None}
        lines.append(Line("", list(tested), list(tested.values()), has_dots=len(tested) <= 12))
        trained = {row["seconds"] / 60: row[_TRAINED] for row in rows if _TRAINED in row}
        faint.append(Line("", list(trained), _smooth(list(trained.values())), is_faint=True))
        last = max([last, *tested])
    goal_line = Line("", [0, last], [rung.goal, rung.goal], role="good", is_dashed=True)
    title = f"{rung.what}: {rung.metric.replace('_', ' ')} over minutes"
    chart = line_chart(title, [*faint, *lines, goal_line], x_label="minutes", share=True, from_zero=True)
    seeds = f"{entry['seeds']} seed{'s' if entry['seeds'] > 1 else ''}"
    puzzles, _, detail = rung.what.partition(", ")
    goal = f'<tspan fill="var(--good)">goal {rung.goal:g} in {duration(rung.seconds)}</tspan>'
    measured = rung.metric.rpartition("/")[2].replace("_", " ")
    described = f"{measured}, {seeds}; faint lines: during training"
    return chart_file([((puzzles, f"{detail and detail + '; '}{goal}", described), chart)], title=title)


def _smooth(values: list[float]) -> list[float]:
    parts = [values[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]
