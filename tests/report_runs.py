"""Writes run folders for tests of reports, and creates models and traces without training."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

from checkpointing.files import CONFIG_FILE, STARTS_FILE
from dataset.description import DatasetInfo
from dataset.metadata import IGNORE_LABEL_ID, Dataset, usual_metadata
from evaluation.trace import Trace
from models import HaltingModel, build_model
from models.lattice import NO_GUESS
from models.network import Network
from report.trace import TracedPuzzles
from runtime.metrics_file import METRICS_FILE
from runtime.writing import to_yaml
from tests.checkpoints import state_on
from tests.tiny import tiny_arch, tiny_config
from training.checkpoints import CheckpointManager

SEARCHING = {"eval_halt_max_steps": 20, "kill_threshold": 0.4, "eval_conflict_threshold": 0.7}


def write_run(
    folder: Path, data: Path, *, has_checkpoint: bool = True, accuracy: float = 0.5, **changes
) -> Path:
    """Writes the folder of a run of 40 training steps. Returns the folder.

    accuracy: Exact accuracy of the last evaluation. changes: Changed keys of the config.
    """
    arch = tiny_arch("trm", mlp_t=False, puzzle_emb_ndim=0).model_dump()
    names = {"run_name": folder.name, "checkpoint_path": str(folder), "data_path": [str(data)]}
    config = tiny_config(**{"arch": arch, **names, **changes})
    folder.mkdir(parents=True)
    if has_checkpoint:
        state = state_on(data, config)
        if hasattr(state.model.network, "q_head"):
            with torch.no_grad():
                state.model.network.q_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        state.step = 40
        with CheckpointManager(folder, config=config, fingerprint="f" * 64) as checkpoints:
            checkpoints.save(state)
    (folder / CONFIG_FILE).write_text(to_yaml(config.model_dump()))
    rows = []
    for step in range(10, 50, 10):
        row = {"step": step, "train/lm_loss": 2 / step, "train/exact_accuracy": step / 100}
        row |= {"train/grad_norm": 1.0, "train/steps": 3.5, "train/step_seconds": 0.5}
        row |= {"train/examples_per_second": 48.0, "train/petaflops": step / 8}
        if step % 20 == 0:
            share = accuracy * step / 40
            row |= {"eval/all/exact_accuracy": share, "eval/all/lm_loss": 1.0, "eval/all/count": 100}
            row |= {"eval/all/steps": 4.0, "eval/all/act_steps": 2.346, "eval/all/q_halt_accuracy": 0.9}
        rows.append(row)
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "command": "python pretrain.py lr=<b>1</b>"}
    start |= {"git_commit": "c" * 40, "hardware": "2 cores of a test", "processes": 1, "num_parameters": 1234}
    start["gigaflops_per_step"] = 2.5
    (folder / STARTS_FILE).write_text(json.dumps(start) + "\n")
    return folder


def searching_model(data: Dataset, **changes) -> HaltingModel:
    """Returns an untrained LDT that ends boards in many thinking steps.

    A board ends as solved, usually with a wrong answer, or as contradictory. A contradictory board restarts.
    changes: Changed settings of the model.
    """
    torch.manual_seed(0)
    model = build_model(tiny_arch("ldt", **(SEARCHING | changes)), data.metadata).eval()
    make_searching(model.network)
    return model


@torch.no_grad()
def make_searching(network: Network) -> None:
    network.input_proj.weight.mul_(5)
    network.keep_head.weight.normal_(std=0.1)


def random_traces(*, steps: int = 3, n: int = 200, seed: int = 0) -> TracedPuzzles:
    """Returns random answers to `n` puzzles of 4 cells after each of `steps` thinking steps.

    About two thirds of the answers are right. The last puzzle has no label.
    """
    draw = np.random.default_rng(seed)
    labels = np.full((n, 4), 2, np.int32)
    labels[-1] = IGNORE_LABEL_ID
    preds = np.where(draw.random((n, steps, 4)) < 0.9, 2, 3).astype(np.uint8)
    q_halt = draw.normal(0, 2, (n, steps)).astype(np.float32)
    no_board = np.zeros((n, steps, 0), np.int64), np.full((n, steps), NO_GUESS, np.int16)
    trace = Trace(preds, draw.random((n, steps, 4), np.float32), q_halt, q_halt > 0, *no_board)
    sizes = DatasetInfo(usual_metadata(vocab_size=6, seq_len=4, num_puzzle_identifiers=1))
    return TracedPuzzles(
        info=dataclasses.replace(sizes, builder="sudoku"),
        set_names=["all"] * n,
        rows=np.arange(n),
        names=[""] * n,
        inputs=np.ones((n, 4), np.int32),
        labels=labels,
        trace=trace,
        is_search=False,
        num_puzzles=n,
        has_variants=False,
        checkpoint=Path("step_1"),
    )
