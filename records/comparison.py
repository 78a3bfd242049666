"""Compares models that are trained with the same number of operations.

    python -m records.comparison --folder checkpoints/comparison

For each model, the program trains several seeds and evaluates them, also with more thinking steps or samples
per puzzle. records/comparison.yaml lists models and trainings. If it lists several learning rates for a
model, the program first chooses the best one. The folder keeps data and runs, so the same command continues
after an interruption. After each training, the program writes comparison.json, README.md and comparison.svg.
It skips trainings that are in comparison.json. To continue on another machine, copy only this file, for
example from records/comparison/. If records/comparison.yaml has a new learning rate, the program tries it
too. If the new one is better, the program deletes the results of the model with the old one. If another
setting of a model has changed, the program refuses the folder. All trainings and evaluations have the same
number format (bfloat16 or float32): that of comparison.json, else that of --dtype, else the fast one on the
machine of the first training.
"""

import runtime.environment  # noqa: F401

import dataclasses
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import commit, run_main
from config.compose import compose_overrides
from config.schema import PretrainConfig, keys_that_may_change
from evaluation.intervals import mean_and_deviation, mean_interval
from records.machine import FORMATS, describe_machine, find_format, training_device, write_format
from records.rungs import RUNGS
from records.seeds import Rerun, final_evaluation
from report.charts import Line, chart_file, line_chart
from report.run import read_run
from runtime.command_line import OneLineParser
from runtime.formats import NumberFormat
from runtime.reading import read_json, read_yaml
from runtime.writing import write_json, write_text
from training.data import open_data
from training.model import count_steps
from training.run_config import FORMAT_KEY

