"""A trained model from a checkpoint of any origin: our folders, what `share push` makes of them, and the
files of the models' public code (`published`); on this machine or on the Hugging Face Hub.

Nothing in a checkpoint is executed: weights are safetensors, or a `torch.save`d dict read with
`weights_only=True`; configs are plain YAML, in which only names that are known here select anything.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from safetensors.torch import load_file
from torch import Tensor

from checkpointing.files import (
    CONFIG_FILE,
    EMA_WEIGHTS,
    MANIFEST_FILE,
    SHARED_CONFIG_FILE,
    SHARED_WEIGHTS_FILE,
    WEIGHTS,
    CorruptCheckpointError,
    best_checkpoint,
    newest_checkpoint,
    read_state,
    step_of,
    verify_checkpoint,
)
from checkpointing.published import PUBLISHED_CONFIGS, PUBLISHED_WEIGHTS, translate_config, translate_weights
from checkpointing.tensors import find_files, load_joined
from config.architecture import Architecture, Strict
from config.files import fill_defaults
from config.reading import read_json, read_yaml
from config.schema import Paths, StageConfig, all_data_paths, validate_config
from dataset.format import Metadata
from models import HaltingModel, build_model, network_class
from parallel import log
from parallel.collectives import broadcast_object
from parallel.errors import collective_errors
from parallel.process_group import is_main, local_rank

if TYPE_CHECKING:  # a run that begins from nothing loads nothing of the Hub
    from dataset.hub import Address

SHIPPED = Path(__file__).resolve().parent.parent / "weights"  # a folder for each model of the repository
_LIGHTNING = ".ckpt"
ARCH_WORD = "arch=checkpoint"  # of a command line


class _Recorded(Strict):
    """The keys that are read of a checkpoint's config; the rest of it says how it was trained."""

    arch: Architecture
    data_path: Paths
    curriculum: list[StageConfig]
    global_batch_size: PositiveInt


class _Shared(Strict):
    """The keys that are read of a config.json that `share push` wrote."""

    run: dict[str, Any]
    step: NonNegativeInt
    seq_len: PositiveInt
    dataset: dict[str, Any] | None
    selected_by: Literal["validation", "test"] | None
    has_averages: bool


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as evaluation needs it.

    path: a step_<N> folder, or a file of weights with its config beside it. step: None where it does not say
    so. data_paths: as the run's config names them. seq_len: of the data it was trained on; dataset_info: of
    that data (`dataset.description`), as JSON values; None where it does not say so. selected_by: the puzzles
    that chose it as the best of its run, validation or test; None for any other. has_averages: it has the
    averages (EMA) of the weights alone. address: where on the Hub it is, with the commit. fingerprint: of the
    content of its data, where a run of ours says so.
    """

    path: Path
    step: int | None
    arch: Architecture
    data_paths: list[str]
    global_batch_size: int
    seq_len: int | None
    dataset_info: dict[str, Any] | None = None
    selected_by: str | None = None
    has_averages: bool = False
    address: Address | None = None
    fingerprint: str | None = None

    def __str__(self) -> str:
        return str(self.address or self.path)

    @property
    def name(self) -> str:
        return self.path.name if self.step is None else f"step_{self.step}"

    @property
    def run_folder(self) -> Path:
        """The folder of its results: the run's own, and for one of the Hub checkpoints/hf/OWNER/NAME."""
        is_here = self.address is None
        return self.path.absolute().parent if is_here else Path("checkpoints", "hf", self.address.repo)

    def find_data(self) -> list[Path]:
        """Finds the recorded dataset folders: in the working directory, else in the run folder or one above.

        A folder counts only with a dataset in it: `dataset`, say, is also a folder of this repository.
        """
        above = (Path(), self.run_folder, *self.run_folder.resolve().parents[:3])  # where the run was started
        choices = [[folder / name for folder in above] for name in self.data_paths]
        return [
            next((folder for folder in folders if (folder / "test" / "dataset.json").is_file()), folders[0])
            for folders in choices
        ]


