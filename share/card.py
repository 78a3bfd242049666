"""Renders the model card (card.md.jinja) with results, commands and origin of a trained model."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.files import STARTS_FILE
from checkpointing.finding import Checkpoint
from config.files import changed_words, load_arch_defaults, load_defaults, word
from dataset.build import builders
from dataset.files import read_builder
from dataset.kinds.kind import Kind
from evaluation.metric_tables import (
    is_number,
    is_share,
    metric_cell,
    metric_names,
    metrics_by_set,
    with_intervals,
)
from evaluation.names import written_name
from evaluation.questions import find_info
from evaluation.results import EVALUATION_FILE
from runtime.hub import Address, is_address, parse_address
from runtime.metrics_file import read_rows
from runtime.plugins import defined, plugin_names, plugin_of
from runtime.reading import read_json
from training.code import git

# {option of a builder: separator of its parts}. Other lists repeat the option for each item.
_JOINED = {"clues": "-", "easier": "-", "max_size": "x", "fields": ",", "symmetries": ","}
Metrics = Mapping[str, Mapping[str, float]]  # {set: {metric: value}}


def model_card(
    checkpoint: Checkpoint,
    *,
    address: Address,
    license: str,
    shared: Mapping[str, Any],
    state: Mapping[str, Any],
    data_names: Sequence[str],
    plugins: Sequence[str],
    training_plugins: Sequence[str],
    **values: Any,
) -> str:
    """Returns the model card of a trained model as text, for the Hugging Face Hub.

    address: Address of the repository on the Hub, or the name of a model in weights/.
    shared: Content of the config.json that is shared with the weights.
    state: Content of the checkpoint's state.json.
    data_names: Paths of the dataset folders in the commands that the card shows.
    plugins: Files of the plugins that the model needs, from `plugins_of`.
    training_plugins: Files of all plugins of the run.
    values: More variables for the template card.md.jinja.
    """
    from huggingface_hub import ModelCard, ModelCardData

    run, metrics, arch = shared["run"], read_metrics(checkpoint), checkpoint.arch.name
    data_paths = run["data_path"]
    data_name = " and ".join(_plain(Path(path).name) for path in data_paths)
    title = f"{checkpoint.arch.heading()} on {data_name}"
    name, paper = checkpoint.arch.paper or (arch, None)
    kind = (found := _find_kind(checkpoint)) and found.name
    folders = zip(checkpoint.find_data(), data_names, strict=True)
    commands = [_build_command(folder, name=name) for folder, name in folders]
    source = run.get("init_from") or ""
    versions = state["versions"] if isinstance(state.get("versions"), dict) else {}
    data = ModelCardData(
        license=license,
        tags=[arch, *([kind] if kind else []), "reasoning", "recursive-reasoning"],
        base_model=parse_address(source, kind="model").repo if is_address(source) else None,
        model_name=title,
        eval_results=_eval_results(metrics, data_name=data_name, kind=kind) or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        title=title,
        model=f"[{name}](https://arxiv.org/abs/{paper})" if paper else name,
        address=address,
        data_name=data_name,
        kind=kind,
        reads_any_length=checkpoint.arch.reads_any_length,
        sets=list(metrics),
        written_name=written_name,
        rows={
            metric: [metric_cell(of_set, metric).strip() for of_set in metrics.values()]
            for metric in metric_names(metrics)
        },
        origin=_origin(),
        commit=_plain(commit_of(checkpoint) or ""),
        software=", ".join(f"{_plain(name)} {_plain(version)}" for name, version in versions.items()),
        fingerprint=_plain(shared["dataset_fingerprint"]),
        num_processes=_plain(state.get("world_size")),
        data_commands=[command for command in commands if command],
        data_path=shlex.quote(word("data_path", data_paths if len(data_paths) > 1 else data_paths[0])),
        command=_train_command(run, training_plugins),
        plugin=" " + shlex.quote(word("plugins", list(plugins))) if plugins else "",
        plugins=_listed(plugins),
        training_plugins=_listed(training_plugins),
        **shared,
        **values,
    )
    return str(card)


def read_metrics(checkpoint: Checkpoint) -> Metrics:
    """Returns the test results of a checkpoint: {test set: {metric: value}}.

    The metrics include the ends of confidence intervals, such as "exact_accuracy_low". They are read from the
    log of the training (metrics.jsonl). If the log has no evaluation at the step of the checkpoint, they are
    read from the results of evaluate.py. If there are none, returns {}. Test sets without "exact_accuracy"
    are left out. Raises ValueError if the results of evaluate.py are damaged.
    """
    metrics: dict[str, dict[str, float]] = {}
    for row, _ in read_rows(checkpoint.run_folder):
        if row["step"] == checkpoint.step:
            metrics |= metrics_by_set(row)
    path = checkpoint.run_folder / "evaluation" / checkpoint.name / EVALUATION_FILE
    if not metrics and path.is_file():
        try:
            metrics = read_json(path)
            if not isinstance(metrics, dict):
                raise ValueError(f"{path} is not a JSON object of metrics")
        except ValueError as error:
            raise ValueError(f"{error}. Evaluate the checkpoint again.") from None
    numbers = {
        _plain(set_name): {_plain(metric): value for metric, value in values.items() if is_number(value)}
        for set_name, values in metrics.items()
        if isinstance(values, dict)
    }
    return {name: with_intervals(values) for name, values in numbers.items() if "exact_accuracy" in values}


def _eval_results(metrics: Metrics, *, data_name: str, kind: str | None) -> list[Any]:
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="other",
            task_name=f"{kind or 'puzzle'} solving",
            dataset_type=data_name.partition(" ")[0],
            dataset_name=data_name,
            dataset_config=set_name,
            dataset_split="test",
            metric_type="exact_match" if metric == "exact_accuracy" else "accuracy",
            metric_name=metric,
            metric_value=value,
        )
        for set_name, values in metrics.items()
        for metric, value in values.items()
        if is_share(metric)
    ]


def plugins_of(checkpoint: Checkpoint) -> list[str]:
    """Returns the files of the imported plugins that define the model or its kind of puzzle."""
    kind = _find_kind(checkpoint)
    return plugin_names([plugin_of("Config", type(checkpoint.arch)), kind and plugin_of("KIND", kind)])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{_plain(name)}`" for name in names)


def _find_kind(checkpoint: Checkpoint) -> Kind | None:
    try:
        return find_info(checkpoint, None).kind
    except ValueError:
        return None


def _build_command(folder: Path, *, name: str) -> str | None:
    """Returns the shell command that built a dataset, or None if it is unknown or not safe to show.

    Example: "python -m dataset.build sudoku --output-dir data/demo --generate 4000".

    name: Value of --output-dir in the command.
    """
    builder = read_builder(folder)
    if builder is None or builder["name"] not in builders():
        return None
    text = json.dumps(builder["arguments"], ensure_ascii=False)
    are_options = all(re.fullmatch("[a-z][a-z_]*", argument) for argument in builder["arguments"])
    if not are_options or not text.isprintable() or "\\" in text:  # not safe in a shell command
        return None
    argv, comment = [f"python -m dataset.build {builder['name']} --output-dir {shlex.quote(name)}"], ""
    arguments = {key: value for key, value in builder["arguments"].items() if key != "package"}
    if builder["name"] == "arc" and arguments.get("generate") is not None:  # derived from --generate
        arguments = {key: value for key, value in arguments.items() if key not in ("source", "evaluate")}
    of_builder = [plugin_of("KIND", kind) for kind in defined("KIND") if kind.name == builder["name"]]
    argv += [f"--plugin {shlex.quote(file)}" for file in plugin_names(of_builder)]
    for key, value in arguments.items():
        option = f"--{key.replace('_', '-')}"
        if value is True:
            argv.append(option)
        elif isinstance(value, dict) and key == "options":  # option of reasoning_gym
            argv += [option] * bool(value) + [shlex.quote(f"{name}={item}") for name, item in value.items()]
        elif isinstance(value, dict):  # {name of a file or a subset: digest}
            argv.append(f"{option} SOURCE")
            parts = [f"{part} (sha256 {str(digest)[:12]}...)" for part, digest in value.items()]
            comment = f"    # SOURCE: {', '.join(parts)}"
        elif value is not None and value is not False:
            values = value if isinstance(value, list) else [value]
            values = [_JOINED[key].join(map(str, values))] if key in _JOINED and values else values
            for part in map(str, values):  # "=": argparse takes a value such as -. for an option
                argv.append(f"{option}{'=' if part.startswith('-') else ' '}{shlex.quote(part)}")
    return " ".join(argv) + comment


def _plain(text: Any) -> str:
    """Returns a text that is safe in Markdown, HTML and shell commands, for texts from files of other people.

    Special characters are replaced by "-". Only the first 200 characters are kept.
    """
    return re.sub(r"[^\w.+@/=, -]", "-", str(text))[:200]


def _train_command(run: Mapping[str, Any], plugins: Sequence[str]) -> str:
    """Returns the command that trains with the config `run`: "python pretrain.py arch=trm lr=0.001 ..."."""
    arch = run["arch"]["name"]
    of_arch = load_arch_defaults(arch)
    run = {**run, "plugins": list(plugins)}
    words = changed_words(run, load_defaults("pretrain") | {"arch": of_arch or {"name": arch}})
    folder = [] if of_arch else ["--config-dir FOLDER"]
    return " ".join(["python pretrain.py", *folder, shlex.join([f"arch={arch}", *words])])


def commit_of(checkpoint: Checkpoint) -> str | None:
    """Returns the git commit of the code that saved the checkpoint, or None if unknown."""
    starts = [start for start, _ in read_rows(checkpoint.run_folder, STARTS_FILE)]
    commits = [start.get("git_commit") for start in starts if start["step"] < checkpoint.step]
    return commits[-1] if commits else None


def _origin() -> str | None:
    url = git("config", "--get", "remote.origin.url").strip()
    # A URL with another "@" may contain a password.
    return url if url.startswith(("https://", "git@")) and "@" not in url.removeprefix("git@") else None