_PLAN = Path(__file__).with_name("comparison.yaml")
_JSON, _PAGE, _PICTURE = "comparison.json", "README.md", "comparison.svg"
_FORMER_FORMAT: NumberFormat = "bfloat16"  # number format of a comparison.json that does not state it
_TITLE = "accuracy over GFLOP of an answer"
_HEAD = """# Models at equal training operations

![{title}]({picture})

All models are trained with the same number of operations (PF: 1e15) on puzzles of a rung of the records, and
evaluated on 1000 other puzzles. Accuracy: fraction of puzzles with every cell right, as mean +- standard
deviation over seeds, with the 95 % interval of the mean. lr: learning rate. Thinking longer: four times as
many steps. LDT searches: instead of one chain of at most 30 moves, four chains of at most 40 moves, with
guesses at a cell with the fewest candidates. In the picture, this is the right end of a line.
Processor-hours: training and evaluation, with other programs running.
Number format: {forward_dtype}. The last training ran on: {cpu}, instruction set: {instruction_set}.

    python -m records.comparison --folder checkpoints/comparison
"""
_LEARNING_RATES = """
## Learning rates

Tried with {petaflops:g} PF and seed {seed} on `{rung}`. The accuracies are of held-out training puzzles
(`validation_fraction={validation_fraction:g}`). The tables above are of the best learning rate of each model.

"""
_COLUMNS = {  # {column of the page: function of the results of all seeds of a model}
    "model": lambda rows: rows[0]["model"],
    "parameters": lambda rows: f"{rows[0]['parameters']:,}",
    "lr": lambda rows: f"{rows[0]['lr']:g}",
    "accuracy": lambda rows: _mean((row["accuracies"][0] for row in rows), interval=True),
    "GFLOP of an answer": lambda rows: f"{_costs(rows)[0]:.3g}",
    "thinking longer": lambda rows: _mean((row["accuracies"][1] for row in rows), interval=True),
    "its GFLOP": lambda rows: f"{_costs(rows)[1]:.3g}",
    "training PF": lambda rows: f"{rows[0]['petaflops']:.3g}",
    "steps": lambda rows: f"{rows[0]['steps']:,}",
    "processor-hours": lambda rows: _mean(row["processor_hours"] for row in rows),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser("records.comparison", description=__doc__.partition("\n")[0])
    keeps = "folder that keeps data and runs"
    parser.add_argument("--folder", type=Path, required=True, metavar="PATH", help=keeps)
    dtype = "number format: %(choices)s (default: that of the folder, or the fast one on this machine)"
    parser.add_argument("--dtype", choices=FORMATS, help=dtype)
    arguments = parser.parse_args(argv)
    compare(read_yaml(_PLAN), arguments.folder.absolute(), dtype=arguments.dtype)


def compare(plan: dict[str, Any], folder: Path, *, dtype: NumberFormat | None = None) -> None:
    """Runs the trainings of a comparison of models, and skips completed ones.

    Writes the results after each training. Raises ValueError if the folder contains results in another dtype,
    or with other settings.

    plan: Content of records/comparison.yaml: models and trainings.
    dtype: Dtype of the trainings, such as "bfloat16". If None, the dtype of earlier trainings in the folder.
    If there are none, the dtype in the config of the trainings, or else the fast one on this machine.
    """
    before = read_json(folder / _JSON) if (folder / _JSON).exists() else {"results": []}
    results, tuned = before["results"], before.setdefault("tuning", {})
    settings = before.get("settings", {})  # earlier versions did not store them
    for model_name in plan["models"]:
        now = _settings(plan, model_name)
        is_used = tuned.get(model_name) or any(row["model"] == model_name for row in results)
        if is_used and (changes := _describe_changes(settings.get(model_name, now), now)):
            raise ValueError(
                f"{folder} contains results of {model_name} with other settings ({changes}). Choose another "
                "--folder."
            )
        settings[model_name] = now
    config = compose_overrides(
        PretrainConfig, [*_overrides(plan, next(iter(plan["models"]))), "data_path=data"]
    )
    device = training_device(config, processes=plan["processes"])
    stored = before.get("forward_dtype", _FORMER_FORMAT) if results or tuned else None
    chosen = find_format(folder, config, device, requested=dtype, stored=stored)
    today = {**describe_machine(device), "commit": commit()}
    of_last = {key: before.get(key, "unknown") for key in today} if results or tuned else today
    content = of_last | {"forward_dtype": chosen, "settings": settings, "tuning": tuned, "results": results}
    if not results:
        write_format(folder, chosen)
    rates = {}
    for model_name, model in plan["models"].items():
        rows = tuned.setdefault(model_name, [])
        is_tuned = len(model["rates"]) > 1
        for lr in model["rates"]:
            if is_tuned and lr not in (row["lr"] for row in rows):
                rows.append(tune(plan, model_name, lr, folder, forward_dtype=chosen))
                content |= today
                write_results(plan, content, folder)
                print(f"{model_name}: {rows[-1]}", flush=True)
        best = max(rows, key=lambda row: (row["exact_accuracy"], row["accuracy"] or 0), default=None)
        rates[model_name] = best["lr"] if best else model["rates"][0]
        results[:] = [row for row in results if row["model"] != model_name or row["lr"] == rates[model_name]]
        write_results(plan, content, folder)
    for training in plan["trainings"]:
        title = f"{training['rung']}, {training['petaflops']:g} PF"
        # The first seed of all models comes first, so that an unfinished comparison compares all of them.
        for seed in training["seeds"]:
            for model_name in plan["models"]:
                key = {"training": title, "model": model_name, "seed": seed}
                if any(key.items() <= row.items() for row in results):
                    continue
                lr = f"lr={rates[model_name]}"
                rerun = build_rerun(plan, model_name, training, folder, lr, forward_dtype=chosen)
                results.append(train(rerun, seed) | key | {"lr": rates[model_name]})
                content |= today
                write_results(plan, content, folder)
                print("{training}, {model}, seed {seed}: {accuracies}".format(**results[-1]), flush=True)


def tune(
    plan: dict[str, Any], model_name: str, lr: float, folder: Path, *, forward_dtype: NumberFormat
) -> dict[str, float | None]:
    """Trains a model with one learning rate, and evaluates it on held-out training puzzles.

    Returns a dict with "lr", "exact_accuracy" (fraction of puzzles), "accuracy" (fraction of cells, None for
    LDT), "petaflops" (operations of the training, in 1e15) and "processor_hours" (CPU time of the training).

    plan, model_name: Content of records/comparison.yaml, and a key of its section `models`.
    forward_dtype: Dtype, unless the plan sets one for the model.
    """
    tuning = plan["tuning"]
    overrides = (f"lr={lr}", f"validation_fraction={tuning['validation_fraction']}")
    rerun = build_rerun(plan, model_name, tuning, folder, *overrides, forward_dtype=forward_dtype)
    rerun.check([tuning["seed"]])
    trained = rerun.train(tuning["seed"], data_seconds=0)
    rows = rerun.rows(tuning["seed"], data_seconds=0)
    names = ("exact_accuracy", "accuracy")
    measured = {name: final_evaluation(rows, name, of="validation") for name in names}
    return {"lr": lr, **measured, **{key: trained[key] for key in ("petaflops", "processor_hours")}}


def build_rerun(
    plan: dict[str, Any],
    model_name: str,
    training: dict[str, Any],
    folder: Path,
    *overrides: str,
    forward_dtype: NumberFormat,
) -> Rerun:
    """Prepares one training of the comparison. The method `train` of the result starts it.

    Builds the dataset if it is missing. Chooses the number of training steps so that the training costs the
    planned number of operations.

    plan, model_name: Content of records/comparison.yaml, and a key of its section `models`.
    training: Entry of the plan with the benchmark task ("rung") and the number of operations ("petaflops").
    overrides: More key=value arguments of pretrain.py.
    forward_dtype: Dtype, unless the plan sets one for the model.
    """
    model, rung = plan["models"][model_name], RUNGS[training["rung"]]
    data = Rerun(rung, folder / rung.name, source=None)
    data.build_data()
    name = re.sub(r"\W+", "_", " ".join((model_name, f"{training['petaflops']:g}", *overrides)))
    overrides = (*_overrides(plan, model_name), *overrides, f"data_path={data.folder / 'data'}")
    if compose_overrides(PretrainConfig, overrides).arch.forward_dtype == "auto":
        overrides = (*overrides, f"{FORMAT_KEY}={forward_dtype}")
    config = compose_overrides(PretrainConfig, [*overrides, "train_steps=1"])
    opened = open_data(config)
    of_step = opened.schedule.petaflops(1, count_steps(config, opened.dataset.metadata))
    overrides = (*overrides, f"train_steps={round(training['petaflops'] / of_step)}")
    options = {"test_time": model["longer"], "processes": plan["processes"]}
    rung = dataclasses.replace(rung, trainings=("seed={seed}",), **options)
    return Rerun(rung, data.folder / name, source=None, overrides=overrides)


def train(rerun: Rerun, seed: int) -> dict[str, Any]:
    """Trains and evaluates a model with one seed. Returns a dict with accuracies and costs.

    "accuracies" (fractions of solved puzzles) and "gigaflops" (1e9 operations per puzzle) are lists with two
    values. The first value is measured with the usual number of thinking steps, the second one with more
    steps or samples of each puzzle.
    """
    rerun.check([seed])
    found, longer = rerun.train(seed, data_seconds=0), rerun.reason_longer(seed)[-1]
    trained = read_run(rerun.run_folder(seed))
    steps, gigaflops = final_evaluation(trained.rows, "steps"), trained.starts[-1]["gigaflops_per_step"]
    return found | {
        "parameters": trained.num_parameters,
        "accuracies": [found["exact_accuracy"], longer["exact_accuracy"]],
        "gigaflops": [gigaflops * steps, gigaflops * longer["calls"]],
    }


def write_results(plan: dict[str, Any], content: dict[str, Any], folder: Path) -> None:
    """Writes comparison.json (`content`), the page README.md and the picture comparison.svg."""
    write_json(folder / _JSON, content)
    results = content["results"]
    text, panels = _HEAD.format(title=_TITLE, picture=_PICTURE, **content), []
    names = dict.fromkeys([*plan["models"], *(row["model"] for row in results)])
    roles = {name: f"series{index}" for index, name in enumerate(names, 1)}
    for training in dict.fromkeys(row["training"] for row in results):
        of_training = [row for row in results if row["training"] == training]
        groups = {name: [row for row in of_training if row["model"] == name] for name in names}
        groups = {name: group for name, group in groups.items() if group}
        rows = [[write(group) for write in _COLUMNS.values()] for group in groups.values()]
        text += f"\n## {training}\n\n" + _table(list(_COLUMNS), rows)
        lines = []
        for model, group in groups.items():
            means = [fmean(shares) for shares in zip(*(row["accuracies"] for row in group), strict=True)]
            lines.append(Line(model, _costs(group), means, roles[model], has_dots=True))
        options = {"share": True, "from_zero": True, "log_x": True}
        chart = line_chart(training, lines, x_label="GFLOP of an answer", **options)
        legend = (f'<tspan fill="var(--{role})">{escape(name)}</tspan>' for name, role in chart.legend)
        panels.append(((training, " ".join(legend)), chart))
    tried = [
        [name, f"{row['lr']:g}", f"{row['exact_accuracy']:.3f}", _cells_right(row)]
        for name, rows in content["tuning"].items()
        for row in sorted(rows, key=lambda row: row["lr"])
    ]
    if tried:  # earlier versions did not store them
        text += _LEARNING_RATES.format(**plan["tuning"])
        text += _table(["model", "lr", "exact accuracy", "accuracy of cells"], tried)
    if panels:
        write_text(folder / _PICTURE, chart_file(panels, title=_TITLE))
    write_text(folder / _PAGE, text)


def _overrides(plan: dict[str, Any], model_name: str) -> list[str]:
    model = plan["models"][model_name]
    shared = [override for group in model["groups"] for override in plan["groups"][group]]
    return [*plan["common"], *shared, *model["words"]]


def _settings(plan: dict[str, Any], model_name: str) -> dict[str, Any]:
    # The settings that change the results of a model, except learning rates and trainings.
    words = dict(word.partition("=")[::2] for word in _overrides(plan, model_name))
    may_change = keys_that_may_change(PretrainConfig)
    settings = {key: value for key, value in words.items() if key.partition(".")[0] not in may_change}
    settings |= {f"tuning.{key}": value for key, value in plan["tuning"].items()}
    return settings | {"longer": plan["models"][model_name]["longer"]}


def _describe_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return ", ".join(f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys)


def _costs(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [fmean(costs) for costs in zip(*(row["gigaflops"] for row in rows), strict=True)]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [columns, ["---"] * len(columns), *rows])


def _cells_right(row: dict[str, Any]) -> str:
    return "" if row["accuracy"] is None else f"{row['accuracy']:.3f}"


def _mean(values: Iterable[float], *, interval: bool = False) -> str:
    numbers = list(values)
    mean, deviation = mean_and_deviation(numbers)
    text = f"{mean:.3f}"
    if deviation is not None:
        text += f" +- {deviation:.3f}"
        if interval:
            low, high = mean_interval(numbers)
            text += f" [{max(low, 0):.3f}, {min(high, 1):.3f}]"
    return text


if __name__ == "__main__":
    run_main(main)
