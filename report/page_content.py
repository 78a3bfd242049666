"""What the page of a run shows: key numbers, charts, a table of results, and how the run was made."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset.kinds.kind import to_grid
from evaluation.intervals import wilson_interval
from evaluation.metric_tables import (
    INTERVAL_ENDS,
    independent_count,
    is_number,
    is_share,
    metric_names,
    with_suffix,
    written_value,
)
from evaluation.names import written_name
from report.charts import Chart, Line, bar_chart, duration, fraction, line_chart, reliability_chart, short
from report.compute import compute_chart
from report.run import RunRecord
from report.trace import (
    TracedPuzzles,
    accuracy_after_steps,
    halting_histogram,
    pack,
    picture_data,
    reliability,
)
from runtime.writing import to_yaml
from training.code import CHANGES


def page_values(run: RunRecord, traced: TracedPuzzles | None) -> dict[str, Any]:
    """Returns the values of the variables in the HTML template run.html.jinja.

    traced: Some test puzzles, and the answers of the model to them. If None, the page shows no puzzles.
    """
    packed, num_pictures = pack(picture_data(traced)) if traced else ("", 0)
    return {
        "title": run.name,
        "subtitle": _describe(run, traced),
        "highlights": _highlights(run, traced),
        "pictures": packed,
        "is_search": traced is not None and traced.is_search,
        "has_candidates": traced is not None and traced.has_candidates,
        "num_pictures": num_pictures,
        "num_puzzles": traced.num_puzzles if traced else 0,
        "has_variants": traced is not None and traced.has_variants,
        "thinking_charts": thinking_charts(run, traced),
        "learning_charts": learning_charts(run),
        "results": _results_table(run),
        "origin": _origin(run, traced),
        "starts": run.starts,
        "config": to_yaml(run.config) if run.config else "",
    }


def _describe(run: RunRecord, traced: TracedPuzzles | None) -> str:
    on = None
    # If a dataset defines its own symbols, the subtitle shows the name of its folder instead.
    if traced and (kind := traced.info.kind) and traced.info.vocabulary is None:
        style, kind_name = traced.info.style, kind.title or kind.name.capitalize()
        rows, columns = to_grid(traced.inputs[0], num_columns=style.num_columns).shape
        on = kind_name if style.first_of_field is not None else f"{rows} \u00d7 {columns} {kind_name}"
    data = run.config.get("data_path")
    names = [Path(str(path)).name for path in data] if isinstance(data, list) else []
    return " on ".join(filter(None, [run.architecture, on or ", ".join(names)])) or "run without config.yaml"


def _highlights(run: RunRecord, traced: TracedPuzzles | None) -> list[tuple[str, str, str]]:
    """Returns the key numbers at the top of the page: list of (name, value, explanation).

    Example: ("solved", "0.873", "873 of 1,000 test puzzles").
    """
    found = []
    set_name, values = next(iter(run.evaluation.items()), ("", {}))
    if isinstance(share := values.get("exact_accuracy"), float):
        count = values.get("count")
        where = f"{share * count:,.0f} of {count:,.0f} test puzzles" if count else "of the test puzzles"
        where += f", set {set_name}" if len(run.evaluation) > 1 else ""
        found.append(("solved", fraction(share), where))
    if traced:
        # The evaluation has all test puzzles, `traced` only some.
        halts, steps = values.get("act_steps"), traced.trace.preds.shape[1]
        halts = halts if is_number(halts) else traced.trace.halting_steps.mean()
        limit = f"of at most {steps}. Never halting counts as {steps}"
        found.append((written_name("act_steps"), written_value("act_steps", halts), limit))
    # The evaluation may have other loops or larger puzzles than the training, and then other steps.
    gigaflops = values.get("gigaflops_per_step") or (run.starts or [{}])[-1].get("gigaflops_per_step")
    # `calls@...` counts the calls for all samples. The accuracy above belongs to the largest setting.
    calls = [value for name, value in values.items() if name.startswith("calls@")] or [values.get("steps")]
    if gigaflops and is_number(calls := max(calls)):
        what = f"{calls:.4g} network calls of {gigaflops:.3g} GFLOP"
        found.append(("GFLOP per answer", f"{calls * gigaflops:.3g}", what))
    if run.num_parameters:
        found.append(("parameters", short(run.num_parameters), "without puzzle embeddings"))
    if seconds := run.seconds().get(run.last_step):
        of_steps = f", {run.petaflops:.3g} PFLOP" if run.petaflops else ""
        steps = f"{run.last_step:,}"
        if (last := run.status.get("step", 0)) > run.last_step:  # the last ones have no log row
            steps = f"the first {steps} of {last:,}"
        found.append(("training time", duration(seconds), f"{steps} training steps{of_steps}"))
    return found


def _origin(run: RunRecord, traced: TracedPuzzles | None) -> list[tuple[str, str]]:
    """Returns facts about how the run was made, as a list of (name, value).

    Example: ("optimizer", "optimizer adam_atan2, lr 0.0001"). An unknown value is "not recorded".
    """
    config, start = run.config, run.starts[-1] if run.starts else {}
    commit, started = start.get("git_commit") or "", run.starts[0].get("time") if run.starts else None

    def keys(*names: str) -> str:
        return ", ".join(f"{name} {config[name]}" for name in names if config.get(name) is not None)

    data = config.get("data_path")
    length = "train_steps" if config.get("train_steps") else "epochs"
    status = run.status.get("status")
    if "step" in run.status and status == "finished":
        status += f" at training step {run.status['step']:,}"
    rows = {
        "model": run.architecture,
        "dataset": ", ".join(map(str, data)) if isinstance(data, list) else data,
        "fingerprint": (run.fingerprint or "")[:16],
        "length": keys(length, "global_batch_size", "max_steps"),
        "optimizer": keys("optimizer", "lr", "weight_decay", "ema"),
        "seed": config.get("seed"),
        "status": status,
        "shown here": traced.checkpoint.name if traced else "no checkpoint",
        "started": started and f"{started[:16].replace('T', ' ')} UTC",
        "hardware": start.get("hardware"),
        "processes": start.get("processes"),
        "commit": commit[:12] + (CHANGES if commit.endswith(CHANGES) else ""),
        "torch": start.get("torch"),
    }
    if len(run.starts) > 1:
        steps = ", ".join(str(entry["step"]) for entry in run.starts)
        rows["starts"] = f"{len(run.starts)}, at training steps {steps}"
    return [(name, "not recorded" if value in (None, "") else str(value)) for name, value in rows.items()]


def _results_table(run: RunRecord) -> dict[str, Any]:
    # (metric, its name for readers, (value, confidence interval) for each test set)
    rows = [
        (metric, written_name(metric), [_cell(values, metric) for values in run.evaluation.values()])
        for metric in metric_names(run.evaluation)
        if "@" not in metric and "_after_step_" not in metric and metric != "count"
    ]
    counts = [f"{values.get('count', 0):,.0f}" for values in run.evaluation.values()]
    return {"sets": list(run.evaluation), "counts": counts, "rows": rows}


def _cell(values: Mapping[str, Any], metric: str) -> tuple[str, str]:
    value = values.get(metric)
    if not isinstance(value, (int, float)):
        return str(value or ""), ""
    low, high = (values.get(with_suffix(metric, end)) for end in INTERVAL_ENDS)
    interval = f"{low:.3f} to {high:.3f}" if low is not None and high is not None else ""
    return written_value(metric, value), interval


def learning_charts(run: RunRecord) -> list[Chart]:
    """Draws the charts over training steps: loss, accuracy, learning rate and others.

    A metric that the log lacks gets no chart.
    """

    def trained(metric: str, name: str = "") -> Line:
        return Line(name, *run.curve(f"train/{metric}"), role="second")

    def tested(metric: str, split: str, word: str) -> list[Line]:
        lines, sets = [], run.eval_sets(split)
        for index, set_name in enumerate(sets):
            role = "accent" if split == "eval" and index == 0 else f"series{(index + 2) % 8 + 1}"
            label = word if len(sets) == 1 else f"{word}, {set_name}"
            curve = run.curve(f"{split}/{set_name}/{metric}")
            lines.append(Line(label, *curve, role=role, has_dots=True))
        return lines

    def curves(metric: str) -> list[Line]:
        of_test, of_validation = tested(metric, "eval", "test"), tested(metric, "validation", "validation")
        return [trained(metric, "training"), *of_test, *of_validation]

    steps = [trained("steps", "training"), *tested("act_steps", "eval", "test")]
    solved = curves("exact_accuracy")
    after_first = run.curve("train/exact_accuracy_after_step_1")
    solved.insert(1, Line("training, after one thinking step", *after_first, role="series2"))
    log, share, zero = {"log_y": True}, {"share": True}, {"from_zero": True}
    of_solved = (
        "Fraction of puzzles with every cell right. Training: when the model halts, and after the first "
        "thinking step of every puzzle."
    )
    of_prediction = "How often the model predicts correctly whether the answer is right."
    arch = run.config.get("arch")
    of_steps = "The model halts every puzzle."
    if isinstance(arch, dict) and arch.get("halt_exploration_prob"):
        of_steps = "Training: randomly chosen puzzles must think longer. Test: the model halts every puzzle."
    table = [
        ("Loss", curves("lm_loss"), log, "Cross-entropy per cell."),
        ("Puzzles solved", solved, share | zero, of_solved),
        ("Cells right", curves("accuracy"), share, "Fraction of right cells in a puzzle."),
        ("Thinking steps until halting", steps, {}, of_steps),
        ("Halting value right", curves("q_halt_accuracy"), share, of_prediction),
        (
            "Halting loss",
            curves("q_halt_loss"),
            log,
            "Binary cross-entropy of the predicted probability that the answer is right.",
        ),
        *((written_name(name), curves(name), {}, "") for name in run.other_metrics),
        *(
            (written_name(name), curves(name), {"share": is_share(name)}, "")
            for name in run.evaluator_metrics
        ),
        ("Gradient norm", [trained("grad_norm")], log, "Before clipping, if any."),
        ("Throughput", [trained("examples_per_second")], zero, "Examples per second, summed over processes."),
        ("Learning rate", [trained("lr")], zero, "Learning rate of the dense weights."),
    ]
    drawn = [
        line_chart(title, lines, x_label="training steps", caption=caption, **options)
        for title, lines, options, caption in table
    ]
    return [chart for chart in drawn if chart]


def thinking_charts(run: RunRecord, traced: TracedPuzzles | None) -> list[Chart]:
    """Draws charts of how the model solves test puzzles.

    There is a chart of the accuracy after each thinking step, one of the number of steps until the model
    halts, and one of how well the model predicts whether its answer is right. If the run has a file
    scaling.json (results of evaluate.py with several numbers of steps or samples), there is also a chart of
    these accuracies for each test set. A chart without data is left out.

    traced: Some test puzzles, and the answers of the model to them. None if there are none.
    """
    drawn: list[Chart | None] = [_accuracy_over_steps(run, traced)]
    if traced:
        right, wrong = halting_histogram(traced)
        num_labelled = sum(right) + sum(wrong)
        judge = "at the end of the search" if traced.is_search else "by the model"
        caption = f"With halting {judge}, {sum(right):,} of {num_labelled:,} puzzles are right."
        if num_never := int((traced.has_labels & ~traced.trace.wants_to_halt.any(axis=1)).sum()):
            caption += f" The last bar includes those that never halt: {num_never:,}."
        stacks = [("right", "good", right), ("wrong", "bad", wrong)]
        if num_labelled:
            drawn.append(bar_chart("Halting steps", stacks, x_label="thinking step", caption=caption))
        if judged := reliability(traced):
            caption = (
                "A calibrated model lies on the diagonal. Larger dots stand for more answers. "
                f"Expected calibration error: {judged[1]:.3f}."
            )
            drawn.append(reliability_chart("Calibration", judged[0], caption=caption))
    sets = run.scaling["sets"] if run.scaling else {}
    for set_name, content in sets.items():
        by = next(iter(content["corners"][0]["ways"]))
        title = "Accuracy over compute" + (f", {set_name}" if len(sets) > 1 else "")
        caption = f"Compute: thinking steps times samples. Of several samples, {by} selects the answer."
        drawn.append(compute_chart(title, content["corners"], by, has_oracle=False, caption=caption))
    return [chart for chart in drawn if chart]


def _accuracy_over_steps(run: RunRecord, traced: TracedPuzzles | None) -> Chart | None:
    lines, key = [], "exact_accuracy_after_step_"
    for index, (set_name, values) in enumerate(run.evaluation.items()):
        matches = {metric: re.fullmatch(f"{key}([1-9][0-9]{{0,5}})", metric) for metric in values}
        found = {int(match[1]): values[metric] for metric, match in matches.items() if match}
        steps = sorted(found)
        shares = [found[step] for step in steps]
        count = independent_count(values)
        ends = [wilson_interval(share, count) for share in shares] if count else []
        name = set_name if len(run.evaluation) > 1 else ""
        role = "accent" if index == 0 else f"series{index % 8 + 1}"
        low, high = [low for low, _ in ends], [high for _, high in ends]
        lines.append(Line(name, steps, shares, role, low=low, high=high, has_dots=len(steps) <= 20))
    caption = "Fraction of test puzzles solved after each thinking step, with a 95 % interval."
    if traced and not any(line.x for line in lines):  # the last evaluation has no such accuracy
        shares, count = accuracy_after_steps(traced), int(traced.has_labels.sum())
        lines = [Line("", range(1, len(shares) + 1), shares, has_dots=len(shares) <= 20)]
        caption = f"Fraction of the {count:,} puzzles on this page that are solved after each thinking step."
    options = {"share": True, "integer_x": True, "caption": caption}
    return line_chart("Accuracy over thinking steps", lines, x_label="thinking steps", **options)
