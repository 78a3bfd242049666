"""Local steps against a naive loop in one process: separate workers, joined by torch's own SGD."""

import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.shards import tensor_of
from distributed.world import rank
from models.hrm import HRM
from tests.checkpoints import begin_training, do_step, open_checkpoints, replicated_tensors, resume
from tests.float64 import TOLERANCE, assert_close, in_float64
from tests.ranks import call_each, complete_program, run_ranks, send_signal
from tests.tiny import OVERRIDES, logged_rows, random_batch, tiny_arch, tiny_config
from training.metrics import training_metrics
from training.state import TrainState
from training.strategy import StepResult, next_sync, synced_steps

_STEPS, _LOCAL_STEPS, _WORKERS, _BATCH, _EMA = 10, 4, 2, 24, 0.8
_SYNCED = (range(1, 5), range(5, 9), range(9, 11))  # steps of each synchronisation; the last step has one
_CPU = torch.device("cpu")
_RUNS: dict[str, dict[str, Any]] = {
    "mean": {},
    "momentum": {
        **{"outer_lr": 0.7, "outer_momentum": 0.9, "ema_bias_correction": True},
        **{"grad_clip_norm": 0.5, "gradient_accumulation_steps": 2},
    },
}


def _build(options: dict[str, Any]) -> tuple[TrainState, Any]:
    """Nobody explores: a worker alone would draw for its slots what the first of several does."""
    arch = tiny_arch(halt_exploration_prob=0.0).model_dump()
    config = tiny_config(**{"arch": arch, "ema": _EMA, "global_batch_size": _BATCH} | options)
    return begin_training(config, total_steps=_STEPS), config


def _do_step(state: TrainState, config: Any, slots: slice = slice(None)) -> StepResult:
    """slots: of the global batch, those of a worker that knows no other."""
    return do_step(state, config, random_batch(_BATCH, seed=state.step).select(slots), total_steps=_STEPS)


def _result(state: TrainState, steps: list) -> dict[str, Any]:
    sums = state.metrics.reduce()
    metrics = training_metrics(state.model.network, sums, steps=_STEPS, global_batch_size=_BATCH)
    with state.averaged():
        averages = {name: value.clone() for name, value in state.model.network.state_dict().items()}
    return {
        "weights": {name: value.clone() for name, value in state.model.network.state_dict().items()},
        "averages": averages,
        "replicated": replicated_tensors(state),
        "moments": {name: tensor_of(value)[0] for name, value in state.weights.moments().items()},
        "metrics": metrics if rank() == 0 else {},
        "steps": steps,
    }


def _train(options: dict[str, Any]) -> dict[str, Any]:
    state, config = _build({"local_steps": _LOCAL_STEPS, **options})
    steps = []
    for _ in range(_STEPS):
        steps.append(_do_step(state, config))
    merged = [(float(each.loss), float(each.grad_norm)) if each.steps else None for each in steps]
    return _result(state, merged)


