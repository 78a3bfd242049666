"""The page of a study: its trials and Optuna's plots, in one file that needs no network."""

from __future__ import annotations

import html
import warnings
from pathlib import Path

import optuna.visualization as plots
import plotly.graph_objects as go
from optuna.trial import TrialState
from plotly.offline import get_plotlyjs

from training.run_folder import write_text
from tuning.loop import format_values
from tuning.study import Study

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin: 2.5rem 0 .5rem; font-size: 1.2rem; } p { margin: .3rem 0; color: #555; }
table { border-collapse: collapse; font-size: 14px; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; border-bottom: 1px solid #ddd; }
.best td { font-weight: 600; } .scroll { max-height: 26rem; overflow: auto; }
"""


def write_page(study: Study, path: Path) -> None:
    """Writes the page anew, whole or as before."""
    selection, best = study.selection, study.best()
    facts = [f"{selection.metric} of the {selection.selected_by} puzzles; {study.describe_counts()}"]
    if best is not None:
        facts.append(f"Best: {best.value:.4g}, trial {best.number}: {format_values(study.parameters(best))}")
    sections = [
        f"<h2>{title}</h2>\n{figure.to_html(full_html=False, include_plotlyjs=False)}"
        for title, figure in _figures(study)
    ]
    name = html.escape(study.name)
    write_text(
        path,
        f"<!doctype html>\n<html lang='en'>\n<meta charset='utf-8'>\n<title>{name}</title>\n"
        f"<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n<h1>{name}</h1>\n"
        + "".join(f"<p>{html.escape(fact)}</p>\n" for fact in facts)
        + "\n".join([*sections, _table(study)])
        + "\n</html>\n",
    )


def _figures(study: Study) -> list[tuple[str, go.Figure]]:
    """Draws what the trials so far allow."""
    made, num_complete = [], study.count(TrialState.COMPLETE)
    named = {"target_name": study.selection.metric}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few or equal trials; so are the plots
        if num_complete:
            made.append(("The best so far", plots.plot_optimization_history(study.optuna, **named)))
        if any(trial.intermediate_values for trial in study.trials):
            figure = plots.plot_intermediate_values(study.optuna)
            figure.update_xaxes(title="evaluation", tickformat="d").update_yaxes(title=study.selection.metric)
            made.append(("Evaluations of each trial", figure))
        if num_complete > 1:
            made.append(("What matters", plots.plot_param_importances(study.optuna, **named)))
            made.append(("Each parameter", plots.plot_slice(study.optuna, **named)))
            made.append(("All parameters", plots.plot_parallel_coordinate(study.optuna, **named)))
        made.append(("When trials ran", plots.plot_timeline(study.optuna)))
    for _, figure in made:
        figure.update_layout(title=None, margin={"t": 30}, template="plotly_white")
    return made


def _table(study: Study) -> str:
    names = list(study.space.describe())
    best = study.best()
    rows = [_row("th", ["trial", study.selection.metric, "state", *names])]
    for trial in study.trials:
        values, value = study.parameters(trial), "" if trial.value is None else f"{trial.value:.4g}"
        cells = [
            str(trial.number),
            value,
            trial.state.name.lower(),
            *(values.get(name, "") for name in names),
        ]
        rows.append(_row("td", cells, attribute=" class=best" if trial is best else ""))
    return f"<h2>All trials</h2>\n<div class='scroll'><table>{''.join(rows)}</table></div>"


def _row(tag: str, cells: list[str], *, attribute: str = "") -> str:
    return f"<tr{attribute}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"
