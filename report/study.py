"""The page of a study: its trials and Optuna's plots, in one file that needs no network."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna.visualization as plots
import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader
from optuna.trial import TrialState
from plotly.offline import get_plotlyjs

from config.writing import write_text
from tuning.loop import format_values
from tuning.study import Study


def write_page(study: Study, path: Path) -> None:
    """Writes the page anew, whole or as before."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    best = study.best()
    page = environment.get_template("study.html.jinja").render(
        study=study,
        best=best,
        best_values=best and format_values(study.parameters(best)),
        names=list(study.space.describe()),
        figures=[
            (title, figure.to_html(full_html=False, include_plotlyjs=False))
            for title, figure in _figures(study)
        ],
        plotly=get_plotlyjs(),
    )
    write_text(path, page)


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
