"""Golden vectors: compares our numbers with those of the public implementations, on any device.

A golden run is a folder here. It contains the weights of the public code before and after a few training
steps (`step_<N>`), the batches, and what the public code computed from them in float32 (README.md). The runs
were chosen so that float32 and float64 agree within 3e-5, and no gradient of the first step is as small as
its rounding error. A replay repeats the training steps and returns the largest difference of each quantity.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from checkpointing.finding import Checkpoint, find_checkpoint
from checkpointing.loading import load_trained_model
from config.published import PUBLISHED
from dataset.loader import Batch
from distributed.collectives import all_ranks
from distributed.flat import FlatParameters
from distributed.sync import build_gradient_sync
from models import HaltingModel
from models.carry import Carry, Prediction, StepOutput
from optimizers.puzzle_table import build_table
from optimizers.weights import build_weights

GOLDEN = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent))
_TRM = "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1"
SUMS = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps")
_RELATIVE = {"lm_loss": 1e-4, "q_halt_loss": 1e-3, "q_continue_loss": 1e-4}


class Differences(dict[str, float]):
    """{quantity: largest difference so far between our values and those of the public code}."""

    def compare(
        self, quantity: str, ours: Any, golden: Any, *, relative: float = 0, absolute: float = 0, what: str
    ) -> None:
        """Compares numbers with golden numbers, and stores the largest difference under `quantity`.

        Raises AssertionError if the difference is too large.

        relative: Largest allowed difference as a fraction of the golden number. If not 0, the stored
        difference is also such a fraction. absolute: Allowed absolute difference. If `relative` is not 0, it
        allows more for golden numbers near 0. what: Name of the numbers for the message.
        """
        ours, golden = (np.asarray(each, dtype=np.float64) for each in (ours, golden))
        far = np.abs(ours - golden)
        if relative:
            far = far / (np.abs(golden) + max(absolute, 1e-12) / relative)
        at = far.argmax()
        is_close = far.flat[at] <= (relative or absolute)
        assert is_close, f"{what} is {ours.flat[at]:.8g}, but {golden.flat[at]:.8g} in the public code"
        self[quantity] = max(self.get(quantity, 0.0), float(far.flat[at]))


def find_runs(folder: Path = GOLDEN) -> list[Path]:
    """Returns the folders of the golden runs with training steps, except those of LDT."""
    runs = [
        path.parent for path in sorted(folder.glob("*/expected.json")) if "train" in expected(path.parent)
    ]
    return [run for run in runs if expected(run)["model"] in PUBLISHED]


def expected(run: Path) -> dict[str, Any]:
    known = json.loads((run / "expected.json").read_text())
    if "gate" in known:  # TRM's public code with a gate put in
        known |= {"model": _TRM, "arch": {**known["arch"], "update": "gate"}}
    return known


def write_config(path: Path, run: Path, **changes: object) -> None:
    """Writes the config of a golden run to `path`, with the keys of the public code.

    changes: Changed keys of `arch`. A value of None removes the key.
    """
    known = expected(run)
    arch = {**known["arch"], "name": known["model"], "loss": {"loss_type": known["loss"]}, **changes}
    arch = {key: value for key, value in arch.items() if value is not None}
    config = {"arch": arch, "data_path": "data", "global_batch_size": known["batch_size"]}
    path.write_text(yaml.safe_dump(config))


@contextlib.contextmanager
def published_checkpoint(run: Path, step: int, **changes: object) -> Iterator[Checkpoint]:
    """Yields the golden weights of a training step as a checkpoint of the public code.

    changes: Changed keys of `arch` in its config. A value of None removes the key.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"step_{step}")
        path.symlink_to(run.absolute() / path.name)
        write_config(path.with_name("all_config.yaml"), run, **changes)
        yield find_checkpoint(path)


def load(run: Path, step: int) -> HaltingModel:
    """Loads the golden weights of a training step in the way published checkpoints are loaded."""
    sizes = {name: expected(run)[name] for name in ("vocab_size", "seq_len", "num_puzzle_identifiers")}
    with published_checkpoint(run, step) as checkpoint:
        return load_trained_model(checkpoint, SimpleNamespace(**sizes, num_columns=None))


def batch(run: Path, number: int) -> Batch:
    with np.load(run / "batches.npz") as arrays:
        names = ("inputs", "labels", "puzzle_identifiers")
        tensors = [torch.from_numpy(arrays[f"{name}_{number}"]) for name in names]
    return Batch(*tensors, rows=torch.arange(len(tensors[0])))


class RecordedStart:
    """Replaces the random numbers of slots, so that the initial state of every slot is a recorded one.

    start: Recorded initial states. std: Factor by which the model multiplies its random numbers.
    """

    arrays: dict[str, torch.Tensor] = {}

    def __init__(self, start: torch.Tensor, *, std: float):
        self._start, self._std = start, std

    def __getitem__(self, slots: torch.Tensor) -> "RecordedStart":
        return RecordedStart(self._start[slots], std=self._std)

    def truncated_normal(self, shape: tuple[int, ...], *, use: str) -> torch.Tensor:
        return self._start / self._std


def recorded_start(run: Path, model: HaltingModel, name: str) -> RecordedStart | None:
    """Returns the initial states `name` of draws.npz. Returns None if the run has no such file."""
    if not (run / "draws.npz").exists():
        return None
    with np.load(run / "draws.npz") as arrays:
        start = torch.from_numpy(arrays[name]).to(next(model.parameters()).device)
    return RecordedStart(start, std=model.reasoning.init_noise)


