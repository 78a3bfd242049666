"""Finds a checkpoint on this machine or on the Hugging Face Hub, and describes it (`Checkpoint`).

A checkpoint is one of three:

- a folder step_<N> of a run
- a folder with model.safetensors and config.json that `python -m share push` wrote
- a file step_<N> that the authors of a model published. Their own code ("public code") wrote it

This file reads configs and verifies files. loading.py loads the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from checkpointing.files import (
    CONFIG_FILE,
    IDENTITIES_FILE,
    MANIFEST_FILE,
    SHARED_CONFIG_FILE,
    SHARED_WEIGHTS_FILE,
    TRAINED_FILE,
    WEIGHTS,
    CorruptCheckpointError,
    best_checkpoint,
    explain_missing,
    newest_checkpoint,
    read_state,
    step_of,
    verify_checkpoint,
)
from checkpointing.published import PUBLISHED_CONFIGS, PUBLISHED_WEIGHTS
from checkpointing.tensors import find_files
from config.architecture import Architecture, Fraction, Strict, architectures
from config.files import fill_defaults
from config.published import translate_config
from config.schema import Paths, Seed, StageConfig, Text, all_data_paths, validate_config
from distributed import log
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors
from distributed.world import is_main, local_rank
from runtime.plugins import paths_in, words_to_add
from runtime.reading import PointerFileError, read_json, read_yaml

if TYPE_CHECKING:  # the Hub's modules are imported only when needed
    from runtime.hub import Address

SHIPPED = Path(__file__).resolve().parent.parent / "weights"  # trained models in this repository
_LIGHTNING = ".ckpt"  # suffix of PyTorch Lightning's checkpoints, only for an error message
_PUBLISHED_KEYS = ("arch", "data_path", "global_batch_size")  # keys that mean the same in public configs
ARCH_WORD = "arch=checkpoint"  # argument of pretrain.py that copies the architecture of `init_from`


class _Recorded(Strict):
    """The keys of a run's config.yaml that `Checkpoint` needs, and their types."""

    arch: Architecture
    data_path: Paths
    curriculum: list[StageConfig]
    global_batch_size: PositiveInt
    seed: Seed
    validation_fraction: Fraction
    init_from: Text | None


