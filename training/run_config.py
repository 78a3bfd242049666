"""The config of a run: read it from a command line, fill in names, and compare it with a stored config.

Only rank 0 calls these functions. The other ranks receive the config (`distributed.launch`).
"""

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coolname
import torch

from checkpointing.files import CONFIG_FILE, checkpoints_in, newest_checkpoint
from checkpointing.finding import ARCH_WORD, find_checkpoint
from config.compose import check_overrides, chosen_experiment, compose_config, compose_values
from config.files import fill_defaults, flatten, format_of
from config.messages import check_data_folders
from config.schema import PretrainConfig, keys_that_may_change, validate_config
from distributed import log
from distributed.backend import choose_device
from distributed.number_format import Choice, choose_format
from distributed.world import agent_serves_store, is_under_torchrun, may_restart, value_of_launch, world_size
from runtime.reading import read_yaml
from training import dry_run
from training.initial import overrides_of_arch
from training.layout import check_layout
from training.loggers import find_loggers

FORMAT_KEY = "arch.forward_dtype"


def compose_run(
    arguments: Sequence[str] | None = None, *, processes: int | None = None
) -> PretrainConfig | None:
    """Reads the config of a run from command-line arguments, and checks it.

    If run_name is not set, chooses one. Replaces `forward_dtype=auto` by "bfloat16" or "float32". Does not
    read the data.

    Args:
        arguments: Arguments such as ["lr=1e-3"]. If None, those of this process.
        processes: Number of processes of the run. If None, the current number of processes.

    Returns:
        The config. None after --help or --cfg, because they only print.

    Raises:
        ValueError: If the config is wrong.
    """
    overrides = name_arch(sys.argv[1:] if arguments is None else arguments)
    options = {"notice": log.warning, "dry_run": _describe_dry_run}
    config, experiment = compose_config(PretrainConfig, overrides, **options), chosen_experiment(overrides)
    if config is None:
        return None
    check_data_folders(config.data_paths, experiment=experiment)
    check_data_folders(config.test_data_path or [], experiment=experiment, key="test_data_path")
    check_layout(config, processes or world_size())
    find_loggers(config)
    return fix_format(name_run(config, experiment=experiment))


def name_arch(arguments: Sequence[str]) -> list[str]:
    """Replaces the argument arch=checkpoint by arguments for the architecture of the checkpoint `init_from`.

    Returns all arguments. Example: "arch=trm" and "++arch.hidden_size=128" replace "arch=checkpoint". Without
    arch=checkpoint, the arguments do not change. Raises ValueError if `init_from` is not a checkpoint.
    """
    check_overrides(arguments)
    if ARCH_WORD not in arguments:
        return list(arguments)
    others = [argument for argument in arguments if not re.match(r"[+~]*arch\b", argument)]
    location = compose_values(PretrainConfig, others).get("init_from")
    if not isinstance(location, str):
        raise ValueError(f"config: {ARCH_WORD} needs a checkpoint. Set init_from=PATH.")
    arch = find_checkpoint(location).arch
    named = [f"++{argument}" for argument in overrides_of_arch(arch, {})]
    return [f"arch={arch.name}", *named, *(argument for argument in arguments if argument != ARCH_WORD)]


def draw_name() -> str:
    """Returns a random name for a run, such as "brave-otter". Only rank 0 calls it.

    If torchrun restarts the processes, the run keeps its name. Raises ValueError if torchrun may restart the
    processes, but cannot store the name.
    """
    name = coolname.generate_slug(2)
    if not is_under_torchrun():
        return name
    if agent_serves_store():
        return value_of_launch("run_name", name)
    if may_restart():
        raise ValueError(
            "run_name is not set, and torchrun may restart this run, which would then get another name. Set "
            "run_name=NAME."
        )
    return name


def name_run(config: PretrainConfig, *, experiment: str | None) -> PretrainConfig:
    """Returns the config with values for project_name, run_name and checkpoint_path.

    Keys that have a value keep it. If neither run_name nor checkpoint_path is set, the run_name is random.

    experiment: Name of the experiment (config/experiment). If wandb_group has no value, it becomes this name.
        If None, wandb_group does not change.
    """
    run_name = config.run_name
    if run_name is None and config.checkpoint_path is not None:
        run_name = _as_name(Path(config.checkpoint_path).resolve().name)
    elif run_name is None:
        run_name = draw_name()
    data_name = _as_name(Path(config.data_path[0]).resolve().name)
    project_name = config.project_name or f"{config.arch.name}-{data_name}"
    checkpoint_path = config.checkpoint_path or str(Path("checkpoints", project_name, run_name))
    names = {"project_name": project_name, "run_name": run_name, "checkpoint_path": checkpoint_path}
    names["wandb_group"] = config.wandb_group or experiment
    return validate_config(PretrainConfig, {**config.model_dump(), **names})


def words_to_resume(config: PretrainConfig) -> str:
    """Returns the words that make a run's command continue the run, such as "run_name=first"."""
    key = config.folder_key
    words = [f"{key}={getattr(config, key)}"]
    if config.resume == "never":
        words.append("resume=auto")
    return shlex.join(words)