def broadcast_checkpoints(locations: Sequence[str]) -> list[Checkpoint]:
    """Finds checkpoints as `find_checkpoint`: rank 0 chooses and verifies them for all. All ranks call it.

    One of the Hub is downloaded once for each node. Where it fails, all ranks end with one line.
    """
    checkpoints = None
    with collective_errors():
        if is_main():
            checkpoints = [find_checkpoint(location) for location in locations]
    checkpoints = broadcast_object(checkpoints)
    for is_first in (True, False):  # of its node: it downloads, and the others then find all in the cache
        with collective_errors():
            if is_first == (local_rank() == 0) and not is_main():
                checkpoints = [_on_this_node(each) if each.address else each for each in checkpoints]
    return checkpoints


def _on_this_node(checkpoint: Checkpoint) -> Checkpoint:
    from dataset.hub import download_file

    by_hand = _by_hand(checkpoint.address)
    path = download_file(checkpoint.address, checkpoint.path.name, by_hand=by_hand, say=log.info)
    return dataclasses.replace(checkpoint, path=path)


def find_checkpoint(location: str | Path) -> Checkpoint:
    """Finds the checkpoint at a run folder (its newest step), a step_<N> folder or a published step_<N> file.

    `best` in a run folder is its best step, NAME also weights/NAME of this repository, and
    hf://OWNER/NAME[@REVISION] one on the Hub, which is downloaded; these, or a folder with the same files,
    are of `share push` or of the public code. Raises ValueError, one line, where there is none or its config
    is not one that we know.
    """
    if str(location).startswith("hf:/"):
        from dataset.hub import download, parse_address

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
        names = ", ".join(sorted(each.parent.name for each in SHIPPED.glob(f"*/{SHARED_WEIGHTS_FILE}")))
        what = "give a run folder, a step_<N> in one, or the name of one in weights/"
        raise ValueError(f"checkpoint {path} does not exist: {what}: {names}")
    if (path / SHARED_WEIGHTS_FILE).is_file():
        return _read_shared(path / SHARED_WEIGHTS_FILE)
    if path.is_dir() and not find_files(path, WEIGHTS):
        path = _newest_step(path)
    step = step_of(path)
    if path.suffix == _LIGHTNING:
        problem = "is one of Lightning, with tensors that no model here has: train its model here"
        raise ValueError(f"checkpoint {path} {problem}")
    if step is None and path.name != PUBLISHED_WEIGHTS:
        raise ValueError(f"checkpoint {path} is not named step_<N> or step_<N>.pt")
    return _read_checkpoint(path, step)


def _by_hand(address: Address) -> str:
    return f"fetch its files from {address.url} by hand into a folder, and give that folder"


def _choose_files(names: list[str]) -> list[str]:
    """Chooses the config and the weights of a repository of the Hub, by what they are called there."""
    shared = [SHARED_CONFIG_FILE, SHARED_WEIGHTS_FILE]
    for chosen in (shared, *([config, _newest_published(names)] for config in PUBLISHED_CONFIGS)):
        if set(chosen) <= set(names):
            return chosen
    known = f"neither {' and '.join(shared)} nor {PUBLISHED_CONFIGS[0]} and step_<N> or {PUBLISHED_WEIGHTS}"
    raise ValueError(f"has no checkpoint that is known here: {known}")


def _newest_step(folder: Path) -> Path:
    """Finds the newest of our checkpoints in a run folder; where there is none, the newest published file."""
    if newest := newest_checkpoint(folder):
        return newest
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    newest = folder / _newest_published(names)
    if newest.is_file():
        return newest
    for name in names:
        if name.endswith(_LIGHTNING):
            return folder / name
    raise ValueError(f"there is no checkpoint step_<N> in {folder}: give a run folder, or a step_<N> in one")


def _newest_published(names: list[str]) -> str:
    steps = [name for name in names if "/" not in name and step_of(Path(name)) is not None]
    return max(steps, key=lambda name: step_of(Path(name)), default=PUBLISHED_WEIGHTS)


def _read_shared(path: Path) -> Checkpoint:
    """Reads config.json beside model.safetensors."""
    config_path = path.with_name(SHARED_CONFIG_FILE)
    try:
        values = read_json(config_path)
        values = {key: values[key] for key in _Shared.model_fields if key in values}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config_path} cannot be read ({error})") from None
    shared = validate_config(_Shared, values, where=f"{config_path} is not one of `share push`")
    fields = shared.model_dump(exclude={"run", "dataset"}) | _read_recorded(shared.run, config_path)
    return Checkpoint(path, **fields, dataset_info=shared.dataset)


