"""LDT is exact over processes: a state of candidates, two boards a slot, and a search."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from config.files import load_defaults
from config.programs import EvaluateConfig
from config.schema import PretrainConfig, validate_config
from dataset.description import with_candidates
from dataset.files import open_dataset
from dataset.loader import Batch
from dataset.metadata import Dataset
from distributed.world import rank
from evaluation.loop import Race
from evaluation.passes import SetResult, evaluate_split
from evaluation.selection import Settings
from evaluation.test_time import set_up
from models import HaltingModel, build_model
from models.ldt import LDT
from tests.checkpoints import do_step
from tests.float64 import TOLERANCE, assert_close, in_float64
from tests.ranks import call_each, run_ranks
from tests.tiny import tiny_config
from training.checkpoints import CheckpointManager
from training.metrics import training_metrics
from training.state import TrainState, build_first_state

# ------------------------------------------------------------------------------------------------- training

_BATCH, _STEPS = 24, 10
_LDT = {**load_defaults("arch/ldt"), "hidden_size": 16, "num_heads": 2, "num_layers": 1, "loops": 2}
_LDT |= {"forward_dtype": "float32", "boards_per_slot": 2, "halt_max_steps": 4, "true_pin_prob": 0.5}
_LDT |= {"kill_threshold": 0.45, "eval_halt_max_steps": 12}
_ARCHS = {
    "ldt": _LDT,
    "ldt by rows and columns": _LDT
    | {"pos_encodings": "rope", "balanced_conflict": True, "dropout": 0.0}
    | {"decision_cell": "fewest", "boards_per_slot": 1},
}


def _open(folder: Path) -> Dataset:
    return with_candidates(open_dataset(folder, read_everything=False))


def _build(data: Dataset, arch: str, *, shares: list[int] | None = None, **options: Any):
    """Builds the state and its config. shares: slots of each rank, where they are not equal."""
    config = tiny_config(arch=_ARCHS[arch], global_batch_size=_BATCH, **options)
    state = build_first_state(config, data.metadata, device=torch.device("cpu"))
    if shares is not None:
        first, number = sum(shares[: rank()]), shares[rank()]
        state.slots = range(first, first + number)
        options = {"seq_len": data.metadata.seq_len, "device": torch.device("cpu")}
        state.carry = state.model.blank_carry(number, **options)
    state.broadcast_model_()
    return state, config


def _batch(data: Dataset, rows: Tensor) -> Batch:
    puzzles = data.splits["train"].sets["all"]
    own = rows.numpy() % len(puzzles.inputs)
    columns = (puzzles.inputs[own], puzzles.labels[own], 0 * own)
    return Batch(*(torch.from_numpy(each.astype("int32")) for each in columns), rows=rows)


def _train(state: TrainState, config: PretrainConfig, data: Dataset, *, until: int) -> None:
    state.model.train()
    while state.step < until:
        batch = _batch(data, torch.arange(_BATCH) + _BATCH * state.step)
        do_step(state, config, batch, total_steps=_STEPS)


def _run(folder: Path, run: Path, arch: str, steps: range, options: dict[str, Any]) -> dict[str, Any]:
    """Trains these steps, from a checkpoint in `run` if there is one, and leaves one there."""
    data = _open(folder)
    state, config = _build(data, arch, checkpoint_path=str(run), **options)
    run.mkdir(parents=True, exist_ok=True)
    with CheckpointManager(run, config=config, fingerprint="same") as checkpoints:
        if steps.start:
            checkpoints.resume(state)
        assert state.step == steps.start
        _train(state, config, data, until=steps.stop)
        checkpoints.save(state)
    sums, network = state.metrics.reduce(), state.model.network
    metrics = training_metrics(network, sums, steps=_STEPS, global_batch_size=_BATCH)
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    return {"weights": weights, "carry": state.carry.tensors(), "metrics": metrics if rank() == 0 else {}}


Results = dict[str, list[dict[str, Any]]]  # of each network, what each rank has


def _run_ranks(world_size: int, folder: Path, run: Path, steps: range, options: dict) -> Results:
    cases = [(folder, run / arch, arch, steps, options) for arch in _ARCHS]
    ranks = run_ranks(in_float64, world_size, call_each, _run, cases)
    return {arch: list(results) for arch, results in zip(_ARCHS, zip(*ranks, strict=True), strict=True)}


@pytest.fixture(scope="module")
def alone(sudoku_folder, tmp_path_factory) -> Results:
    found = _run_ranks(1, sudoku_folder, tmp_path_factory.mktemp("alone"), range(_STEPS), {})
    for arch, (result,) in found.items():
        assert result["metrics"].keys() <= {
            *LDT.objective_class.metrics,
            *LDT.objective_class.training_metrics,
            "grad_norm",
            "loss",
        }
        assert result["metrics"]["left"] > 5
        boards = (2, 16, 4) if arch == "ldt" else (16, 4)
        assert result["carry"]["alive"].shape == (_BATCH, *boards)
    return found


def _assert_same_runs(together: Results, alone: Results) -> None:
    for arch, (expected,) in alone.items():
        ranks = together[arch]
        for name, tensor in expected["carry"].items():
            assert torch.equal(torch.cat([each["carry"][name] for each in ranks]), tensor), f"{arch}: {name}"
        for name, tensor in expected["weights"].items():
            for each in ranks:
                assert_close(each["weights"][name], tensor, what=f"{arch}: {name}")
        assert ranks[0]["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE), arch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"gradient_accumulation_steps": 3, "sync": "flat"}),
        (2, {"sync": "ddp"}),
        (3, {"shares": [8, 16, 0]}),
    ],
)
def test_several_ranks_are_the_same_run(sudoku_folder, alone, tmp_path, num_ranks, options):
    """Also where a rank has no slots."""
    _assert_same_runs(_run_ranks(num_ranks, sudoku_folder, tmp_path, range(_STEPS), options), alone)


@pytest.mark.slow
def test_a_resumed_run_is_the_same(sudoku_folder, alone, tmp_path):
    """On ranks whose shares overlap those of two ranks before."""
    _run_ranks(2, sudoku_folder, tmp_path, range(5), {})
    _assert_same_runs(_run_ranks(3, sudoku_folder, tmp_path, range(5, _STEPS), {}), alone)


# ----------------------------------------------------------------------------------------------- evaluation

_SETTINGS = Settings((3, 12), (1, 4, 8), ("first_to_halt",))


def _model(data: Dataset) -> HaltingModel:
    torch.manual_seed(0)
    return build_model(tiny_config(arch=_LDT).arch, data.metadata).eval()


def _evaluate(folder: Path, batch_size: int, settings=_SETTINGS) -> tuple[SetResult, int]:
    """Evaluates a search; returns also how many rows were called."""
    data, rows = _open(folder), []
    model = _model(data)
    model.network.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[1])))
    result = evaluate_split(model, data, global_batch_size=batch_size, settings=settings, seed=3)
    return result.get("all"), sum(rows)


@pytest.mark.long
@pytest.mark.slow
def test_a_search_decides_or_does_not_and_drops_what_cannot_win(sudoku_folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Race, "is_lost", lambda _, rows, steps: torch.zeros_like(rows).bool())
        whole, num_rows = _evaluate(sudoku_folder, 1000)
    assert {way for _, _, way, _ in whole.scores} == {"first_to_halt"}
    undecided = {key[:2]: number for key, number in whole.scores.items() if key[3] == "undecided"}
    calls = {key[:2]: number for key, number in whole.scores.items() if key[3] == "calls"}
    assert undecided[3, 1] > undecided[12, 1] > undecided[12, 8], undecided
    assert whole.metrics["undecided"] == pytest.approx(undecided[12, 8] / 100)
    assert all(number <= 100 * depth * samples for (depth, samples), number in calls.items())
    for batch_size in (7, 1000):
        ours, fewer = _evaluate(sudoku_folder, batch_size)
        assert (ours.scores, ours.metrics) == (whole.scores, whole.metrics)
        assert fewer < 0.9 * num_rows
    ours, _ = run_ranks(_evaluate, 2, sudoku_folder, 64)[0]
    assert ours.scores == whole.scores
    plain, _ = _evaluate(sudoku_folder, 64, settings=None)  # halts early too
    assert plain.metrics["undecided"] == pytest.approx(undecided[12, 1] / 100)


def test_the_first_to_halt_answers_whatever_is_asked_for(sudoku_folder):
    model = _model(open_dataset(sudoku_folder, read_everything=False))
    asked = load_defaults("evaluate") | {"checkpoint": "run", "samples": [8]}
    reasoning, settings = set_up(model, validate_config(EvaluateConfig, asked))
    assert (reasoning.halting, settings.selects) == ("act", ("first_to_halt",))
    with pytest.raises(ValueError, match="select=vote"):
        set_up(model, validate_config(EvaluateConfig, asked | {"select": "vote"}))
