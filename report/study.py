"""The page of a study: a self-contained HTML file with all trials and charts of the hyper-parameters.

A study is a search for hyper-parameters. A trial is one combination of hyper-parameters, trained once for
each seed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from report.charts import Chart, Line, line_chart
from report.page import render
from report.page import write_page as write_text_of_page
from tuning.loop import format_values, short_value
from tuning.study import Study


def write_page(study: Study, path: Path) -> None:
    best = study.best()
    text = render(
        "study.html.jinja",
        title=study.name,
        study=study,
        best=best,
        best_values=best and format_values(study.parameters(best)),
        names=list(study.space.describe()),
        short=short_value,
        reports={
            trial.number
            for trial in study.trials
            if (path.parent / f"trial_{trial.number}" / "report.html").exists()
        },
        charts=_charts(study),
    )
    write_text_of_page(path, text)


def _charts(study: Study) -> list[Chart]:
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    choose = min if study.selection.lowest_is_best else max
    numbers, values = [trial.number for trial in complete], [trial.value for trial in complete]
    so_far = [choose(values[: end + 1]) for end in range(len(values))]
    metric, best = study.selection.metric, study.best()
    points = [_point(number, value) for number, value in zip(numbers, values, strict=True)]
    lines = [*points, Line("the best so far", numbers, so_far)]
    drawn = [line_chart("Best so far", lines, x_label="trial", integer_x=True, caption=metric)]
    curves = []
    for trial in study.trials:
        is_best = best is not None and trial.number == best.number
        values = {step: value for step, value in trial.intermediate_values.items() if math.isfinite(value)}
        name = "the best trial" if is_best else ""
        curves.append(Line(name, [*values], [*values.values()], has_dots=is_best, is_faint=not is_best))
    title = "Evaluations of each trial"
    drawn.append(line_chart(title, curves, x_label="evaluation", integer_x=True, caption=metric))
    importances = _importances(study) if len(complete) > 1 else {}
    for key in sorted(study.space.parameters, key=lambda key: -importances.get(key, 0.0)):
        drawn.append(_parameter_chart(study, key, complete, importance=importances.get(key)))
    return [chart for chart in drawn if chart]


def _point(x: float, y: float) -> Line:
    return Line("", [x], [y], role="series2", has_dots=True)


def _parameter_chart(
    study: Study, key: str, trials: list[FrozenTrial], *, importance: float | None
) -> Chart | None:
    """Draws one point for each trial: x is the value of a hyper-parameter, y is the trial's result.

    The result of a trial is a mean over seeds.

    key: Name of the hyper-parameter. If it has a list of choices, x is the position in this list (1, 2, ...),
    and the caption lists the choices.
    trials: Completed trials.
    importance: Fraction of the variance of the results that the hyper-parameter explains, for the caption.
    None if it cannot be computed, for example with only one trial.
    """
    of = study.space.parameters[key]
    is_choice = isinstance(of, CategoricalDistribution)
    points = []
    for trial in trials:
        study.parameters(trial)  # raises ValueError for a value outside the space
        value = trial.params[key]
        points.append(_point(of.choices.index(value) + 1 if is_choice else value, trial.value))
    caption = "" if importance is None else f"It explains {importance:.0%} of the variance. "
    if is_choice:
        caption += ", ".join(f"{number}: {choice}" for number, choice in enumerate(of.choices, 1))
    return line_chart(
        key,
        points,
        x_label=key,
        integer_x=is_choice or isinstance(of, IntDistribution),
        log_x=getattr(of, "log", False),
        caption=caption,
    )


def _importances(study: Study) -> dict[str, float]:
    # Fraction of the variance of the results that each hyper-parameter explains.
    with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError, ImportError):
        warnings.simplefilter("ignore")  # warnings about few trials, or trials with equal values
        return optuna.importance.get_param_importances(study.optuna)
    return {}
