"""The trace of a run: what twenty steps of training compute, to the bit.

A redesign must not change it. Traces are those of one machine (its kernels round in their own way), so that
none is kept in the repository: `tests/test_trace.py` records those of the tree before a change, and compares.
"""

import hashlib
import json
from pathlib import Path

import torch

from checkpointing.files import EMA_WEIGHTS_FILE, WEIGHTS_FILE
from checkpointing.slices import find_files, load_joined
from tests.ranks import run_program
from tests.tiny import OVERRIDES, TIMINGS

_STEPS = 20
_SHORT = ("epochs=60", "eval_interval=30", f"max_steps={_STEPS}", "log_interval=1")
# What each run is asked for beside `OVERRIDES`; every name says what it is there for.
CASES = {
    "hrm": ("arch.q_target=exact", "lr=1e-2"),
    "hrm deferred": ("arch.q_target=deferred", "lr=1e-2", "gradient_accumulation_steps=3", "ema=0.9"),
    "hrm bfloat16": ("arch.q_target=deferred", "arch.forward_dtype=bfloat16", "grad_clip_norm=0.5"),
    "trm": ("arch=trm", "arch.H_layers=0", "ema=0.9"),
    "trm mlp": (
        *("arch=trm", "arch.H_layers=0", "arch.mlp_t=true", "arch.pos_encodings=none"),
        *("arch.no_ACT_continue=false", "lr=1e-2"),
    ),
}


def record_trace(case: str, *, data: Path, folder: Path) -> dict[str, object]:
    """Trains twenty steps of a case on two processes; returns its metrics by step and hashes of its tensors.

    `folder` must be empty.
    """
    arguments = (*OVERRIDES, *_SHORT, *CASES[case], f"data_path={data}", f"checkpoint_path={folder / 'run'}")
    finished = run_program("pretrain", *arguments, folder=folder, world_size=2)
    assert finished.statuses == [0, 0], finished.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if _is_computed(name)} for row in rows]
    tensors = {}
    checkpoint = folder / "run" / f"step_{_STEPS}"
    for file in (EMA_WEIGHTS_FILE, WEIGHTS_FILE):
        for name, tensor in load_joined(checkpoint, file).items() if find_files(checkpoint, file) else ():
            tensors[f"{Path(file).stem}: {name}"] = hashlib.sha256(_bytes(tensor)).hexdigest()[:16]
    return {"metrics": metrics, "tensors": tensors}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_computed(name: str) -> bool:
    """Tells a metric that a step computes from times, and from what is repeated of earlier rows."""
    return name not in TIMINGS and not name.endswith("_seconds") and not name.startswith("best/")
