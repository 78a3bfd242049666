"""Trains a new puzzle embedding on the demonstrations of a puzzle, with all other weights fixed."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from checkpointing.finding import Checkpoint
from checkpointing.loading import load_weights
from config.compose import config_with
from config.schema import PretrainConfig
from dataset.loader import load_batch
from dataset.metadata import Metadata
from dataset.sets import PuzzleSet
from distributed import log
from distributed.progress import Progress
from models import HaltingModel
from training.clock import StepClock
from training.initial import fill_
from training.state import build_first_state
from training.step import train_step


def adapt(
    checkpoint: Checkpoint,
    demonstrations: PuzzleSet,
    metadata: Metadata,
    *,
    lr: float,
    seed: int,
    device: torch.device,
    raw: bool = False,
    forward_dtype: str | None = None,
) -> HaltingModel:
    """Trains new puzzle embeddings on some puzzles, and returns the model in evaluation mode.

    The new embeddings start as the mean of all embeddings of the checkpoint. All other weights stay as in the
    checkpoint. Runs in one process.

    demonstrations: Puzzles to train on. All have the same number of examples (inputs with labels). There is
        one training step for each puzzle, and one slot for each example of a puzzle. In the step of a puzzle,
        each slot that has halted takes an example of this puzzle. Other slots keep their example. The
        identifier of a puzzle is the index of its embedding in the returned model.
    metadata: Sizes of the dataset, such as the vocabulary. Its number of puzzle embeddings is not used.
    lr: Learning rate of the embeddings.
    raw: Whether to start from the weights themselves instead of their moving averages (EMA).
    forward_dtype: Dtype of the computation, such as "float32". If None, it is that of the checkpoint.
    """
    num_steps = len(demonstrations.puzzle_identifiers)
    num_examples = demonstrations.num_examples // num_steps
    table = {"num_puzzle_identifiers": int(demonstrations.puzzle_identifiers.max()) + 1}
    changes = {
        "arch": checkpoint.arch.model_dump() | ({"forward_dtype": forward_dtype} if forward_dtype else {}),
        "data_path": checkpoint.data_paths,
        "train_only": "puzzle_embeddings",
        "global_batch_size": num_examples,
        "seed": seed,
    }
    config = config_with(PretrainConfig, **changes)
    state = build_first_state(config, dataclasses.replace(metadata, **table), device=device)
    are_new = np.full(table["num_puzzle_identifiers"], -1)
    weights = load_weights(checkpoint, raw=raw)
    fill_(state.sections()["weights"], weights, source=str(checkpoint.path), rows=are_new)
    state.weights.gather_()

    log.note(
        f"adapting: {num_steps} steps train only an embedding for this puzzle, on its {num_examples} "
        "demonstrations"
    )
    clock, rates = StepClock(device), dict.fromkeys(("lr", "puzzle_emb_lr"), lr)
    with Progress(total=num_steps, desc="adapting", unit="steps") as bar:
        for number in range(num_steps):
            rows = np.arange(*demonstrations.puzzle_indices[number : number + 2])
            numbers = np.full_like(rows, number)
            batch = load_batch(demonstrations, metadata, rows, numbers, size=len(rows)).to(device)
            result = train_step(state, batch, config=config, rates=rates, clock=clock)
            bar.set_postfix(loss=f"{result.loss.item():.3f}", refresh=False)
            bar.update()
    return state.model.eval()
