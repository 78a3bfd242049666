"""Uploads a trained model to the Hugging Face Hub, or writes the same files into a folder."""

import argparse
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpointing.files import (
    CONFIG_FILE,
    EMA_WEIGHTS,
    IDENTITIES_FILE,
    SHARED_CONFIG_FILE,
    SHARED_WEIGHTS_FILE,
    STATE_FILE,
    TRAINED_FILE,
    read_state,
)
from checkpointing.finding import Checkpoint, find_checkpoint
from checkpointing.loading import load_weights
from checkpointing.sizes import sizes_in
from checkpointing.tensors import find_files
from config.files import fill_defaults, word
from config.schema import PretrainConfig, keys_that_may_change
from dataset.build.writing import check_output_folder, has_keys, replaced_folder
from dataset.description import DatasetInfo
from dataset.identities import read_identities
from evaluation.leaks import find_trained
from runtime.command_line import OneLineParser, add_plugin_option, one_line_errors, warn
from runtime.hub import Address, client_errors, import_client, parse_address
from runtime.plugins import paths_in
from runtime.reading import read_yaml
from runtime.writing import write_json, write_text
from share.card import commit_of, model_card, plugins_of, read_metrics
from training.code import CHANGES

_CARD_FILE = "README.md"  # name that the Hub expects


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("share push"):
        push(_parse_options(arguments))


