"""The written names of metrics, for consoles, tables and pages. Files and loggers keep the metrics' names."""

from runtime.reading import printable

# {metric: written name}, if this is not the name of the metric with spaces
NAMES = {
    "exact_accuracy": "solved",
    "accuracy": "cells right",
    "wrong": "wrong",
    "undecided": "undecided",
    "lm_loss": "loss",
    "q_halt_accuracy": "halting value right",
    "q_halt_loss": "halting loss",
    "q_continue_loss": "continuing loss",
    "steps": "thinking steps",
    "act_steps": "steps until halting",
    "act_exact_accuracy": "solved at halting",
    "calls": "network calls",
    "gigaflops_per_step": "GFLOP per thinking step",
    "count": "puzzles",
    "distinct_count": "different puzzles",
    "trained_on_rate": "fraction of training puzzles known",
    "unseen/count": "not trained on",
    "arc/count": "tasks",
    "arc/outputs/count": "labeled test inputs",
    "arc/test_inputs": "test inputs",
    "arc/votes": "votes",
    "identifiers_common": "identifiers known",
    "identifiers_missing": "identifiers unknown",
    "identifiers_other_task": "identifiers of other tasks",
    "identifiers_additional": "identifiers without puzzles",
    "selected_by": "selected on",
    "forward_dtype": "number format",
    # LDT in training
    "keep_loss": "candidate loss",
    "bad": "bad boards",
    "conflict_recall": "bad boards found",
    "conflict_precision": "precision of bad boards",
    "kills": "candidates removed",
    "wrong_kills": "candidates wrongly removed",
    "left": "boards that left",
    "solved": "boards solved",
    "solved_right": "solved boards right",
}
_AFTER_STEP, _UNSEEN, _OUTPUTS, _ANY = "exact_accuracy_after_step_", "unseen/", "arc/outputs/", "any_"


def written_name(metric: str) -> str:
    """Returns the name of a metric for people, such as "solved" for "exact_accuracy".

    An unknown metric keeps its name, without the ending "_accuracy", and with spaces instead of underscores.
    """
    if metric in NAMES:
        return NAMES[metric]
    metric, setting, values = metric.partition("@steps=")
    if setting:
        return f"{written_name(metric)}{setting}{values}"
    if metric.startswith(_AFTER_STEP):
        return f"solved after step {printable(metric.removeprefix(_AFTER_STEP))}"
    for start, text in (
        (_UNSEEN, "{} of unseen puzzles"),
        (_OUTPUTS, "{} of test inputs"),
        (_ANY, "{} by any"),
    ):
        if metric.startswith(start):
            return text.format(written_name(metric.removeprefix(start)))
    evaluator, slash, name = metric.rpartition("/")
    if slash and name in NAMES:
        return f"{NAMES[name]}, {printable(evaluator)}"
    return printable(name.removesuffix("_accuracy").replace("_", " "))


def both_names(metric: str) -> str:
    """Returns a metric's name for people and its name in files: "solved (exact_accuracy)".

    If both names are equal, returns one.
    """
    written = written_name(metric)
    return written if written == metric else f"{written} ({printable(metric)})"