def _naive(options: dict[str, Any]) -> dict[str, Any]:
    """Workers that know nothing of each other, each with its share for a whole batch."""
    options = dict(options)
    momentum = options.pop("outer_momentum", 0)
    outer_lr = options.pop("outer_lr", 1)
    share = _BATCH // _WORKERS
    workers = [_build(options | {"global_batch_size": share}) for _ in range(_WORKERS)]
    networks = [state.model.network for state, _ in workers]
    weights = [dict(network.named_parameters()) for network in networks]
    shared = {name: value.detach().clone() for name, value in weights[0].items()}
    table = networks[0].puzzle_emb.weights.clone()
    outer = torch.optim.SGD(list(shared.values()), lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    averages = {name: value.clone() for name, value in [*shared.items(), ("puzzle_emb.weights", table)]}
    steps: list = []
    for joined in _SYNCED:
        known, moved = [], [set() for _ in workers]
        for step in joined:
            for number, (state, config) in enumerate(workers):
                result = _do_step(state, config, slice(number * share, (number + 1) * share))
                known.append((float(result.loss), float(result.grad_norm)))
                moved[number].update(state.carry.data.puzzle_identifiers.tolist())
            steps.append(None if step < joined[-1] else tuple(torch.tensor(known).mean(0).tolist()))
        for name, value in shared.items():
            value.grad = value - sum(each[name].detach() for each in weights) / _WORKERS
        outer.step()
        for identifier in set.union(*moved):
            rows = [
                each.puzzle_emb.weights[identifier]
                for each, theirs in zip(networks, moved, strict=True)
                if identifier in theirs
            ]
            table[identifier] = sum(rows) / len(rows)
        with torch.no_grad():
            for network in networks:
                network.puzzle_emb.weights.copy_(table)
            for each in weights:
                for name, value in shared.items():
                    each[name].copy_(value)
        decay, done = _EMA ** len(joined), joined[-1]
        held = 1 - _EMA ** (done - len(joined)) if options.get("ema_bias_correction") else 1.0
        whole = 1 - _EMA**done if options.get("ema_bias_correction") else 1.0
        for name, value in [*shared.items(), ("puzzle_emb.weights", table)]:
            averages[name] = (decay * held * averages[name] + (1 - decay) * value) / whole
    sums: dict[str, float] = {}
    for state, _ in workers:
        for name, value in state.metrics.own().items():
            sums[name] = sums.get(name, 0.0) + (value / _WORKERS if name == "grad_norm" else value)
    return {
        "weights": {**shared, "puzzle_emb.weights": table},
        "averages": averages,
        "moments": [state.weights.moments() for state, _ in workers],
        "metrics": training_metrics(HRM, sums, steps=_STEPS, global_batch_size=_BATCH),
        "steps": steps,
    }


@pytest.mark.slow
def test_local_steps_are_those_of_workers_apart():
    cases = [(options,) for options in _RUNS.values()]
    ranks = run_ranks(in_float64, _WORKERS, call_each, _train, cases)
    (naive,) = run_ranks(in_float64, 1, call_each, _naive, cases)
    for name, expected, *together in zip(_RUNS, naive, *ranks, strict=True):
        for number, ours in enumerate(together):
            where = f"{name}, rank {number}"
            for kind in ("weights", "averages"):
                for key, value in expected[kind].items():
                    assert_close(ours[kind][key], value, what=f"{where}: {kind} {key}")
            for key, value in expected["moments"][number].items():
                assert_close(ours["moments"][key], value, what=f"{where}: its own {key}")
            for key, value in ours["replicated"].items():
                assert torch.equal(value, together[0]["replicated"][key]), f"{where} has another {key}"
            assert [each is None for each in ours["steps"]] == [each is None for each in expected["steps"]]
            for known, theirs in zip(ours["steps"], expected["steps"], strict=True):
                assert known == theirs or known == pytest.approx(theirs, rel=TOLERANCE), where
        assert together[0]["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE), name
    first, second = (mean["moments"] for mean, _ in ranks)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def _meet_a_nan() -> list[str]:
    from training.metrics import FiniteCheck

    state, config = _build({"local_steps": _LOCAL_STEPS})
    finite = FiniteCheck(_CPU)
    for _ in range(_LOCAL_STEPS):
        if rank() == 1 and state.step == 1:
            state.weights.flats[0].weights[0] = torch.nan
        result = _do_step(state, config)
        if result.steps:
            with pytest.raises(SystemExit):
                finite.add(state.step, set_name="all", loss=result.loss, grad_norm=result.grad_norm)
            return [str(state.step)]
    return []


def test_a_rank_that_is_not_finite_ends_all_at_the_exchange():
    assert run_ranks(_meet_a_nan, 2) == [["4"]] * 2


def test_exchanges_are_every_few_steps_and_at_the_end():
    run = {"local_steps": 4, "total_steps": 10}
    joined = [each for step in range(1, 11) if (each := synced_steps(step, **run))]
    assert joined == list(_SYNCED)
    assert [next_sync(step, **run) for step in (1, 4, 5, 9, 10, 12)] == [4, 4, 8, 10, 10, 10]
    run["local_steps"] = 1
    assert [synced_steps(step, **run) for step in (1, 2)] == [range(1, 2), range(2, 3)]


def test_a_run_that_starts_between_two_exchanges_averages_only_its_own_steps(tmp_path):
    """`resume=PATH` may add local_steps, or continue after a last exchange that was early."""
    options = {"ema": _EMA, "compile": False}
    config, run = tiny_config(**options), tmp_path / "run"
    state = begin_training(config)
    for seed in range(6):
        do_step(state, config, random_batch(_BATCH, seed=seed))
    with open_checkpoints(run, **options) as checkpoints:
        checkpoints.save(state)
    options["local_steps"] = _LOCAL_STEPS
    config, state = tiny_config(**options), resume(run, **options)
    state.model.train()
    with state.averaged():
        before = {name: value.clone() for name, value in state.model.network.state_dict().items()}
    first, last = (do_step(state, config, random_batch(_BATCH, seed=seed)) for seed in (6, 7))
    assert (list(first.steps), last.steps) == ([], range(7, 9))
    averages = state.average.values(step=8) | state.table.average.values(step=8)
    for name, value in averages.items():
        weights = state.model.network.state_dict()[name]
        torch.testing.assert_close(value, _EMA**2 * before[name] + (1 - _EMA**2) * weights, msg=name)


_LOCAL = (
    *("local_steps=4", "outer_lr=0.7", "outer_momentum=0.9", "ema=0.9"),
    *("epochs=2", "eval_interval=1", "checkpoint_interval=5", "log_interval=3", "keep_checkpoints=null"),
)


def _pretrain(data: Path, run: Path, *words: str, world_size: int = 2, **options: Any) -> None:
    words = (f"data_path={data}", *OVERRIDES, *_LOCAL, *words, f"checkpoint_path={run}")
    complete_program("pretrain", *words, folder=run.parent, world_size=world_size, **options)


def _tensors(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_happened(tmp_path, sudoku_folder):
    """What is due at steps 5, 8, 10, 15 and 16 is done after 8, 12 and 16; a signal is obeyed there too."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _pretrain(sudoku_folder, whole)
    assert sorted(int(path.name[5:]) for path in whole.glob("step_*")) == [8, 12, 16]
    spoil = functools.partial(send_signal, signal.SIGTERM, "training.step", "train_step", 10)
    _pretrain(sudoku_folder, stopped, spoil=spoil)
    assert json.loads((stopped / "status").read_text()) == {"status": "stopped", "step": 12}
    _pretrain(sudoku_folder, tmp_path / "other", f"resume={stopped}", "max_steps=13", world_size=1)
    assert (tmp_path / "other" / "step_16").is_dir(), "max_steps waits for the exchange too"
    _pretrain(sudoku_folder, stopped)
    ours, expected = (_tensors(run / "step_16") for run in (stopped, whole))
    assert ours == expected
    assert ours["optimizer_0_of_2.safetensors"] != ours["optimizer_1_of_2.safetensors"]
    rows, others = logged_rows(stopped), logged_rows(whole)
    assert [row["step"] for row in rows] == [4, 8, 12, 16] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        for name in ("train/lm_loss", "train/grad_norm", "eval/all/accuracy"):
            assert row.get(name) == other.get(name), f"{name} at step {row['step']}"
