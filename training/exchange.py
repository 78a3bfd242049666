"""What the ranks of a run send each other for its steps, counted without its weights."""

import dataclasses
from pathlib import Path

import torch

from config.schema import PretrainConfig
from dataset.facts import Facts
from dataset.format import Metadata, load_metadata
from models import build_model

# Of data that is not here; the vocabulary is but thousands of many millions of weights.
_USUAL = {"vocab_size": 12, "seq_len": 900, "num_puzzle_identifiers": 1}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The messages of a run.

    dense_bytes: of the gradients, or with `local_steps` of the changes of weights, which are summed over all
    ranks every `dense_interval` steps. row_bytes: of the puzzle embeddings that a rank uses, with their
    numbers, which all ranks get every `row_interval` steps; 0 without embeddings.
    """

    dense_bytes: int
    dense_interval: int
    row_bytes: int
    row_interval: int


def count_exchange(config: PretrainConfig, *, world_size: int) -> Exchange:
    """Counts the messages of a run with this config over several nodes, of rows the most that there can be.

    ValueError where moments or rows are spread over processes, which takes other messages than these.
    """
    if config.optimizer_sharding == "ranks" or config.puzzle_emb_sharding == "rows":
        raise ValueError("optimizer_sharding and puzzle_emb_sharding are not estimated: leave them out here")
    with torch.device("meta"):
        network = build_model(config.arch, _metadata(config)).network
    is_dense = config.train_only != "puzzle_embeddings"
    num_weights = sum(parameter.numel() for parameter in network.parameters()) if is_dense else 0
    dtype = config.gradient_dtype if config.local_steps == 1 else config.outer_dtype
    row_interval = config.local_steps if config.puzzle_emb_sync == "local" else 1
    has_rows = network.puzzle_emb is not None
    row_bytes = (4 * config.arch.puzzle_emb_ndim + 8) if has_rows else 0
    return Exchange(
        dense_bytes=num_weights * getattr(torch, dtype).itemsize,
        dense_interval=config.local_steps,
        row_bytes=row_bytes * -(-config.global_batch_size // world_size) * row_interval,
        row_interval=row_interval,
    )


def _metadata(config: PretrainConfig) -> Metadata:
    try:
        return load_metadata(Path(config.data_paths[0]), "train")
    except ValueError:  # it may be on the machines of the run alone
        return Facts.from_sizes(**_USUAL).metadata