def as_published(model: HaltingModel, output: StepOutput) -> StepOutput:
    """Returns the output of a model as the public code computes it.

    Only the output of a model without Q head, SE-RRM, changes: its public code uses a probability as a logit.
    """
    if hasattr(model.network, "q_head"):
        return output
    q_halt = torch.sigmoid(output.prediction.q_halt)
    return output._replace(prediction=output.prediction._replace(q_halt=q_halt))


def replay(run: Path, *, device: torch.device, first_step: int = 0) -> Differences:
    """Trains as the public code did, and compares losses, metrics, gradients, halting and final weights.

    Raises AssertionError for the first value that differs too much. first_step: Number of the training step
    after which the initial weights were stored.
    """
    known, seen = expected(run), Differences()
    model = load(run, first_step)
    model.to(device).train()
    chosen = SimpleNamespace(**known["optimizer"], ema=None, puzzle_emb_sharding="replicated")
    chosen.global_batch_size = known["batch_size"]
    chosen.optimizer = known["optimizer"].get("name", "adam_atan2")
    network = model.network
    flat = FlatParameters(network.named_parameters(), ranks=all_ranks(), undecayed=network.undecayed)
    assert flat.parameters.keys() & flat.undecayed == {*known["optimizer"].get("no_weight_decay", ())}
    sync = build_gradient_sync(model, flat)
    weights = build_weights(chosen, flat)
    table = build_table(chosen, network.puzzle_emb, None, all_ranks())
    carry = model.initial_carry(batch(run, 0).to(device))
    for number, golden in enumerate(known["train"]):
        where = f"{run.name}, step {golden['step']}"
        rng = recorded_start(run, model, f"initial_y_{number}")
        before = model.refill(carry, batch(run, number).to(device), model.reasoning, rng)
        output = as_published(model, model(before, model.reasoning, rng))
        carry = output.carry
        loss, sums = network.objective.losses(
            network, before, output, divisors={}, reasoning=model.reasoning, rng=None
        )
        sync.zero()
        (loss / known["batch_size"]).backward()
        sync.finish()

        seen.compare("loss", loss.item(), golden["loss"], relative=1e-4, what=f"{where}: loss")
        for name, tolerance in _RELATIVE.items():
            if name in golden:
                options = {"relative": tolerance, "absolute": 1e-5, "what": f"{where}: {name}"}
                seen.compare("loss", float(sums[name]), golden[name], **options)
        for name in SUMS:
            assert float(sums[name]) == pytest.approx(golden[name], rel=1e-6), f"{where}: {name}"
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        options = {"relative": 5e-4, "what": f"{where}: norm of the gradients"}
        seen.compare("gradients", norm.item(), golden["grad_norm"], **options)
        assert int(carry.halted.sum()) == golden["halted"], f"{where}: other slots halt"
        assert carry.steps.tolist() == golden["slot_steps"], f"{where}: slots are at other steps"
        if number == 0:
            compare_outputs(seen, output.prediction, run / "outputs_step_1.npz", tolerance=5e-5)
        if (run / "carries.npz").exists():
            compare_carry(seen, carry, run / "carries.npz", step=number)
        if (run / "trace.npz").exists():
            compare_trace(seen, carry, run / "trace.npz", "{}_" + str(number))
        weights.update_(chosen.lr, step=number + 1)
        table.reduce(step=number + 1)
        table.update_(chosen.puzzle_emb_lr)

    final = load(run, len(known["train"])).state_dict()
    for name, value in model.state_dict().items():
        tolerance = 1e-6 if name.endswith("puzzle_emb.weights") else 5e-5
        options = {"absolute": tolerance, "what": f"{run.name}: {name} after the last step"}
        seen.compare("weights", value.cpu(), final[name], **options)
    return seen


def compare_outputs(seen: Differences, prediction: Prediction, path: Path, *, tolerance: float) -> None:
    """Compares all outputs of a thinking step with those in a file.

    tolerance: Largest allowed difference.
    """
    ours = {
        "logits": prediction.logits,
        "q_halt_logits": prediction.q_halt,
        "q_continue_logits": prediction.q_continue,
    }
    with np.load(path) as golden:
        assert ("q_continue_logits" in golden.files) == (prediction.q_continue is not None)
        for name in golden.files:
            options = {"absolute": tolerance, "what": f"{path}: {name}"}
            seen.compare("outputs", ours[name].detach().cpu(), golden[name], **options)


def compare_carry(seen: Differences, carry: Carry, path: Path, *, step: int) -> None:
    """Compares the state of a gated network after a training step with a file.

    The file contains the states of the first slots. step: Index of the training step, from 0.
    """
    ours = {f"z_{axis}": carry.state[f"z_{axis}"] for axis in "HL"}
    ours |= {f"D_{axis}": carry.state[f"log_D_{axis}"].exp() for axis in "HL"}
    with np.load(path) as golden:
        for name, values in ours.items():
            theirs = golden[f"{name}_{step}"]
            options = {"relative": 1e-4, "absolute": 5e-5, "what": f"{path}: {name}_{step}"}
            seen.compare("state", values[: len(theirs)].detach().cpu(), theirs, **options)


def compare_trace(seen: Differences, carry: Carry, path: Path, names: str) -> None:
    """Compares the halting state of FPRM after a thinking step with a file.

    The file contains the values after each call of the level. The last ones count. names: Pattern of the
    names in the file, such as "{}_0". "{}" stands for the name of a quantity.
    """
    ours = {"residues": "residual", "best_residues": "best", "patience": "patience", "stepsize": "step_size"}
    with np.load(path) as golden:
        for public, name in ours.items():
            if (key := names.format(public)) in golden.files:
                options = {"relative": 1e-4, "absolute": 3e-5, "what": f"{path}: {key}"}
                seen.compare("state", carry.state[name].detach().cpu(), golden[key][-1], **options)