def push(options: argparse.Namespace) -> None:
    """Uploads a trained model to the Hugging Face Hub.

    With --dry-run, writes the files into a folder instead. Raises ValueError if an option is wrong or the
    upload fails.

    options: Arguments of the command line, from `_parse_options`.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo):
        raise ValueError(
            f"{options.repo!r} is not the name of a repository. Pass OWNER/NAME, without a revision: the "
            "files are committed to the main branch."
        )
    if not re.fullmatch(r"[a-z0-9.-]+", options.license):
        raise ValueError(
            f"--license {options.license!r} is not a license identifier of the Hub. Use one such as mit."
        )
    address = parse_address(f"hf://{options.repo}", kind="model")
    if options.dry_run is not None:
        by_push = {"is_made": is_shared, "maker": "share push", "key": "--dry-run"}
        destination = check_output_folder(options.dry_run, **by_push)
    checkpoint = find_checkpoint(options.run)
    if options.dry_run is not None:
        with replaced_folder(destination) as folder:
            write_files(folder, checkpoint, address, license=options.license)
        print(f"wrote the files to {options.dry_run}. To load them, set checkpoint={options.dry_run}.")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), checkpoint, address, license=options.license)
        url = upload(Path(folder), address, message=f"{checkpoint.name} of a run", is_private=options.private)
    print(f"pushed {checkpoint} to {url}. To load it, set checkpoint={address}.")


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("share push", description=__doc__)
    add_plugin_option(parser)
    run = "run folder (newest checkpoint), <run folder>/best, or <run folder>/step_<N>"
    parser.add_argument("run", metavar="RUN", help=run)
    repo = "repository on the Hub. It is created if it does not exist"
    parser.add_argument("repo", metavar="OWNER/NAME", help=repo)
    dry_run = "write the files to this folder, and upload nothing"
    parser.add_argument("--dry-run", type=Path, metavar="FOLDER", help=dry_run)
    parser.add_argument("--private", action="store_true", help="create a private repository")
    license = "license of the weights, an identifier of the Hub (default: apache-2.0, as the code)"
    parser.add_argument("--license", default="apache-2.0", metavar="ID", help=license)
    return parser.parse_args(arguments)


def is_shared(folder: Path) -> bool:
    """Returns whether `write_files` wrote the folder."""
    return has_keys(folder / SHARED_CONFIG_FILE, "run", "dataset_fingerprint", "has_averages")


def write_files(
    folder: Path,
    checkpoint: Checkpoint,
    address: Address | str,
    *,
    license: str,
    dtype: torch.dtype | None = None,
    data_path: str | None = None,
) -> None:
    """Writes the files of a shared model: weights, config.json and README.md (the model card).

    If hashes of the training examples or the names of the puzzles are known, also writes these. Raises
    ValueError if this code did not write the checkpoint.

    address: Address of the repository on the Hub, or the name of a model in weights/, for the model card.
    dtype: Dtype of the written weights. If None, the weights keep their dtype.
    data_path: Dataset folder that config.json and the model card name. If None, the data_path of the run.
    """
    state = read_state(checkpoint.path) if checkpoint.path.is_dir() else {}
    if "dataset_fingerprint" not in state or not isinstance(state.get("seq_len"), int):
        raise ValueError(
            f"{checkpoint} is not a checkpoint of this code. Pass a run folder, or a step_<N> in it."
        )
    plugins, needed = paths_in(read_yaml(checkpoint.path / CONFIG_FILE)), plugins_of(checkpoint)
    if not read_metrics(checkpoint):
        places = f"metrics.jsonl and evaluation/{checkpoint.name} of {checkpoint.run_folder}"
        missing = f"no accuracy of {checkpoint.name} found in {places}. The card will have no results"
        words = ["python", "evaluate.py", f"checkpoint={checkpoint}"]
        words += [word("plugins", plugins)] if plugins else []
        command = f"{shlex.join(words)} without output_dir"
        warn("share push", f"{missing}. To add them, run {command}.")
    if state.get("dataset") is not None:
        DatasetInfo.from_json(state["dataset"], where=f"{checkpoint.path / STATE_FILE}: dataset")
    if str(commit_of(checkpoint)).endswith(CHANGES):
        changes = f"the run had uncommitted code changes ({checkpoint.run_folder}/changes_*.diff)"
        warn(
            "share push",
            f"{changes}. The card shows this. Commit changes before a run that you want to share.",
        )
    weights = load_weights(checkpoint)
    shared = {
        "step": checkpoint.step,
        "seq_len": state["seq_len"],
        **sizes_in(weights, checkpoint.arch),
        "selected_by": checkpoint.selected_by,
        "has_averages": bool(find_files(checkpoint.path, EMA_WEIGHTS)),
        "dataset": state.get("dataset"),
        "dataset_fingerprint": state["dataset_fingerprint"],
        "test_fingerprint": state.get("test_fingerprint"),
        "run": _shared_config(checkpoint) | ({"data_path": [data_path]} if data_path else {}),
    }
    if needed:  # so that a program without them can say which ones it needs
        shared["run"]["plugins"] = needed
    num_weights = {"dense": 0, "of puzzles": 0}
    for name, tensor in weights.items():
        if not name.endswith("_init"):  # initial states are random, not trained
            num_weights["of puzzles" if name.startswith("puzzle_emb.") else "dense"] += tensor.numel()
    names = [data_path] if data_path else _without_absolute_paths(checkpoint.data_paths, "data_path")
    card = model_card(
        checkpoint,
        address=address,
        license=license,
        shared=shared,
        state=state,
        data_names=names,
        plugins=needed,
        training_plugins=_without_absolute_paths([Path(path).name for path in plugins], "plugins"),
        num_weights=num_weights,
        dtype=str(dtype).removeprefix("torch."),
    )
    if dtype is not None:
        weights = round_weights(weights, dtype)
    save_file(weights, folder / SHARED_WEIGHTS_FILE, metadata={"format": "pt"})
    write_json(folder / SHARED_CONFIG_FILE, shared)
    if (trained := find_trained(checkpoint)) is not None:
        (folder / TRAINED_FILE).write_bytes(trained.to_bytes())
    if (identities := read_identities(checkpoint.identities_file)) is not None:
        (folder / IDENTITIES_FILE).write_bytes(identities.to_bytes())
    write_text(folder / _CARD_FILE, card)


def round_weights(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in weights.items()
    }


def _shared_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = fill_defaults(read_yaml(checkpoint.path / CONFIG_FILE))
    dropped = keys_that_may_change(PretrainConfig) - {"data_path"}
    shared = {key: value for key, value in config.items() if key not in dropped}
    return {key: _without_absolute_paths(value, key) for key, value in shared.items()}


def _without_absolute_paths(value: Any, key: str) -> Any:
    """Shortens absolute paths in the value of a config key, to hide private names.

    Example: "/home/me/x" becomes "data/x" for the key data_path, otherwise "x". Raises ValueError if a text
    contains unprintable characters.
    """
    if not all(text.isprintable() for text in (str(key), value) if isinstance(text, str)):
        raise ValueError(
            f"{CONFIG_FILE} of the checkpoint: {key} contains unprintable characters. Remove them, or choose "
            "another checkpoint."
        )
    if isinstance(value, dict):
        return {inner: _without_absolute_paths(item, inner) for inner, item in value.items()}
    if isinstance(value, list):
        return [_without_absolute_paths(item, key) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return str(Path("data" if key == "data_path" else "", Path(value).name))
    return value


def upload(folder: Path, address: Address, *, message: str, is_private: bool) -> str:
    """Uploads the files of a folder in one commit. Returns the URL of the repository.

    Creates the repository if it does not exist. If the folder has no trained_on.safetensors or no
    identities.npz, the commit removes this file of an earlier push, because the file describes other weights.
    Raises ValueError if the upload fails, or if `is_private` is True and the repository exists and is public.
    """
    client = import_client()
    by_hand = "Use --dry-run FOLDER to write the files, and upload them from another machine"
    with client_errors(address, by_hand=by_hand):
        api = client.HfApi()
        api.create_repo(address.repo, private=is_private or None, exist_ok=True)
        info = api.repo_info(address.repo)
        if is_private and not info.private:
            raise ValueError(
                f"{address} already exists and is public. Make it private at {address.url}/settings."
            )
        files = sorted(folder.iterdir())
        operations = [client.CommitOperationAdd(path.name, str(path)) for path in files]
        present = {file.rfilename for file in info.siblings or ()} - {path.name for path in files}
        old = present.intersection((TRAINED_FILE, IDENTITIES_FILE))
        operations += [client.CommitOperationDelete(name) for name in sorted(old)]
        api.create_commit(address.repo, operations, commit_message=message)
    return address.url
