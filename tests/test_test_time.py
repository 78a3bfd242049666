"""Several runs of each puzzle in one pass: every setting against a plain loop, in any batch."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from config.compose import config_with
from config.programs import EvaluateConfig
from dataset.build import build_dataset
from dataset.files import open_dataset
from dataset.loader import Batch, read_rows
from evaluation.evaluators import Evaluators
from evaluation.passes import SetResult, evaluate_split
from evaluation.selection import ORACLE, Samples, Settings, select
from evaluation.test_time import check_effects, set_up
from models import HaltingModel
from models.carry import Reasoning, State
from models.random import SlotRng
from tests.float64 import float64
from tests.ranks import run_ranks
from tests.sudoku_source import source_rows, write_csv
from tests.tiny import FACTS, halting_model, tiny_model

_STEPS, _SAMPLES, _SEED, _COUNT = (2, 3, 6), (1, 2, 3), 5, 34
_SELECTS = ("vote", "q_head", "q_head_any_step", "first_to_halt", "residual", "rules")
_SETTINGS = Settings(_STEPS, _SAMPLES, _SELECTS)


def _reasoning(model: HaltingModel, halting: str = "max", noise: float = 0.5) -> Reasoning:
    return dataclasses.replace(model.eval_reasoning(halting), step_noise=noise)


def _evaluate(
    folder: Path,
    settings: Settings | None = _SETTINGS,
    *,
    batch_size: int = 32,
    halting: str = "max",
    noise: float = 0.5,
    **options,
) -> SetResult:
    model = options.pop("model", None) or halting_model(folder, steps=_STEPS[-1])
    data = open_dataset(folder, read_everything=False)
    result = evaluate_split(
        model,
        data,
        reasoning=_reasoning(model, halting, noise),
        global_batch_size=batch_size,
        settings=settings,
        seed=_SEED,
        evaluators=Evaluators(["sudoku"], data),
        **{"outputs": ("preds", "logits", "q_halt_logits", "labels"), **options},
    )
    return result.get("all")


def _in_float64(folder: Path, options: dict) -> SetResult:
    with float64():
        return _evaluate(folder, **options)


@pytest.fixture(scope="module")
def answerable(tmp_path_factory) -> Path:
    """A set in which an untrained model is right now and then: a label has one counted cell at most."""
    folder = tmp_path_factory.mktemp("answerable")
    for name, rows in (("train", source_rows(5)), ("test", source_rows(_COUNT, stream=1))):
        write_csv(folder / f"{name}.csv", rows)
    build_dataset("sudoku", ["--output-dir", str(folder / "data"), "--source", str(folder), "--box", "2x2"])
    folder = folder / "data"
    labels = np.load(folder / "test" / "all__labels.npy")
    kept = np.random.default_rng(0).integers(0, labels.shape[1], (len(labels), 1))
    few = np.zeros_like(labels)
    np.put_along_axis(few, kept, np.take_along_axis(labels, kept, 1), 1)
    few[::17] = 0  # puzzles without an answer count nowhere
    np.save(folder / "test" / "all__labels.npy", few)
    return folder


def _naive_runs(model: HaltingModel, batch: Batch, *, stops: bool) -> list[list[dict]]:
    """Every step of every sample: what the network answers, as long as a run that stops goes on."""
    model, reasoning, runs = model.eval(), _reasoning(model), []
    for sample in range(_SAMPLES[-1]):
        carry, steps, before = model.initial_carry(batch), [], None
        has_halted = torch.zeros(len(batch.rows), dtype=torch.bool)
        for step in range(1, _STEPS[-1] + 1):
            number = torch.full_like(carry.steps, step)
            samples = torch.full_like(batch.rows, sample)
            rng = SlotRng.of_evaluation(_SEED, rows=batch.rows, samples=samples, steps=number)
            with torch.inference_mode():
                if step == 1:
                    carry = model.refill(carry, batch, reasoning, rng)
                output = model(carry, reasoning, rng)
            carry, prediction = output.carry, output.prediction
            change = None if before is None else (prediction.logits - before).norm(dim=-1).mean(-1)
            before = prediction.logits
            now = {
                "logits": prediction.logits.numpy(),
                "q": prediction.q_halt.numpy(),
                "step": np.full(len(batch.rows), step),
                "change": np.full(len(batch.rows), np.nan) if change is None else change.numpy(),
            }
            if stops and steps:
                frozen = has_halted.numpy()
                for name, array in now.items():
                    where = frozen.reshape(-1, *[1] * (array.ndim - 1))
                    now[name] = np.where(where, steps[-1][name], array)
            has_halted = has_halted | model.network.wants_to_halt(carry.state, prediction)
            now["has_halted"] = has_halted.numpy()
            steps.append(now)
        runs.append(steps)
    return runs


def _naive_score(runs, batch: Batch, setting: tuple[int, int], by: str, rules) -> tuple[int, int]:
    """The exact answers of a setting, and the calls, puzzle by puzzle."""
    depth, num_samples = setting
    num_exact = num_calls = 0
    for row in range(len(batch.rows)):
        label = batch.labels[row].numpy()
        counts = label != -100
        if not counts.any():
            continue
        candidates = []
        for sample in range(num_samples):
            steps = [{name: each[row] for name, each in step.items()} for step in runs[sample][:depth]]
            halted = [step for step in steps if step["has_halted"]]
            answer = {
                "q_head_any_step": max(steps, key=lambda step: step["q"]),
                "first_to_halt": (halted or steps[-1:])[0],
            }.get(by, steps[-1])
            distinct = {int(step["step"]): step for step in steps}.values()
            changes = [step["change"] for step in distinct if not np.isnan(step["change"])][-3:]
            candidates.append(
                {
                    "preds": answer["logits"].argmax(-1),
                    "q": answer["q"],
                    "steps": answer["step"],
                    "calls": steps[-1]["step"],
                    "has_halted": bool(halted),
                    "residual": np.mean(changes) if changes else np.nan,
                }
            )
        preds = np.stack([each["preds"] for each in candidates])
        is_exact = [((pred == label) | ~counts).all() for pred in preds]
        calls = sum(each["calls"] for each in candidates)
        if by == ORACLE:
            is_right = any(is_exact)
        else:
            columns = {name: np.array([[each[name] for each in candidates]]) for name in candidates[0]}
            chosen = select(
                by,
                Samples(
                    preds[None],
                    columns["q"],
                    columns["steps"],
                    columns["has_halted"],
                    columns["residual"],
                    rules(batch.inputs[row].numpy()[None].repeat(num_samples, 0), preds)[None],
                ),
            )
            is_right = is_exact[int(chosen[0])]
            if by == "first_to_halt":
                calls = num_samples * min(each["steps"] for each in candidates)
        num_exact, num_calls = num_exact + is_right, num_calls + int(calls)
    return int(num_exact), num_calls


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "halting"),
    [
        ("trm", "act"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("trm", "max"), ("hrm", "act"), ("serrm", "act"))
        ),
    ],
)
def test_every_setting_is_that_of_a_plain_loop(answerable, name, halting, monkeypatch):
    """`act` is as `max` read at halting; some answers obey the rules that are made up here."""
    monkeypatch.setattr(Evaluators, "rules_of", lambda *_: lambda _, preds: preds[:, 0] % 2 == 0)
    batch = read_rows(open_dataset(answerable, read_everything=False), "all", np.arange(_COUNT))
    found = _evaluate(
        answerable, model=halting_model(answerable, name, steps=_STEPS[-1]), halting=halting
    ).scores
    rules = Evaluators(["sudoku"], open_dataset(answerable, read_everything=False)).rules_of("all")
    runs = _naive_runs(halting_model(answerable, name, steps=_STEPS[-1]), batch, stops=halting == "act")
    settings = set(itertools.product(_STEPS, _SAMPLES, (*_SELECTS, ORACLE)))
    assert set(found) == {(*setting, name) for setting in settings for name in ("exact", "valid", "calls")}
    distinct = set()
    for *setting, by in settings:
        expected = _naive_score(runs, batch, tuple(setting), by, rules)
        assert (found[(*setting, by, "exact")], found[(*setting, by, "calls")]) == expected, (setting, by)
        distinct.add(expected)
    assert len({exact for exact, _ in distinct}) > 5, "the settings must differ, or this proves little"


def test_one_run_without_noise_is_the_plain_evaluation_to_the_bit(answerable):
    plain = _evaluate(answerable, None, noise=0.0)
    ours = _evaluate(answerable, Settings(_STEPS), noise=0.0)
    for name, array in plain.outputs.items():
        assert np.array_equal(ours.outputs[name], array), name
    steps = {"act_exact_accuracy", "act_steps"}
    assert ours.metrics == {name: value for name, value in plain.metrics.items() if name not in steps}
    for depth in _STEPS:
        exact, calls = (ours.scores[depth, 1, "q_head", name] for name in ("exact", "calls"))
        assert exact / plain.metrics["count"] == plain.exact_accuracy_after_each_step[depth - 1]
        assert calls == depth * plain.metrics["count"]


@pytest.mark.slow
def test_noise_of_the_architecture_is_drawn_in_a_plain_evaluation_too(answerable):
    noises = {"init_noise": 1.0, "state_noise": 0.1, "damping": 0.9}
    model = halting_model(answerable, steps=_STEPS[-1], **noises)
    plain, deep = (_evaluate(answerable, each, noise=0.0, model=model) for each in (None, Settings(_STEPS)))
    assert np.array_equal(plain.outputs["logits"], deep.outputs["logits"])
    quiet = _evaluate(answerable, None, noise=0.0)
    assert not np.array_equal(plain.outputs["logits"], quiet.outputs["logits"])


@pytest.fixture(scope="module", params=["max", "act"])
def alone(request, answerable) -> tuple[str, SetResult]:
    return request.param, _in_float64(answerable, {"halting": request.param})


@pytest.mark.slow
def test_neither_ranks_nor_batch_size_change_anything(answerable, alone):
    """Three ranks with 2, 1 and 1 puzzles of a batch, and one rank with 10."""
    halting, expected = alone
    ours = run_ranks(_in_float64, 3, answerable, {"batch_size": 12, "halting": halting})[0]
    assert ours.scores == expected.scores
    assert ours.metrics == pytest.approx(expected.metrics, rel=1e-9)
    for name, array in expected.outputs.items():
        np.testing.assert_allclose(ours.outputs[name], array, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_setting_is_that_setting_alone(answerable, alone):
    halting, expected = alone
    for setting in ((2, 1), (3, 2), (6, 1)):
        only = Settings(setting[:1], setting[1:], _SELECTS)
        own = _in_float64(answerable, {"settings": only, "halting": halting})
        assert own.scores == {key: each for key, each in expected.scores.items() if key[:2] == setting}
        if setting[1] > 1:
            assert (
                own.metrics["exact_accuracy"]
                == own.scores[(*setting, "vote", "exact")] / own.metrics["count"]
            )


@pytest.mark.slow
def test_metrics_and_outputs_are_of_the_largest_setting_by_the_first_select(answerable, alone):
    halting, result = alone
    num_exact = result.scores[_STEPS[-1], _SAMPLES[-1], "vote", "exact"]
    assert result.metrics["exact_accuracy"] == pytest.approx(num_exact / result.metrics["count"])
    assert result.metrics["sudoku/exact_accuracy"] == result.metrics["exact_accuracy"]
    assert len(result.outputs["preds"]) == _COUNT
    assert np.array_equal(result.outputs["preds"], result.outputs["logits"].argmax(-1))
    labels = result.outputs["labels"]
    is_exact = ((result.outputs["preds"] == labels) | (labels == -100)).all(-1) & (labels != -100).any(-1)
    assert is_exact.sum() == num_exact


def _config(**changes) -> EvaluateConfig:
    return config_with(EvaluateConfig, checkpoint="run", **changes)


def test_set_up():
    model = tiny_model(init_noise=0.5)
    assert set_up(model, _config()) == (model.eval_reasoning("max"), None)
    asked = {"halt_max_steps": [16, 2], "samples": [8, 1], "noise": 0.3, "init_noise": 0.0, "damping": 0.9}
    changed = {"max_steps": 16, "step_noise": 0.3, "init_noise": 0, "damping": 0.9, "halting": "act"}
    reasoning, settings = set_up(model, _config(**asked, halting="act"))
    assert reasoning == dataclasses.replace(model.eval_reasoning("max"), **changed)
    assert settings == Settings((2, 16), (1, 8), ("q_head",))
    assert set_up(tiny_model(eval_halt_max_steps=9), _config())[0].max_steps == 9
    assert set_up(tiny_model("fprm", L_cycles=2, eval_L_cycles=3), _config())[0].L_cycles == 3
    assert set_up(tiny_model("transformer"), _config(select="vote"))[1] == Settings((1,), (1,), ("vote",))


def test_what_means_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^samples=8: all samples would be identical, .* Set noise=0.3"):
        set_up(tiny_model(), _config(samples=[1, 8]))
    with pytest.raises(ValueError, match="^noise is for models that keep a state between steps"):
        set_up(tiny_model("transformer"), _config(noise=0.3))
    for changes, message in (
        ({"samples": [1, 1]}, r"samples: \[1, 1\] has a value twice"),
        ({"select": "rules"}, "select=rules needs the rules of the puzzle. Set evaluators"),
        ({"damping": 0.0}, "damping=0.0 should be greater than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            _config(**changes)


def test_noise_is_refused_if_no_state_gets_it(monkeypatch):
    """The network of a plugin may name its states freely."""
    model = tiny_model()
    state = model.network.initial_state(1, seq_len=FACTS.seq_len)
    monkeypatch.setattr(model.network, "initial_state", lambda *_, **_sizes: {"memory": state["z_H"]})
    with pytest.raises(ValueError, match=r"^noise=0\.3 has no effect: no state of this model has a name"):
        set_up(model, _config(noise=0.3))
    with pytest.raises(ValueError, match=r"^samples=2: all samples would be identical.* Remove samples\."):
        set_up(model, _config(samples=2))
    assert set_up(model, _config(noise=0.0, damping=0.9))[0].damping == 0.9


@pytest.mark.parametrize("name", ["trm", "fprm", "flow"])
def test_init_noise_is_refused_if_the_network_does_not_start_with_it(name, monkeypatch):
    """The network of a plugin may have a `start` of its own."""
    model = tiny_model(name)
    check_effects(model, _config(init_noise=0.5), seq_len=FACTS.seq_len)
    check_effects(model, _config(), seq_len=FACTS.seq_len)

    def start(data: Batch, *_: object) -> State:
        return model.network.initial_state(len(data.inputs), seq_len=data.inputs.shape[1])

    monkeypatch.setattr(model.network, "start", start)
    with pytest.raises(ValueError, match=r"^init_noise=0\.5 has no effect: this model does not start with"):
        check_effects(model, _config(init_noise=0.5), seq_len=FACTS.seq_len)


@pytest.mark.parametrize("name", ["trm", "fprm", "serrm", "flow"])
def test_damping_is_refused_if_the_network_has_none(name, monkeypatch):
    """The network of a plugin may not call `perturb`."""
    model = tiny_model(name)
    check_effects(model, _config(damping=0.9), seq_len=FACTS.seq_len)
    forward = model.network.forward

    def undamped(*inputs: object, reasoning: Reasoning, rng: SlotRng | None = None) -> object:
        return forward(*inputs, reasoning=dataclasses.replace(reasoning, damping=1.0), rng=rng)

    monkeypatch.setattr(model.network, "forward", undamped)
    check_effects(model, _config(damping=1.0), seq_len=FACTS.seq_len)
    with pytest.raises(ValueError, match=r"^damping=0\.9 has no effect: this model does not damp its state"):
        check_effects(model, _config(damping=0.9), seq_len=FACTS.seq_len)
