"""Loads the model or the weights of a checkpoint that `find_checkpoint` (finding.py) has found.

Loading executes no code from the checkpoint. Weights are safetensors files, or files of `torch.save` that are
read with `weights_only=True`.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpointing.files import EMA_WEIGHTS, SHARED_WEIGHTS_FILE, WEIGHTS
from checkpointing.finding import Checkpoint
from checkpointing.published import translate_weights
from checkpointing.sizes import sizes_in
from checkpointing.tensors import find_files, load_joined
from dataset.metadata import Metadata
from models import HaltingModel, build_model, network_class
from models.blocks import cast_blocks_
from models.puzzle_embedding import PuzzleEmbedding
from runtime.reading import PointerFileError, open_regular


def load_trained_model(
    checkpoint: Checkpoint,
    metadata: Metadata,
    *,
    raw: bool = False,
    forward_dtype: str | None = None,
    rows: np.ndarray | None = None,
) -> HaltingModel:
    """Builds the model of a checkpoint on the CPU, and loads its weights.

    Args:
        checkpoint: Description of the checkpoint, from `find_checkpoint`.
        metadata: Metadata of the dataset, or of the single puzzle, that the model will read.
        raw: If True, load the raw weights. Otherwise load the averages (EMA) if the checkpoint has them.
        forward_dtype: Dtype of the model, "bfloat16" or "float32". If None, the dtype of the training.
        rows: For each puzzle identifier of the dataset, the row of the checkpoint's puzzle embeddings to use,
            int64 [num_puzzle_identifiers]. -1 selects the mean of all rows. If None, identifier i has row i.

    Returns:
        The model in training mode.

    Raises:
        ValueError: If the weights do not match the metadata or the config, or if their file is damaged.
    """
    weights = load_weights(checkpoint, raw=raw)
    if rows is not None:
        with architecture_errors(checkpoint):
            weights[PuzzleEmbedding.weights_name] = take_rows(weights[PuzzleEmbedding.weights_name], rows)
    arch = checkpoint.arch
    if forward_dtype is not None:
        arch = arch.model_copy(update={"forward_dtype": forward_dtype})
    network = network_class(checkpoint.arch.name)
    with architecture_errors(checkpoint):
        sizes = sizes_in(weights, checkpoint.arch)
        if network.is_search:
            metadata = network.complete(metadata, weights)
    if checkpoint.seq_len is not None and not checkpoint.arch.reads_any_length:
        sizes["seq_len"] = checkpoint.seq_len
    for field, size in sizes.items():
        if size != getattr(metadata, field):
            raise ValueError(
                f"checkpoint {checkpoint} was trained with {field} {size}, but the puzzles have {field} "
                f"{getattr(metadata, field)}. Use puzzles, or a dataset, with the sizes of the training."
            )
    with torch.device("meta"):  # only the shapes, without memory
        expected = build_model(arch, metadata).network.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        stored, built = (
            list(tensors[name].shape) if name in tensors else "none" for tensors in (weights, expected)
        )
        if stored != built:
            reason = f"{name} has shape {stored}, the config expects {built}"
            raise _other_architecture(checkpoint, reason)
    model = build_model(arch, metadata)
    model.network.load_state_dict(weights)
    cast_blocks_(model.network)
    return model


def hash_weights(model: HaltingModel) -> str:
    """Returns a hash (SHA-256, hexadecimal) of the weights of a model."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def take_rows(table: Tensor, rows: np.ndarray) -> Tensor:
    """Returns some rows of a table [num_rows, ndim], as a tensor [n, ndim].

    Raises ValueError if the table has fewer rows than needed.

    rows: Index in the table of each row to return, int64 [n]. -1 gives the mean of all rows of the table.
    """
    if rows.max() >= table.shape[0]:
        raise ValueError(f"identities.npz names more puzzles than there are embeddings: {table.shape[0]}")
    taken = table[torch.from_numpy(rows).clamp(min=0)]
    taken[torch.from_numpy(rows < 0)] = table.double().mean(dim=0).to(table.dtype)
    return taken


@contextlib.contextmanager
def architecture_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Context manager that converts a KeyError, ValueError or IndexError of its block into a ValueError.

    The new message says that the weights of the checkpoint do not match the config stored with them.
    """
    try:
        yield
    except (KeyError, ValueError, IndexError) as error:
        raise _other_architecture(checkpoint, error) from None


def _other_architecture(checkpoint: Checkpoint, reason: object) -> ValueError:
    return ValueError(
        f"checkpoint {checkpoint}: the weights do not match the config stored with them ({reason})."
    )


def load_weights(checkpoint: Checkpoint, *, raw: bool = False) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint on the CPU: {name in the model: full tensor}.

    If `raw` is False and the checkpoint has averages (EMA), returns the averages. Otherwise returns the raw
    weights. If the authors of a model published the file, it contains only one kind of weights, and `raw` has
    no effect. Raises ValueError if a file is damaged, or if `raw` is True, but `checkpoint.has_averages` says
    that the file contains only averages.
    """
    path = checkpoint.path
    if raw and checkpoint.has_averages:
        raise ValueError(f"checkpoint {checkpoint} contains only averaged (EMA) weights. Remove raw=true.")
    try:
        if path.name == SHARED_WEIGHTS_FILE:
            with open_regular(path):
                return load_file(path)
        if path.is_dir():
            has_averages = not raw and find_files(path, EMA_WEIGHTS)
            return load_joined(path, EMA_WEIGHTS if has_averages else WEIGHTS)
        with open_regular(path), warnings.catch_warnings():  # torch warns about other kinds of pickles
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except PointerFileError:
        raise
    except Exception as error:  # torch's unpickler raises many types of errors for damaged bytes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's message suggests to execute the pickle
            reason = "it is damaged, or it contains Python objects that could run code"
        raise ValueError(f"checkpoint {checkpoint} cannot be read ({reason}). Use another one.") from None
    try:
        return translate_weights(content, checkpoint.arch)
    except ValueError as error:
        raise ValueError(f"checkpoint {checkpoint} {error}") from None
