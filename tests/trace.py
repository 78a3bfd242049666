"""Records the trace of a run: its metrics and hashes of its tensors in twenty training steps.

A change that only restructures code must not change a single bit of a trace. The repository contains no
traces, because the kernels of each machine round differently. `tests/test_trace.py` records traces with the
code before a change, and compares them with traces of the code after it. The names of tensors in a trace are
independent of the file names in checkpoints.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from checkpointing.files import CONFIG_FILE, checkpoints_in, step_of
from checkpointing.tensors import find_files, load_joined
from dataset.build.writing import write_dataset
from tests.puzzle_sets import make_split
from tests.ranks import complete_program
from tests.tiny import OVERRIDES, TIMINGS

_HALF, _STEPS = 10, 20
_SHORT = ("epochs=60", "eval_interval=30", "log_interval=1", f"checkpoint_interval={_HALF}")
_SHORT += ("keep_checkpoints=null", "replica_check_interval=5")
_EMA, _DEBIASED = ("ema=0.9",), ("ema=0.9", "ema_bias_correction=true")
_MEAN = ("outer_lr=1", "outer_momentum=0")
_DILOCO = ("outer_lr=0.7", "outer_momentum=0.9")
_HALVES = "sync_dtype=bfloat16"
_ROWS, _SHARDED = "puzzle_emb_sharding=rows", "data_parallel_shard_degree=-1"
_LOSSES = ("arch.loss.supervision_decay=0.9", "arch.loss.label_smoothing=0.1")
_PIPELINE, _TENSOR = "pipeline_parallel_degree=2", "tensor_parallel_degree=2"
_BFLOAT16 = "arch.forward_dtype=bfloat16"
_TRM = ("arch=trm", "arch.H_layers=0")
_SERRM = ("arch=serrm", "arch.puzzle_emb_ndim=1", "arch.head_dim=12", "arch.num_heads_t=3")
_SERRM += ("arch.head_dim_t=6", "arch.add_tokens=2")
_FPRM = ("arch=fprm", "arch.fp_thresh=0.5", "arch.eval_halt_max_steps=6", "halting=act")
_STAGES = "curriculum=[{epochs:3,H_cycles:1},{share:0.06,H_cycles:1,L_cycles:1},{share:0.02,L_cycles:3}]"


class Case(NamedTuple):
    """A run to trace.

    Attributes:
        ranks: Number of ranks. If there are two numbers, the run is resumed after step 10, and the second
            number is the number of ranks from then on.
        overrides: Config overrides of pretrain.py.
        data: Name of a dataset of `write_data`.
    """

    ranks: int | tuple[int, int]
    overrides: tuple[str, ...]
    data: str = "many"


CASES = {
    "one": Case(1, ("lr=1e-2", "grad_clip_norm=0.5", *_EMA)),
    "one rows": Case(1, (_ROWS, *_EMA)),
    "one local": Case(1, ("local_steps=4", *_MEAN, *_EMA)),
    "hrm exact": Case(2, ("arch.q_target=exact", "lr=1e-2")),
    "hrm deferred": Case(2, ("arch.q_target=deferred", "lr=1e-2", "gradient_accumulation_steps=3", *_EMA)),
    "hrm bfloat16": Case(2, ("arch.q_target=deferred", "arch.forward_dtype=bfloat16", "grad_clip_norm=0.5")),
    "hrm losses": Case(2, (*_LOSSES, "arch.halt_exploration_prob=0.5")),
    "trm": Case(2, (*_TRM, *_EMA, "raw=true")),
    "trm mlp": Case(
        2, (*_TRM, "arch.mlp_t=true", "arch.pos_encodings=none", "arch.no_ACT_continue=false", "lr=1e-2")
    ),
    "trm noise": Case(
        2, (*_TRM, "arch.init_noise=0.5", "arch.state_noise=0.1", "arch.damping=0.9", "lr=1e-2")
    ),
    "trm act": Case(2, (*_TRM, "halting=act", "arch.eval_halt_max_steps=6", "lr=1e-2", *_EMA)),
    "infiloop": Case(2, ("arch=infiloop", "optimizer=adamw", *_EMA)),
    "infiloop resumed": Case((2, 4), ("arch=infiloop", "sync=flat", _SHARDED, "lr=1e-2", *_EMA)),
    "fprm": Case((2, 4), (*_FPRM, "optimizer=muon", *_EMA)),
    "flow": Case((2, 4), ("arch=flow", "arch.own_predictions=0.5", "arch.eval_halt_max_steps=6", *_EMA)),
    "urm": Case(2, ("arch=urm", *_EMA)),
    "serrm": Case(2, (*_SERRM, "arch.dropout=0.1", *_EMA)),
    "transformer": Case(2, ("arch=transformer", "arch.num_layers=2", *_EMA)),
    "curriculum": Case(2, (_STAGES, *_EMA)),
    "curriculum resumed": Case((2, 1), (_STAGES, *_EMA)),
    "muon": Case(2, ("optimizer=muon", *_EMA)),
    "adamw": Case(2, ("optimizer=adamw", *_EMA)),
    "no table": Case(2, ("arch.puzzle_emb_ndim=0", *_EMA)),
    "no table diloco": Case(2, ("arch.puzzle_emb_ndim=0", "local_steps=4", *_DILOCO, *_EMA)),
    "table alone": Case(2, ("train_only=puzzle_embeddings", *_EMA)),
    "memory unsharded": Case(2, ("data_parallel_shard_degree=1", *_DEBIASED, "raw=true")),
    "memory three": Case(3, ("grad_clip_norm=0.5", *_EMA)),
    "memory four": Case(4, ("lr=1e-2", *_EMA)),
    "flat": Case(2, ("sync=flat", "grad_clip_norm=0.5", "bucket_size_mb=0.01", *_EMA)),
    "flat bfloat16": Case(2, ("sync=flat", _HALVES, *_EMA)),
    "flat sharded": Case(2, ("sync=flat", _SHARDED, *_EMA)),
    "flat muon sharded four": Case(4, ("optimizer=muon", "sync=flat", _SHARDED, *_EMA)),
    "ddp": Case(2, ("sync=ddp", "grad_clip_norm=0.5", "gradient_accumulation_steps=2", *_EMA)),
    "rows": Case(2, (_ROWS, *_DEBIASED)),
    "rows no average": Case(2, (_ROWS, "sync=flat")),
    "rows ddp four": Case(4, (_ROWS, "sync=ddp", "gradient_accumulation_steps=3", *_EMA)),
    "rows sharded four": Case(4, ("sync=flat", _ROWS, _SHARDED, *_EMA)),
    "local": Case(2, ("local_steps=4", *_MEAN, *_EMA, "grad_clip_norm=0.5")),
    "diloco": Case(2, ("local_steps=4", *_DILOCO, *_DEBIASED, "gradient_accumulation_steps=2")),
    "diloco bfloat16 four": Case(4, ("local_steps=3", *_DILOCO, _HALVES, *_EMA)),
    "few": Case(2, ("puzzle_emb_weight_decay=0.5", *_EMA), "few"),
    "few ddp": Case(2, ("sync=ddp", "gradient_accumulation_steps=3", *_EMA), "few"),
    "few flat bfloat16 four": Case(4, ("sync=flat", _HALVES, *_EMA), "few"),
    "few rows": Case(2, (_ROWS, *_EMA), "few"),
    "few diloco": Case(2, ("local_steps=4", *_DILOCO, *_EMA), "few"),
    # Slots keep their puzzles for eight steps: their rows are others than those of the batch at hand.
    "kept": Case(2, ("arch.halt_max_steps=8", "arch.halt_exploration_prob=0.5", *_EMA), "uneven"),
    "kept rows": Case(2, ("arch.halt_max_steps=8", _ROWS, "sync=flat", *_EMA), "uneven"),
    "resumed": Case((2, 2), ("lr=1e-2", *_EMA)),
    "resumed diloco": Case((2, 2), ("local_steps=5", *_DILOCO, *_EMA)),
    "2 to 4": Case((2, 4), ("lr=1e-2", *_EMA)),
    "4 to 1": Case((4, 1), ("lr=1e-2", "optimizer=adamw", *_DEBIASED)),
    "4 to 2 rows": Case((4, 2), (_ROWS, _SHARDED, "sync=flat", *_EMA)),
    "1 to 3 rows": Case((1, 3), (_ROWS, _SHARDED, "optimizer=muon", *_EMA), "uneven"),
    "2 to 4 diloco": Case((2, 4), ("local_steps=5", *_DILOCO, *_EMA)),
    "2 to 4 local adamw": Case((2, 4), ("local_steps=5", "optimizer=adamw", *_MEAN, *_EMA), "few"),
    "one bfloat16": Case(1, (_BFLOAT16, "arch.q_target=exact", "lr=1e-2", "grad_clip_norm=0.5", *_EMA)),
    "trm bfloat16 sharded four": Case(4, (*_TRM, _BFLOAT16, "sync=flat", _SHARDED, "lr=1e-2", *_EMA)),
    "urm bfloat16 muon": Case(
        (2, 4), ("arch=urm", _BFLOAT16, "optimizer=muon", "sync=flat", _SHARDED, *_EMA)
    ),
    "fprm bfloat16": Case((2, 1), ("arch=fprm", _BFLOAT16, "activation_checkpointing=block", *_DEBIASED)),
    "bfloat16 diloco": Case((2, 4), (_BFLOAT16, "local_steps=5", *_DILOCO, *_EMA)),
    "4 to 1 local": Case((4, 1), ("local_steps=5", *_MEAN, *_EMA)),
    "trm pipeline": Case(2, (*_TRM, "arch.L_layers=2", _PIPELINE, *_EMA)),
    "hrm tensor": Case(2, ("arch.q_target=exact", _TENSOR, *_EMA)),
    "trm bfloat16 tensor pipeline four": Case(
        4,
        (*_TRM, "arch.L_layers=2", _BFLOAT16, _TENSOR, _PIPELINE, "activation_checkpointing=block", *_EMA),
    ),
    "urm bfloat16 muon pipeline four": Case(
        4, ("arch=urm", "arch.L_layers=2", _BFLOAT16, _PIPELINE, "optimizer=muon", *_EMA)
    ),
    "serrm tensor": Case(2, (*_SERRM, "arch.num_heads=2", "arch.num_heads_t=2", _TENSOR, *_EMA)),
    "fprm pipeline": Case(2, (*_FPRM, "arch.L_layers=2", _PIPELINE, *_EMA)),
}
_HAS_NOT = {  # keys of `OVERRIDES` that an architecture does not have
    "arch=serrm": ("arch.H_layers", "arch.num_heads"),
    "arch=urm": ("arch.H_layers",),
    "arch=infiloop": ("arch.H_layers",),
    "arch=fprm": ("arch.H_layers",),
    "arch=flow": ("arch.H_layers",),
    "arch=transformer": ("arch.H_layers", "arch.L_layers", "arch.halt_max_steps"),
}


def write_data(folder: Path) -> Path:
    """Writes the datasets many, few and uneven in subfolders of `folder`. Returns `folder`.

    The 120 training puzzles have 49 puzzle identifiers in many and 3 in few. With few identifiers, a rank
    sends the sum of several gradients for one row. In uneven, four of five puzzles have the identifier 0.
    """
    identifiers = {"many": lambda n: n, "few": lambda n: n % 3, "uneven": lambda n: np.where(n < 40, 0, n)}
    for name, of in identifiers.items():
        splits = {
            "train": make_split({"all": [[2, 1]] * 60}),
            "test": make_split({"all": [[1], [2, 1]] * 10}),
        }
        for split in splits.values():
            for key, each in split.sets.items():
                changed = of(each.puzzle_identifiers).astype(np.int32)
                split.sets[key] = dataclasses.replace(each, puzzle_identifiers=changed)
        write_dataset(folder / name, splits=splits, identifiers=["<blank>"], builder={"module": "tests"})
    return folder


def record_trace(name: str, *, data: Path, folder: Path) -> dict[str, object]:
    """Trains a case for twenty steps. Returns its metrics, the metric sums and hashes of its tensors.

    name: Key of `CASES`. data: Folder of `write_data`. folder: Empty folder for the run.
    """
    case = CASES[name]
    base = [word for word in OVERRIDES if not word.startswith(_HAS_NOT.get(case.overrides[0], ("-",)))]
    paths = (f"data_path={data / case.data}", f"checkpoint_path={folder / 'run'}")
    ranks = (case.ranks,) if isinstance(case.ranks, int) else case.ranks
    for last_step, world_size in zip((_HALF, _STEPS)[-len(ranks) :], ranks, strict=True):
        arguments = (*base, *_SHORT, *case.overrides, *paths, f"max_steps={last_step}")
        complete_program("pretrain", *arguments, folder=folder, world_size=world_size)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if _is_computed(name)} for row in rows]
    sums, tensors = {}, {}
    for checkpoint in checkpoints_in(folder / "run"):
        step = step_of(checkpoint)
        sums[str(step)] = json.loads((checkpoint / "state.json").read_text())["metrics"]
        tensors |= {f"{step} {name}": _hash(tensor) for name, tensor in _tensors(checkpoint)}
    return {"metrics": metrics, "sums": sums, "tensors": tensors}


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields ("<part>: <name>", tensor) for every tensor of a checkpoint. Shards are joined.

    With `local_steps` > 1, each rank has other optimizer moments. Yields those of every rank.
    """
    parts = {"weights": "weights", "ema_weights": "averages", "ema_state": "kept averages", "carry": "carry"}
    parts |= {"optimizer": "moments", "outer_optimizer": "outer momentum"}
    has_own = "local_steps: 1\n" not in (checkpoint / CONFIG_FILE).read_text()
    for file, part in parts.items():
        for name, tensor in load_joined(checkpoint, file).items() if find_files(checkpoint, file) else ():
            if part == "moments" and has_own:
                for rank, own in enumerate(tensor):
                    yield f"moments of rank {rank}: {name}", own
            else:
                yield f"{part}: {name}", tensor


def _hash(tensor: torch.Tensor) -> str:
    """Returns a hash of the bits, the dtype and the shape of a tensor."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + content).hexdigest()[:16]


def _is_computed(name: str) -> bool:
    """Returns whether a metric is computed from the data and the model.

    Returns False for times, peak memory, petaflops and the best values so far.
    """
    return not (name in TIMINGS or name.endswith(("_seconds", "petaflops")) or name.startswith("best/"))