def _read_recorded(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the fields of `Checkpoint` that a run's config has, checked strictly. path: of its file."""
    config = fill_defaults(config)
    values = {key: config.get(key) for key in _Recorded.model_fields}
    recorded = validate_config(_Recorded, values, where=str(path))
    data_paths = all_data_paths(recorded.data_path, recorded.curriculum)
    return {"arch": recorded.arch, "data_paths": data_paths, "global_batch_size": recorded.global_batch_size}


def _read_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Reads a step_<N> folder, or a published file."""
    if path.is_file():
        beside = [path.absolute().with_name(name) for name in PUBLISHED_CONFIGS]
        config_path = next(filter(Path.is_file, beside), beside[0])
        config = translate_config(read_yaml(config_path), where=str(config_path))
        return Checkpoint(path, step, seq_len=None, **_read_recorded(config, config_path))
    if (path / MANIFEST_FILE).is_file():  # the weights are usable, and evaluated, without it too
        try:
            verify_checkpoint(path)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}: choose another one of the run") from None
    config, state = read_yaml(path / CONFIG_FILE), read_state(path)
    of_data = {"seq_len": state.get("seq_len"), "dataset_info": state.get("dataset")}
    of_data["fingerprint"] = state.get("dataset_fingerprint")
    return Checkpoint(path, step, **of_data, **_read_recorded(config, path / CONFIG_FILE))


def load_trained_model(checkpoint: Checkpoint, metadata: Metadata, *, raw: bool = False) -> HaltingModel:
    """Builds the model with the checkpoint's weights, on the CPU; with EMA its averages, unless `raw`.

    The data may be of any size that the model can read. ValueError where it cannot, or where the weights do
    not fit `arch`.
    """
    weights = load_weights(checkpoint, raw=raw)
    network = network_class(checkpoint.arch.name)
    try:
        sizes = network.sizes_in(weights, checkpoint.arch)
        metadata = network.complete(metadata, weights)
    except (KeyError, ValueError, IndexError) as error:
        raise _other_architecture(checkpoint, error) from None
    if checkpoint.seq_len is not None and not checkpoint.arch.reads_any_length:
        sizes["seq_len"] = checkpoint.seq_len
    for field, size in sizes.items():
        if size != getattr(metadata, field):
            raise ValueError(
                f"checkpoint {checkpoint} was trained with {field} {size}, but the dataset has "
                f"{getattr(metadata, field)}: give the dataset it was trained on"
            )
    with torch.device("meta"):  # sizes alone, before there is memory for them
        expected = build_model(checkpoint.arch, metadata).network.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        stored, own = (each[name].shape if name in each else None for each in (weights, expected))
        if stored != own:
            raise _other_architecture(checkpoint, f"{name}: {_written(stored)} there, {_written(own)} here")
    model = build_model(checkpoint.arch, metadata)
    model.network.load_state_dict(weights)
    model.network.cast_blocks_()
    return model


def _written(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def _other_architecture(checkpoint: Checkpoint, reason: object) -> ValueError:
    return ValueError(f"checkpoint {checkpoint} is of another architecture than its config says ({reason})")


def load_weights(checkpoint: Checkpoint, *, raw: bool = False) -> dict[str, Tensor]:
    """Loads the network's tensors under their plain names; with EMA its averages, unless `raw`."""
    path = checkpoint.path
    if raw and checkpoint.has_averages:
        raise ValueError(f"checkpoint {checkpoint} has the averages of the weights alone: drop raw=true")
    try:
        if path.name == SHARED_WEIGHTS_FILE:
            return load_file(path)
        if path.is_dir():
            has_averages = not raw and find_files(path, EMA_WEIGHTS)
            return load_joined(path, EMA_WEIGHTS if has_averages else WEIGHTS)
        with warnings.catch_warnings():  # torch's own advice on a pickle of another kind
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises almost anything where bytes are damaged
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):  # torch would have the code in it run
            reason = "it is no file of tensors alone, and nothing else is unpickled"
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({reason})") from None
    try:
        return translate_weights(content, checkpoint.arch)
    except ValueError as error:
        raise ValueError(f"checkpoint {checkpoint} {error}") from None
