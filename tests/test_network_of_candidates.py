"""Models of another kind need their own file alone: a state of candidates, two boards a slot, a search.

Both are exact over processes: LDT, and a small one made here. Of that one nothing but `_register` stands for
lines elsewhere: those of the schema.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from config.architecture import ArchConfig, Architecture
from config.files import load_defaults
from config.programs import EvaluateConfig
from config.schema import PretrainConfig, validate_config
from dataset.description import with_candidates
from dataset.format import IGNORE_LABEL_ID, Dataset, open_dataset
from dataset.loader import Batch
from evaluation.loop import Race
from evaluation.passes import SetResult, evaluate_split
from evaluation.selection import Settings
from evaluation.test_time import set_up
from models import HaltingModel, build_model, network_class
from models.carry import Carry, Prediction, Reasoning, State, StepOutput
from models.losses import correct_sequences
from models.network import Network
from optimizers.learning_rate import learning_rates
from parallel.process_group import rank
from tests.checkpoints import do_step
from tests.float64 import TOLERANCE, assert_close, in_float64
from tests.ranks import call_each, run_ranks
from tests.tiny import tiny_config
from training.checkpoints import CheckpointManager
from training.clock import StepClock
from training.metrics import training_metrics
from training.state import TrainState, build_first_state
from training.step import train_step


class _Config(ArchConfig):
    name: Literal["candidates"] = "candidates"
    hidden_size: int = 16
    puzzle_emb_ndim: int = 0
    forward_dtype: Literal["float32"] = "float32"
    halt_max_steps: int = 6
    eval_halt_max_steps: int | None = 12


class Candidates(Network):
    """Strikes out candidates of cells, at random cells the least likely one, until each cell has but one."""

    boards_per_slot, advances, is_search, keeps_state = 2, True, True, True
    metrics: ClassVar = {"count": None, "exact_accuracy": "count", "decided": "count"}
    training_metrics: ClassVar = {"loss": "slots", "left": None, "steps": "left", "struck": "slots"}

    def __init__(self, arch: _Config, metadata):
        super().__init__(arch)
        self.num_values = metadata.vocab_size
        self.inner, self.mix = (
            nn.Linear(self.num_values, arch.hidden_size),
            nn.Linear(*[metadata.seq_len] * 2),
        )
        self.outer = nn.Linear(arch.hidden_size, self.num_values)

    def needs_draws(self, reasoning: Reasoning) -> bool:
        return True

    def start(self, data: Batch, reasoning: Reasoning, draws, fresh: Tensor) -> State:
        given = nn.functional.one_hot(data.inputs.long(), self.num_values)
        given[..., :2] = 0  # padding and blanks are no values
        every = torch.ones_like(given).index_fill(-1, torch.tensor([0, 1]), 0)
        return {"alive": torch.where((data.inputs == 1)[..., None], every, given).bool()}

    def forward(self, state: State, inputs, puzzle_identifiers, *, reasoning, draws=None):
        h = self.inner(state["alive"].to(self.inner.weight.dtype))
        logits = self.outer(torch.tanh(h + self.mix(h.transpose(1, 2)).transpose(1, 2)))
        if not self.training:  # an evaluation's step strikes out what it looked at
            state = self._strike(state, logits, draws)
        sure = _are_single(state["alive"]).double() - 0.5
        return state, Prediction(torch.where(state["alive"], logits, -torch.inf), sure, None)

    def _strike(self, state: State, logits: Tensor, draws) -> State:
        alive = state["alive"]
        worst = torch.where(alive, logits, torch.inf).argmin(-1, keepdim=True)
        chance = draws.uniform(alive.shape[1:2], use="cells") < 0.5
        strikes = (chance & (alive.sum(-1) > 1))[..., None] & torch.zeros_like(alive).scatter(-1, worst, True)
        return {"alive": alive & ~strikes}

    def divisors(self, carry: Carry) -> dict[str, Tensor]:
        return {"open": self._is_open(carry).sum()}

    def losses(self, before: Carry, output: StepOutput, *, divisors, reasoning, draws=None):
        labels = before.data.labels.long().clamp(min=0)[..., None]
        each = -output.prediction.logits.log_softmax(-1).gather(-1, labels)[..., 0]
        loss = torch.where(self._is_open(before), each, 0).sum() * (
            divisors["slots"] / divisors["open"].clamp(min=1)
        )
        return loss, {"loss": loss.detach()}

    def _is_open(self, carry: Carry) -> Tensor:
        alive, labels = carry.state["alive"], carry.data.labels.long()
        has_label = alive.gather(-1, labels.clamp(min=0)[..., None])[..., 0] & (labels != IGNORE_LABEL_ID)
        return has_label & (alive.sum(-1) > 1)

    def advance(self, carry: Carry, reasoning: Reasoning, draws):
        data = carry.data
        state, _ = self(carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws)
        left = _are_single(state["alive"]) | (carry.steps >= reasoning.max_steps)
        struck = (carry.state["alive"] & ~state["alive"]).sum()
        sums = {"left": left.sum(), "steps": (left * carry.steps).sum(), "struck": struck}
        return carry._replace(state=state, halted=left), sums

    def halts(self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws) -> Tensor:
        return carry.halted if self.training else super().halts(carry, prediction, reasoning, draws)

    def sums(self, output: StepOutput) -> dict[str, Tensor]:
        counted = (output.carry.data.labels != IGNORE_LABEL_ID).any(-1)
        decided = counted & (output.prediction.q_halt > 0)
        _, is_exact = correct_sequences(output.prediction.logits, output.carry.data.labels)
        return {
            "count": counted.sum(),
            "exact_accuracy": (decided & is_exact).sum(),
            "decided": decided.sum(),
        }


def _are_single(alive: Tensor) -> Tensor:
    return (alive.sum(-1) == 1).all(-1)


NETWORK = Candidates


def _register() -> None:
    """What a real model has in config/architecture.py, and its file in models/."""
    sys.modules["models.candidates"] = sys.modules[__name__]
    union = Architecture.__origin__ | _Config
    field = PretrainConfig.model_fields["arch"]
    field.annotation = union
    PretrainConfig.model_rebuild(force=True)


_register()

# ------------------------------------------------------------------------------------------------- training

_BATCH, _STEPS = 24, 10
_LDT = {**load_defaults("arch/ldt"), "hidden_size": 16, "num_heads": 2, "num_layers": 1, "loops": 2}
_LDT |= {"forward_dtype": "float32", "boards_per_slot": 2, "halt_max_steps": 4, "true_pin_prob": 0.5}
_LDT |= {"kill_threshold": 0.45, "eval_halt_max_steps": 12}
_ARCHS = {
    "candidates": {"name": "candidates"},
    "ldt": _LDT,
    "ldt by the training pass": _LDT
    | {"advance": "training_pass", "pos_encodings": "rope", "balanced_conflict": True, "dropout": 0.0}
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
        network = network_class(_ARCHS[arch]["name"])
        assert result["metrics"].keys() <= {*network.metrics, *network.training_metrics, "grad_norm"}
        assert result["metrics"]["left"] > 5
        boards = {"candidates": (2, 16, 6), "ldt": (2, 16, 4)}.get(arch, (16, 4))
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
        (2, {"gradient_accumulation_steps": 3}),
        (2, {"sync": "ddp"}),
        (3, {"shares": [8, 16, 0], "sync": "flat"}),
        (3, {"shares": [24, 0, 0]}),
        (4, {}),
    ],
)
def test_several_ranks_are_the_same_run(sudoku_folder, alone, tmp_path, num_ranks, options):
    """Also where a rank has no slots."""
    _assert_same_runs(_run_ranks(num_ranks, sudoku_folder, tmp_path, range(_STEPS), options), alone)


def test_boards_advance_with_the_reasoning_of_the_step_that_called_them(sudoku_folder, monkeypatch):
    data, advanced = _open(sudoku_folder), []
    state, config = _build(data, "ldt")
    advance = state.model.network.advance

    def recorded(carry, reasoning, draws):
        advanced.append(reasoning.progress)
        return advance(carry, reasoning, draws)

    monkeypatch.setattr(state.model.network, "advance", recorded)
    clock = StepClock(torch.device("cpu"))
    for step in range(1, 4):
        train_step(
            state,
            _batch(data, torch.arange(_BATCH)),
            config=config,
            rates=learning_rates(config, step, total_steps=_STEPS),
            clock=clock,
            reasoning_at=lambda number: dataclasses.replace(state.model.reasoning, progress=number / 4),
        )
    assert advanced == [1 / 4, 2 / 4]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1)])
def test_a_resumed_run_is_the_same(sudoku_folder, alone, tmp_path, before, after):
    """What is called last before the checkpoint advances after it, with the same random numbers."""
    _run_ranks(before, sudoku_folder, tmp_path, range(5), {})
    _assert_same_runs(_run_ranks(after, sudoku_folder, tmp_path, range(5, _STEPS), {}), alone)


# ----------------------------------------------------------------------------------------------- evaluation

_SETTINGS = Settings((3, 12), (1, 4, 8), ("first_to_halt",))


def _model(data: Dataset, arch: str = "candidates") -> HaltingModel:
    torch.manual_seed(0)
    return build_model(tiny_config(arch=_ARCHS[arch]).arch, data.metadata).eval()


def _evaluate(folder: Path, batch_size: int, arch: str, settings=_SETTINGS) -> tuple[SetResult, int]:
    """Evaluates a search; returns also how many rows were called."""
    data, rows = _open(folder), []
    model = _model(data, arch)
    model.network.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[1])))
    result = evaluate_split(model, data, global_batch_size=batch_size, settings=settings, seed=3)
    return result.get("all"), sum(rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["candidates", "ldt"])
def test_a_search_decides_or_does_not_and_drops_what_cannot_win(sudoku_folder, arch, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Race, "is_lost", lambda _, rows, steps: torch.zeros_like(rows).bool())
        whole, num_rows = _evaluate(sudoku_folder, 1000, arch)
    assert {way for _, _, way, _ in whole.scores} == {"first_to_halt"}
    undecided = {key[:2]: number for key, number in whole.scores.items() if key[3] == "undecided"}
    calls = {key[:2]: number for key, number in whole.scores.items() if key[3] == "calls"}
    assert undecided[3, 1] > undecided[12, 1] > undecided[12, 8], undecided
    assert _undecided(whole) == pytest.approx(undecided[12, 8] / 100)
    assert all(number <= 100 * depth * samples for (depth, samples), number in calls.items())
    for batch_size in (7, 1000):
        ours, fewer = _evaluate(sudoku_folder, batch_size, arch)
        assert (ours.scores, ours.metrics) == (whole.scores, whole.metrics)
        assert fewer < 0.9 * num_rows
    ours, _ = run_ranks(_evaluate, 2, sudoku_folder, 64, arch)[0]
    assert ours.scores == whole.scores
    plain, _ = _evaluate(sudoku_folder, 64, arch, settings=None)  # halts early too
    assert _undecided(plain) == pytest.approx(undecided[12, 1] / 100)


def _undecided(result: SetResult) -> float:
    metrics = result.metrics
    return metrics["undecided"] if "undecided" in metrics else 1 - metrics["decided"]


def test_the_first_to_halt_answers_whatever_is_asked_for(sudoku_folder):
    model = _model(open_dataset(sudoku_folder, read_everything=False))
    asked = load_defaults("evaluate") | {"checkpoint": "run", "samples": [8]}
    reasoning, settings = set_up(model, validate_config(EvaluateConfig, asked))
    assert (reasoning.halts_early, settings.selects) == (True, ("first_to_halt",))
    with pytest.raises(ValueError, match="select=vote"):
        set_up(model, validate_config(EvaluateConfig, asked | {"select": "vote"}))
