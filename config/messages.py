"""The texts about the config: `--help`, generated from the YAML files, and one-line error messages."""

import difflib
import itertools
import re
import shlex
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

from config.architecture import ArchConfig, architectures
from config.files import FOLDER, load_arch_defaults, load_defaults, other_files
from config.published import HINTS
from config.texts import quoted

SEVERAL_RUNS = "Use search.py sampler=grid for all combinations of values such as lr=1e-3,2e-3 seed=0,1,2"

_WIDTH = 110
_COMMENT_COLUMN = 40
_KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: (?P<value>[^#]+?))?(?: *# (?P<comment>.*))?")
# Command lines of programs that always run as one process.
_COMMANDS = {"solve": "python solve.py", "search": "python search.py", "page": "python -m share page"}
_USUAL_NAMES = {"learning_rate": "lr", "batch_size": "global_batch_size", "num_epochs": "epochs"}
_NOT_KEYS = ("defaults", "name")  # name: set by arch=..., not by a key
_MOST_USED = (  # keys of pretrain.py, in addition to experiment and arch
    *("data_path", "validation_fraction", "global_batch_size", "seed", "gradient_accumulation_steps"),
    *("epochs", "eval_interval", "train_steps", "eval_steps", "max_steps", "init_from", "evaluators"),
    *("optimizer", "lr", "weight_decay", "ema", "run_name", "checkpoint_path", "keep_best", "report"),
    *("wandb_mode", "device", "compile"),
)
_MORE = """
--help all               all keys, including those of the models
--help KEY               all about a key or a group of keys, such as keep_best, H_cycles or arch.loss
--help arch=trm          the keys of a model
--help experiment        the experiments. --help experiment=demo shows one of them
"""
_DRY_RUN = (
    "pretrain.py --cfg job --world-size 64 KEY=VALUE ... shows what a run needs on each of 64 processes."
)


def explain_mistakes(schema: type[pydantic.BaseModel], mistakes: pydantic.ValidationError) -> str:
    """Converts pydantic's errors about a config to one line, such as "lr=-1 should be ...".

    The message is about one key: the first unknown one, otherwise the first with an error.
    """
    errors = mistakes.errors(include_url=False)
    error = next((mistake for mistake in errors if mistake["type"] == "extra_forbidden"), errors[0])
    key = _key(schema, error)
    if error["type"] == "extra_forbidden":
        return explain_unknown_key(schema, key)
    if error["type"] == "missing":
        values = error["input"]
        name = values.get("name") if isinstance(values, dict) and key.startswith("arch.") else None
        if name not in architectures() or load_arch_defaults(name):
            return f"key {key!r} is missing"
        return (
            f"key {key!r} is missing. Set it in the YAML file of {name}. To read older checkpoints, set a "
            "default in the class Config of the plugin."
        )
    if error["type"] == "value_error":  # from `mistakes`, with keys in the message
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key and f"{key}." not in message else message
    inner = [name for name in _keys((schema,)) if name.startswith(f"{key}.")]
    if inner and error["type"] in ("model_type", "model_attributes_type"):
        return f"{key} is a group of keys, not a value. Set one of them, such as {inner[0]}={error['input']}."
    if error["type"] == "string_pattern_mismatch":
        expected = "start with a letter or digit, and contain only letters, digits and _ . + -"
    else:
        messages = [mistake["msg"] for mistake in errors if _key(schema, mistake) == key]
        messages = ["a text, in quotes" if "valid string" in text else text for text in messages]
        expected = "be " + " or ".join(message.removeprefix("Input should be ") for message in messages)
        expected = re.sub("^be (List|String) should ", "", expected)
    value = "null" if error["input"] is None else repr(error["input"])
    in_steps = ". To set the length in steps, set train_steps" if (key, value) == ("epochs", "null") else ""
    return f"{key}={value} should {expected}{in_steps}"


def explain_composition(schema: type[pydantic.BaseModel], error: Exception) -> str:
    """Converts an error of Hydra or OmegaConf about the command line to a message of one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    if unknown := re.match(r"Could not override '(.+)'", lines[0]):
        return explain_unknown_key(schema, unknown[1])
    if several := re.match(r"(?:Ambiguous value for argument|Sweep parameters) ('.+')", lines[0]):
        more = f" {SEVERAL_RUNS}." if schema.YAML == "pretrain" else ""
        return f"{several[1]} has several values. Write a list as [1,2].{more}"
    if "Available options in" in str(error):
        start = next(index for index, line in enumerate(lines) if line.startswith("Available options in"))
        names = lines[start + 1 : lines.index("Config search path:")]
        hint = "If a folder of yours contains this file, pass --config-dir FOLDER."
        return f"{lines[0].rpartition(': ')[2]}. Choose from {', '.join(names)}. {hint}"
    if key := getattr(error, "full_key", None):
        return f"{key}: {lines[0]}"
    if merged := re.match(r"Error merging override (.+)", lines[0]):
        return f"cannot use {merged[1]!r} ({str(error.__cause__).partition(chr(10))[0]})"
    if "invalid literal for int()" in lines[0]:
        return f"a list has no keys ({lines[0]}). Set the complete list, such as [1,2]."
    if override := getattr(error, "override", None):
        if curly := re.search("[\u2018-\u201f]", override):
            advice = "Type straight quotes (' or \")."
            return f"cannot read {override!r}: it contains the curly quote {curly[0]}. {advice}"
        key, equals, value = override.partition("=")
        is_text = value[:1] not in ("", "[", "{")
        typed = shlex.quote(f"{key}={quoted(value)}") if is_text else "\"key=[{name:'a=b'}]\""
        hint = f" Quote a text with special characters: {typed}" if equals else ""
        return f"cannot read {override!r} ({lines[0]}). Write overrides as key=value.{hint}"
    return lines[0]


def explain_unknown_key(schema: type[pydantic.BaseModel], key: str) -> str:
    """Returns the message for an unknown key, such as "unknown key 'lrs', did you mean 'lr'?"."""
    known = _keys((schema,))
    if key in HINTS:
        return f"unknown key {key!r}: {HINTS[key]}"
    if key in known:
        names = [name for name, arch in architectures().items() if key in _keys((arch,), "arch.")]
        message = f"key {key!r} does not belong to the chosen arch, but to {', '.join(names)}."
        public = " For the key loops of the public URM code, set arch.halt_max_steps."
        return message + public * (key == "arch.loops")
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    usual = {name: known_key for name, known_key in _USUAL_NAMES.items() if known_key in known}
    near = [usual.get(name, name) for name in difflib.get_close_matches(key, [*known, *usual], n=1)] or same
    return f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _key(schema: type[pydantic.BaseModel], error: dict[str, Any]) -> str:
    # Returns the dotted name of the wrong key, such as "arch.H_cycles".
    *path, last = error["loc"] or ("",)
    names = {name for key in _keys((schema,)) for name in key.split(".")}
    if error["type"] == "extra_forbidden":
        names.add(last)
    parts = [part for part in (*path, last) if isinstance(part, int) or part in names]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _keys(models: Sequence[type[pydantic.BaseModel]], prefix: str = "") -> list[str]:
    # Keys of nested classes have names such as "arch.H_cycles".
    annotations: dict[str, list[Any]] = {}
    for model in models:
        for name, field in model.model_fields.items():
            members = typing.get_args(field.annotation) or [field.annotation]
            members = architectures().values() if members == [ArchConfig] else members
            annotations.setdefault(name, []).extend(members)
    keys = []
    for name, members in annotations.items():
        is_model = [isinstance(member, type) and issubclass(member, pydantic.BaseModel) for member in members]
        submodels = list(dict.fromkeys(itertools.compress(members, is_model)))
        keys += [prefix + name, *(_keys(submodels, f"{prefix}{name}.") if submodels else ())]
    return keys


def check_data_folders(folders: Sequence[str], *, experiment: str | None, key: str = "data_path") -> None:
    """Raises ValueError if a dataset folder is missing.

    The comments of the files config/experiment/*.yaml contain commands that build datasets. If one of them
    builds the missing folder, the message contains this command. If the folder is the default of data_path
    and `experiment` is None, the message contains the command of experiment=demo instead.

    experiment: Name of an experiment, such as "demo" for config/experiment/demo.yaml. Only the command for
        this experiment is used. If None, the commands of all experiments are used.
    key: Config key that names the folders, for the message.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            problem = "is a file" if Path(folder).exists() else "does not exist"
            several = f". Several folders are {key}=[{folder}]." if "," in folder else ""
            every = sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml"))
            names = [experiment] if experiment else every
            commands = [made for name in names if (made := _data_of(name))]
            matching = [made for made in commands if f"--output-dir {folder} " in f"{made} "]
            hint = f"Build it: {matching[0]}" if matching else f"Build it (docs/data.md), or set {key}"
            if experiment and commands and not matching:
                hint += f". The data of experiment={experiment}: {commands[0]}"
            if experiment is None and folder == load_defaults("pretrain")["data_path"]:
                problem = f"(the default of {key}) {problem}"
                hint = (
                    f"Set {key}=FOLDER. Or set experiment=demo, and first build its data: {_data_of('demo')}"
                )
            raise ValueError(f"data folder {folder} {problem}. {hint}{several}")


def _data_of(experiment: str) -> str | None:
    # The comment `# Data: ...` of an experiment contains the command that builds its dataset.
    path = FOLDER / "experiment" / f"{experiment}.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"^# Data: *((?:.*\\\n)*.*)$", text, re.MULTILINE)
    if found is None:
        return None
    command = re.sub(r"\s*\\\n#\s*", " ", found[1])
    other = re.match(r"as for experiment=(\w+)", command)
    return _data_of(other[1]) if other else command


def help_text(program: str, topic: str = "", *, folders: Sequence[str] = ()) -> str:
    """Returns the text of --help: the keys of a program with their defaults and meanings.

    Raises ValueError for an unknown topic.

    program: "pretrain", "evaluate", "solve", "page" or "search".
    topic: Argument after --help: "all", "experiment", "experiment=NAME", "arch=NAME" or a key. If it is "",
        the text contains the most used keys of pretrain, or all keys of another program.
    folders: Folders with more YAML files, from --config-dir.
    """
    path, (kind, _, name) = FOLDER / f"{program}.yaml", topic.partition("=")
    files = [Path(folder, kind, f"{name}.yaml") for folder in (FOLDER, *folders)]
    file = next(filter(Path.is_file, files), None)
    if program == "pretrain" and kind in ("arch", "experiment") and file:
        return "\n".join(_help_of_arch(file)) if kind == "arch" else file.read_text(encoding="utf-8").rstrip()
    if program == "pretrain" and kind in ("arch", "experiment") and name:
        raise ValueError(
            f"--help {topic}: config/{kind} has no {name}. For a file of yours, add --config-dir FOLDER. Run "
            "--help all for a list."
        )
    if topic == "experiment":
        return "\n".join(_help_of_experiments())
    if topic not in ("", "all") and not name:
        return "\n".join(_help_of_key(program, topic))
    command = _COMMANDS.get(program, f"[torchrun --nproc-per-node N] {program}.py")
    lines = [f"{command} [KEY=VALUE ...]", "", *_wrap(_title(path))]
    shown = "--cfg job KEY=VALUE ... shows the complete config of a command."
    if program == "pretrain" and topic != "all":
        lines += ["", "What to train", *_row("experiment=NAME", "a file of config/experiment, such as demo")]
        lines += _row("arch=hrm", f"the model: {' | '.join(architectures())}")
        lines += _keys_of(path, only=_MOST_USED, is_brief=True)
        return "\n".join([*lines, _MORE, shown, _DRY_RUN])
    lines += _keys_of(path)
    if program == "pretrain":
        for arch in architectures():
            lines += ["", *_help_of_arch(FOLDER / "arch" / f"{arch}.yaml")]
        lines += ["", *_help_of_experiments()]
    return "\n".join([*lines, "", shown])


def _help_of_arch(file: Path) -> list[str]:
    return [*_wrap(f"arch={file.stem}: {_title(file)}"), *_keys_of(file, prefix="arch.")]


def _help_of_experiments() -> list[str]:
    lines = ["Experiments. Their files contain the command, the data and the result. You can change any key."]
    for file in sorted((FOLDER / "experiment").glob("*.yaml")):
        lines += _row(f"experiment={file.stem}", _title(file))
    return lines


def _help_of_key(program: str, key: str) -> list[str]:
    files = [(FOLDER / f"{program}.yaml", "")]
    if program == "pretrain":
        files += [(file, "arch.") for file in sorted((FOLDER / "arch").glob("*.yaml"))]
    known = [f"{prefix}{name}" for file, prefix in files for name, *_ in _entries(file)]
    chosen = {full_key for full_key in known if full_key == key or full_key.startswith(f"{key}.")}
    chosen = chosen or {full_key for full_key in known if full_key.endswith(f".{key}")}
    if not chosen:
        raise ValueError(f"config: unknown key {key!r}. Run --help all for a list of the keys.")
    if len(chosen) > 1 and not all(full_key.startswith(f"{key}.") for full_key in chosen):
        raise ValueError(f"config: several keys end in {key!r}. Choose one: {', '.join(sorted(chosen))}.")
    texts: dict[tuple[str, ...], list[str]] = {}  # {help lines: names of the files with these lines}
    for file, prefix in files:
        names = [full_key.removeprefix(prefix) for full_key in chosen if full_key.startswith(prefix)]
        if found := tuple(filter(None, _keys_of(file, prefix=prefix, only=names))):
            texts.setdefault(found, []).append(file.stem)
    return [line for lines, stems in texts.items() for line in (f"{', '.join(stems)}:", *lines)]


def _title(path: Path) -> str:
    comments = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def _entries(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields (key, value, comment, heading) for each key of a YAML file of config/.

    The line "lr: 1e-4 # learning rate" gives ("lr", "1e-4", "learning rate", heading). The heading is the
    last comment line before the key. If the file has a list `defaults` of other files, also yields the keys
    of these files, except for those that the file itself sets. If such a key has no comment in the file, it
    gets the comment of the other file.
    """
    others = [entry for other in other_files(path) for entry in _entries(other)]
    comments = {key: comment for key, _, comment, _ in others}
    sections: list[str] = []
    heading, keys = "", set()
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("# "):
            heading = line[2:]
        if not (found := _KEY.fullmatch(line)):
            continue
        del sections[len(found["indent"]) // 2 :]
        sections.append(found["key"])
        if found["value"] and sections[0] not in _NOT_KEYS:
            keys.add(key := ".".join(sections))
            yield key, found["value"], found["comment"] or comments.get(key, ""), heading
    yield from (entry for entry in others if entry[0] not in keys)


def _keys_of(
    path: Path, *, prefix: str = "", only: Sequence[str] | None = None, is_brief: bool = False
) -> Iterator[str]:
    """Yields the help lines for the keys of a YAML file with defaults, under their headings.

    prefix: Text before each key, such as "arch.".
    only: Keys to show. If None, all.
    is_brief: Whether to show only the first sentence about each key.
    """
    for heading, entries in itertools.groupby(_entries(path), key=lambda entry: entry[3]):
        chosen = [entry for entry in entries if only is None or entry[0] in only]
        if heading and chosen:
            yield from ("", heading)
        for key, value, comment, _ in chosen:
            yield from _row(f"{prefix}{key}={value}", re.split(r"[;.] ", comment)[0] if is_brief else comment)


def _row(left: str, right: str) -> list[str]:
    lines = _wrap(right, indent=_COMMENT_COLUMN)
    if len(left) + 4 > _COMMENT_COLUMN:
        return [f"  {left}", *lines]
    return [f"  {left}".ljust(_COMMENT_COLUMN) + lines[0].lstrip(), *lines[1:]]


def _wrap(text: str, *, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent) or [""]