class _Shared(Strict):
    """The keys of config.json that `Checkpoint` needs. `python -m share push` writes this file."""

    run: dict[str, Any]
    step: NonNegativeInt
    seq_len: PositiveInt
    dataset: dict[str, Any] | None
    selected_by: Literal["validation", "test"] | None
    has_averages: bool
    dataset_fingerprint: str | None = None
    test_fingerprint: str | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A description of a checkpoint, without its weights.

    Attributes:
        path: A step_<N> folder, or a file of weights with a config in the same folder.
        step: Training step. None if unknown.
        data_paths: Dataset folders of the training, as in the config.
        seq_len: Number of tokens of a puzzle in training. None if unknown.
        dataset_info: Description of the training data as JSON values (dataset/description.py). None if
            unknown.
        selected_by: If the checkpoint was found as RUN_FOLDER/best, the split that selected it as the best of
            its run, "validation" or "test". Otherwise None. A checkpoint that `share push` wrote keeps the
            value that it had before.
        has_averages: Whether the file contains only averaged weights (EMA), without the raw weights.
        address: Address on the Hugging Face Hub, with the commit. None if the checkpoint is local.
        fingerprint: Hash of the training datasets. None if unknown.
        test_fingerprint: Hash of their test splits. None if unknown.
        joins_repeats: Whether equal training puzzles were kept together: all of them were trained on, or all
            were held out for validation. False for runs of earlier versions.
        arch, global_batch_size, seed, validation_fraction, init_from: Keys of the run's config. For a file
            that the authors of a model published, the last three have their defaults.
    """

    path: Path
    step: int | None
    arch: Architecture
    data_paths: list[str]
    global_batch_size: int
    seq_len: int | None
    seed: int
    validation_fraction: float
    init_from: str | None
    dataset_info: dict[str, Any] | None = None
    selected_by: str | None = None
    has_averages: bool = False
    address: Address | None = None
    fingerprint: str | None = None
    test_fingerprint: str | None = None
    joins_repeats: bool = False

    def __str__(self) -> str:
        return str(self.address or self.path)

    @property
    def name(self) -> str:
        return self.path.name if self.step is None else f"step_{self.step}"

    @property
    def run_folder(self) -> Path:
        """Returns the folder for results, such as those of an evaluation.

        It is the folder that contains `path`, or checkpoints/hf/OWNER/NAME for a checkpoint of the Hugging
        Face Hub.
        """
        is_here = self.address is None
        return self.path.absolute().parent if is_here else Path("checkpoints", "hf", self.address.repo)

    @property
    def trained_file(self) -> Path | None:
        """Returns the path of trained_on.safetensors, which contains hashes of the training examples.

        This file may not exist. If the checkpoint is a file that the authors of a model published, returns
        None.
        """
        if self.path.name == SHARED_WEIGHTS_FILE:
            return self.path.with_name(TRAINED_FILE)
        return self.path / TRAINED_FILE if self.path.is_dir() else None

    @property
    def identities_file(self) -> Path | None:
        """Returns the path of identities.npz, which names the puzzle of each row of the embedding table.

        This file may not exist. If the checkpoint is a file that the authors of a model published, returns
        None.
        """
        is_of_run = self.path.name == SHARED_WEIGHTS_FILE or self.path.is_dir()
        return self.path.absolute().with_name(IDENTITIES_FILE) if is_of_run else None

    def find_data(self) -> list[Path]:
        """Returns the folder of each training dataset on this machine, in the order of `data_paths`.

        A relative path is looked up in the working directory, then in `run_folder`, then in the three folders
        above `run_folder`. The first folder that contains test/dataset.json is returned. If there is none,
        the path in the working directory is returned, although it may not exist.
        """
        above = (Path(), self.run_folder, *self.run_folder.resolve().parents[:3])
        choices = [[folder / name for folder in above] for name in self.data_paths]
        return [
            next((folder for folder in folders if (folder / "test" / "dataset.json").is_file()), folders[0])
            for folders in choices
        ]


def broadcast_checkpoints(locations: Sequence[str]) -> list[Checkpoint]:
    """Finds checkpoints, and returns their descriptions on all ranks. All ranks call it.

    Each node downloads a file from the Hugging Face Hub only once. An error ends all ranks with a message.

    locations: Paths of checkpoints or run folders, names of models in weights/, or addresses hf://OWNER/NAME.
    """
    checkpoints = None
    with collective_errors():
        if is_main():
            checkpoints = [find_checkpoint(location) for location in locations]
    checkpoints = broadcast_object(checkpoints)
    for is_first in (True, False):  # first one rank of each node downloads, then the others read the cache
        with collective_errors():
            if is_first == (local_rank() == 0) and not is_main():
                checkpoints = [
                    _on_this_node(checkpoint) if checkpoint.address else checkpoint
                    for checkpoint in checkpoints
                ]
    return checkpoints


def _on_this_node(checkpoint: Checkpoint) -> Checkpoint:
    from runtime.hub import download_file

    by_hand = _by_hand(checkpoint.address)
    path = download_file(checkpoint.address, checkpoint.path.name, by_hand=by_hand, say=log.info)
    return dataclasses.replace(checkpoint, path=path)


def find_checkpoint(location: str | Path) -> Checkpoint:
    """Finds a checkpoint, and downloads it if necessary. Verifies the files of a step_<N> folder.

    Args:
        location: A run folder (its newest checkpoint), RUN_FOLDER/best, a step_<N> folder, a step_<N> file
            that the authors of a model published, a folder that `share push` wrote, the name of a model in
            weights/, or hf://OWNER/NAME[@REVISION]. A link to one of them is followed.

    Returns:
        The description of the checkpoint.

    Raises:
        ValueError: If there is no checkpoint, or if a file that was read or verified is damaged.
    """
    if str(location).startswith("hf:/"):
        from runtime.hub import download, parse_address

        address = parse_address(location, kind="model")
        folder = download(address, _choose_files, by_hand=_by_hand(address), say=log.info)[0].parent
        return dataclasses.replace(
            find_checkpoint(folder), address=dataclasses.replace(address, revision=folder.name)
        )
    path = Path(location)
    if not path.exists() and len(path.parts) == 1 and (SHIPPED / path / SHARED_WEIGHTS_FILE).is_file():
        path = SHIPPED / path
    if path.name == "best" and path.parent.is_dir() and not path.exists():
        path, selected_by = best_checkpoint(path.parent)
        return dataclasses.replace(_read_checkpoint(path, step_of(path)), selected_by=selected_by)
    if not path.exists():
        shipped = ""
        if step_of(path) is None or not path.parent.is_dir():
            names = sorted(file.parent.name for file in SHIPPED.glob(f"*/{SHARED_WEIGHTS_FILE}"))
            shipped = f" Models in weights/: {', '.join(names)}."
        raise ValueError(f"checkpoint {explain_missing(path)}{shipped}")
    path = _follow_link(path)
    if (path / SHARED_WEIGHTS_FILE).is_file():
        return _read_shared(path / SHARED_WEIGHTS_FILE)
    if path.is_dir() and not find_files(path, WEIGHTS):
        path = _follow_link(_newest_step(path))
    step = step_of(path)
    if path.suffix == _LIGHTNING:
        reason = "was written by PyTorch Lightning, and its tensors fit no model of this repository"
        raise ValueError(f"checkpoint {path} {reason}. Train a model with pretrain.py.")
    if step is None and path.name != PUBLISHED_WEIGHTS:
        raise ValueError(f"checkpoint {path} is not named step_<N> or step_<N>.pt. Rename it.")
    return _read_checkpoint(path, step)


def _follow_link(path: Path) -> Path:
    # Results go into the run folder of a link's target. A link to a file is kept if the name of the target
    # has no step (example: a file in the cache of the Hub), or if the folder of the link contains the config.
    target = path.resolve() if path.is_symlink() else path
    if target.is_dir():
        return target
    has_config = any(path.with_name(name).is_file() for name in PUBLISHED_CONFIGS)
    return target if step_of(target) is not None and not has_config else path


def _by_hand(address: Address) -> str:
    return f"download its files from {address.url} by hand into a folder, and pass that folder"


def _choose_files(names: list[str]) -> list[str]:
    shared = [SHARED_CONFIG_FILE, SHARED_WEIGHTS_FILE]
    for chosen in (shared, *([config, _newest_published(names)] for config in PUBLISHED_CONFIGS)):
        if set(chosen) <= set(names):
            more = sorted({TRAINED_FILE, IDENTITIES_FILE}.intersection(names)) if chosen is shared else ()
            return [*chosen, *more]
    published = f"{PUBLISHED_CONFIGS[0]} and step_<N> or {PUBLISHED_WEIGHTS}"
    raise ValueError(f"contains no checkpoint. Expected {' and '.join(shared)}, or {published}.")


def _newest_step(folder: Path) -> Path:
    # Without a step, returns a .ckpt file of PyTorch Lightning, so that `find_checkpoint` can refuse it.
    if newest := newest_checkpoint(folder):
        return newest
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    newest = folder / _newest_published(names)
    if newest.is_file():
        return newest
    for name in names:
        if name.endswith(_LIGHTNING):
            return folder / name
    raise ValueError(f"no checkpoint step_<N> in {folder}. Pass a run folder, or a step_<N> folder in one.")


def _newest_published(names: list[str]) -> str:
    steps = [name for name in names if "/" not in name and step_of(Path(name)) is not None]
    return max(steps, key=lambda name: step_of(Path(name)), default=PUBLISHED_WEIGHTS)


def _read_shared(path: Path) -> Checkpoint:
    config_path = path.with_name(SHARED_CONFIG_FILE)
    try:
        values = read_json(config_path)
        values = {key: values[key] for key in _Shared.model_fields if key in values}
    except PointerFileError:
        raise
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config_path} cannot be read ({error})") from None
    where = f"{config_path} is not from `python -m share push`, so the checkpoint cannot be read"
    shared = validate_config(_Shared, values, where=where)
    fields = shared.model_dump(exclude={"run", "dataset", "dataset_fingerprint"})
    fields["fingerprint"] = shared.dataset_fingerprint
    fields |= _read_recorded(shared.run, config_path)
    return Checkpoint(path, **fields, dataset_info=shared.dataset)


def _read_recorded(config: dict[str, Any], path: Path) -> dict[str, Any]:
    config = fill_defaults(config)
    arch, named = config.get("arch"), paths_in(config)
    if named and isinstance(arch, dict) and str(arch.get("name")) not in architectures():
        raise ValueError(
            f"{path}: the model {arch.get('name')!r} is defined by a plugin. If you trust the plugin, add "
            f"{words_to_add(named)}."
        )
    values = {key: config.get(key) for key in _Recorded.model_fields}
    fields = dict(validate_config(_Recorded, values, where=str(path)))
    data_paths = all_data_paths(fields.pop("data_path"), fields.pop("curriculum"))
    return fields | {"data_paths": data_paths}


def _read_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Describes a step_<N> folder of a run, or a file of weights that the authors of a model published.

    If the folder contains a manifest, verifies its files. Raises CorruptCheckpointError if one is damaged.

    step: Training step N. None if unknown.
    """
    if path.is_file():
        beside = [path.absolute().with_name(name) for name in PUBLISHED_CONFIGS]
        config_path = next(filter(Path.is_file, beside), beside[0])
        config = translate_config(read_yaml(config_path), where=str(config_path))
        config = {name: value for name, value in config.items() if name in _PUBLISHED_KEYS}
        return Checkpoint(path, step, seq_len=None, **_read_recorded(config, config_path))
    if (path / MANIFEST_FILE).is_file():  # a folder with only weights has no manifest
        try:
            verify_checkpoint(path)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}. Choose another checkpoint of the run.") from None
    config, state = read_yaml(path / CONFIG_FILE), read_state(path)
    return Checkpoint(
        path,
        step,
        seq_len=state.get("seq_len"),
        dataset_info=state.get("dataset"),
        fingerprint=state.get("dataset_fingerprint"),
        test_fingerprint=state.get("test_fingerprint"),
        joins_repeats=state.get("joins_repeats") is True,
        **_read_recorded(config, path / CONFIG_FILE),
    )
