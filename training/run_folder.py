"""The run folder: its name, and the promise that one folder holds one run.

Takes no torch; only rank 0 writes here.
"""

import json
import os
import re
import tempfile
from pathlib import Path

from config.files import load_config
from config.schema import PretrainConfig, validate_config
from evaluation.checkpoint_folder import CONFIG_FILE

METRICS_FILE = "metrics.jsonl"

# What may differ between two starts of one run: it changes neither the schedule nor the order of the data.
# (The data itself may move; its fingerprint may not change.)
MAY_CHANGE = {
    "max_steps",
    "log_interval",
    "wandb_mode",
    "device",
    "backend",
    "compile",
    "cpu_threads",
    "init_timeout_seconds",
    "step_timeout_seconds",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "sync",
    "bucket_size_mb",
    "replica_check_interval",
    "profile",
    "checkpoint_every_eval",
    "eval_save_outputs",
    "data_path",
    "checkpoint_path",
    "project_name",
    "run_name",
}


def name_run(config: PretrainConfig) -> PretrainConfig:
    """Fills in project_name, run_name (drawn at random) and checkpoint_path where they are null."""
    run_name = config.run_name
    if run_name is None and config.checkpoint_path is not None:
        run_name = _as_name(Path(config.checkpoint_path).resolve().name)
    elif run_name is None:
        import coolname

        run_name = coolname.generate_slug(2)
    data_name = _as_name(Path(config.data_path[0]).resolve().name)
    project_name = config.project_name or f"{config.arch.name}-{data_name}"
    checkpoint_path = config.checkpoint_path or str(Path("checkpoints") / project_name / run_name)
    names = {"project_name": project_name, "run_name": run_name, "checkpoint_path": checkpoint_path}
    return validate_config(PretrainConfig, {**config.model_dump(), **names})


def _as_name(folder_name: str) -> str:
    """A folder's name as the name of a run: any folder will do."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", folder_name).lstrip("_.+-") or "run"


def open_run_folder(config: PretrainConfig) -> Path:
    """Makes the run folder. ValueError where it cannot be written, or holds a run with another config."""
    folder = Path(config.checkpoint_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CONFIG_FILE).exists():
            _check_same_run(load_config(PretrainConfig, folder / CONFIG_FILE), config, folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write into the run folder {folder} ({error.strerror or error}): "
            "choose another checkpoint_path"
        ) from None
    return folder


def _check_same_run(before: PretrainConfig, now: PretrainConfig, folder: Path) -> None:
    old, new = _flat(before.model_dump()), _flat(now.model_dump())
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    differing = [key for key in differing if key.partition(".")[0] not in MAY_CHANGE]
    if differing:
        changes = ", ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in differing)
        raise ValueError(f"{folder} holds a run with another config ({changes}): choose another run_name")


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that it is there whole or as before."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def cut_metrics_back(folder: Path, *, step: int) -> bool:
    """Drops the lines of metrics.jsonl after `step`; True where `step` has its line.

    What is dropped will be written anew.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return False
    kept, last = [], -1
    for line in path.read_text(errors="replace").splitlines():
        try:
            logged = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # the line that a killed process did not finish
            continue
        if logged <= step:
            kept.append(line)
            last = logged
    write_text(path, "".join(f"{line}\n" for line in kept))
    return last == step