def _as_name(folder_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", folder_name).lstrip("_.+-") or "run"


class StoredConfig(NamedTuple):
    values: dict[str, Any]
    folder: Path


def read_stored_config(run_folder: Path) -> StoredConfig | None:
    """Reads config.yaml of a run.

    If the file in the run folder is missing, or is empty after a power loss, reads that of the newest
    checkpoint. Returns (content of the file, folder that contains the file), or None if there is no file.
    """
    checkpoint = newest_checkpoint(run_folder)
    for folder in (run_folder, checkpoint):
        path = None if folder is None else folder / CONFIG_FILE
        if path is None or not path.exists():
            continue
        if folder == run_folder and checkpoint is not None and not path.read_bytes().strip(b"\0 \n"):
            log.warning(f"{path} is empty. The config of {checkpoint.name} is used.")
            continue
        return StoredConfig(read_yaml(path), folder)
    return None


def describe_changes(before: dict[str, Any], now: PretrainConfig, *, also: Collection[str] = ()) -> str:
    """Returns the changes that prevent a run from resuming with another config, as text.

    Returns "" if there are none. Example: "seed: 0 -> 1, arch.L_cycles: 6 -> 4".

    before: Values in the run's config.yaml. An older version may have written it, with fewer keys.
    now: The config of the command line. With `forward_dtype=auto`, every stored dtype is accepted.
    also: Keys to compare although they may change when a run resumes.
    """
    old, new = flatten(fill_defaults(before)), flatten(now.model_dump())
    if new[FORMAT_KEY] == "auto":
        old.pop(FORMAT_KEY, None)
    may_change = keys_that_may_change(PretrainConfig).difference(also)
    fixed = sorted(key for key in old if key.partition(".")[0] not in may_change)
    return ", ".join(f"{key}: {old[key]} -> {new.get(key)}" for key in fixed if old[key] != new.get(key))


def fix_format(config: PretrainConfig) -> PretrainConfig:
    """Returns the config with a dtype (bfloat16 or float32) in place of `forward_dtype=auto`.

    Logs the dtype that replaces `auto`, and the reason. Warns if a run that continues computes in bfloat16,
    and bfloat16 is slow on this machine. The config key `checkpoint_path` must have a value.
    """
    choice = find_format(config)
    if config.arch.forward_dtype == "auto":
        log.info(f"{FORMAT_KEY}=auto: {choice.name}, because {choice.reason}")
    if choice.name == "bfloat16" and _stored_in(config) is not None:
        rule = choose_format(choose_device(config.device))
        if rule.name == "float32":
            log.warning(f"bfloat16 is slow on this machine: {rule.reason}. {_way_out(config)}")
    return with_format(config, choice.name)


def with_format(config: PretrainConfig, name: str) -> PretrainConfig:
    return config.model_copy(update={"arch": config.arch.model_copy(update={"forward_dtype": name})})


def find_format(config: PretrainConfig) -> Choice:
    """Returns the dtype in which a run computes ("bfloat16" or "float32"), and the reason.

    If the config key `arch.forward_dtype` is not `auto`, its value is the dtype. For `auto`, the first of
    these rules that applies decides:

    - If the run folder or `resume=PATH` contains a run, the dtype of that run.
    - If the weights of `init_from` were trained in float32, float32.
    - Otherwise, the dtype that is fast on this machine (`choose_format` in distributed/number_format.py).
    """
    if config.arch.forward_dtype != "auto":
        return Choice(config.arch.forward_dtype, f"{FORMAT_KEY} is given")
    if (stored := _stored_in(config)) is not None:
        return Choice(format_of(stored.values), f"the run in {stored.folder} started with it")
    if config.init_from is not None and find_checkpoint(config.init_from).arch.forward_dtype == "float32":
        return Choice("float32", f"init_from={config.init_from} was trained in it")
    return choose_format(choose_device(config.device))


def _stored_in(config: PretrainConfig) -> StoredConfig | None:
    stored = None if config.checkpoint_path is None else read_stored_config(Path(config.checkpoint_path))
    if stored is not None:
        return stored
    if config.resume in ("auto", "must", "never"):
        return None
    return read_stored_config(Path(config.resume))


def _way_out(config: PretrainConfig) -> str:
    # Example: "To train in float32, set resume=.../step_10 run_name=NEW arch.forward_dtype=float32."
    checkpoints = checkpoints_in(Path(config.checkpoint_path))
    start = f"resume={checkpoints[-1]} " if checkpoints else ""
    is_new = not checkpoints and config.resume not in ("auto", "must", "never")
    name = "" if is_new else f"{config.folder_key}=NEW "  # a new run gets its own name
    return f"To train in float32, set {start}{name}{FORMAT_KEY}=float32."


def _describe_dry_run(config: PretrainConfig, world_size: int) -> str:
    config = name_run(config, experiment=None)
    if config.device == "cuda" and not torch.cuda.is_available() and config.arch.forward_dtype == "auto":
        choice = Choice("bfloat16", "device=cuda is assumed to compute in it")
    else:
        choice = find_format(config)
    text = dry_run.describe(with_format(config, choice.name), world_size)
    return f"{text}\n\nThe estimates assume {FORMAT_KEY}={choice.name}, because {choice.reason}."
