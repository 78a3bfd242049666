"""Coverage of the right answers by models: every sample runs to its end, in any batch and without labels."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate
from checkpointing.finding import find_checkpoint
from config.compose import config_with
from config.programs import EvaluateConfig, SolveConfig
from dataset.build import build_dataset
from dataset.description import with_candidates
from dataset.files import open_dataset
from dataset.kinds import coloring
from dataset.kinds.kind import find_kind
from dataset.loader import read_rows
from dataset.many_answers import ManyAnswersEvaluator
from dataset.metadata import Dataset
from distributed.number_format import Choice
from evaluation.evaluators import Evaluators
from evaluation.loop import answer_batches
from evaluation.passes import SetResult, evaluate_split
from evaluation.selection import Settings
from evaluation.solving import answer_puzzle
from evaluation.terminal import draw_answer
from evaluation.test_time import build_draw
from models import HaltingModel
from models.carry import Reasoning
from tests.ranks import call_each, run_ranks
from tests.report_runs import searching_model, write_run
from tests.tiny import halting_model, tiny_arch

_SAMPLES, _STEPS, _SEED = 6, 6, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "coloring"
    words = ["--nodes", "4", "--edge-probability", "0.4", "--generate", "20", "--num-test", "9"]
    build_dataset("coloring", ["--output-dir", str(folder), *words])
    return folder


def _open(folder: Path) -> Dataset:
    return with_candidates(open_dataset(folder, read_everything=False))


def _searching(data: Dataset) -> tuple[HaltingModel, Reasoning]:
    """An LDT whose samples halt after 4 to 6 steps. A third of them is undecided after the last step."""
    model = searching_model(data)
    with torch.no_grad():
        model.network.keep_head.weight.mul_(3)
    reasoning = model.eval_reasoning("act")
    return model, dataclasses.replace(reasoning, max_steps=_STEPS, eval_conflict_threshold=0.9)


def _evaluate(folder: Path, name: str, batch_size: int = 84, num_samples: int = _SAMPLES) -> dict[str, float]:
    """Metrics of the evaluator. name: ldt, a search, or trm, whose samples begin with random states."""
    return _metrics(_evaluate_all(folder, name, batch_size, num_samples))


def _metrics(results: dict[str, SetResult]) -> dict[str, float]:
    metrics = results["all"].metrics if results else {}
    return {key: value for key, value in metrics.items() if key.startswith("coloring/")}


def _evaluate_all(
    folder: Path, name: str, batch_size: int = 84, num_samples: int = _SAMPLES
) -> dict[str, SetResult]:
    data = _open(folder)
    if name == "ldt":
        (model, reasoning), select = _searching(data), "first_to_halt"
    else:
        model, select = halting_model(folder, steps=_STEPS), "q_head"
        reasoning = dataclasses.replace(model.eval_reasoning("max"), init_noise=1.0)
    settings = None if num_samples == 1 else Settings((_STEPS,), (num_samples,), (select,))
    options = {"evaluators": Evaluators(["coloring"], data), "settings": settings, "seed": _SEED}
    return evaluate_split(model, data, global_batch_size=batch_size, reasoning=reasoning, **options)


@pytest.mark.slow
def test_every_sample_of_a_search_runs_to_its_end(folder, monkeypatch):
    """Against each sample as a run of its own. Its board may be undecided after the last step."""
    data = _open(folder)
    (model, reasoning), num = _searching(data), data.splits["test"].sets["all"].num_examples
    draw = build_draw(model.network, reasoning, seed=_SEED, num_samples=_SAMPLES)
    m, f, first, decided, calls = [], [], 0, [], 0
    for row in range(num):
        batch = read_rows(data, "all", np.array([row]))
        right = set()
        for sample in range(_SAMPLES):
            alone = batch._replace(rows=torch.tensor([row * _SAMPLES + sample]))
            with torch.inference_mode():
                (final,) = answer_batches(model, iter([alone]), reasoning, draw=draw, on_step=lambda *_: None)
            answer = final.prediction.logits.argmax(-1).numpy().astype(np.uint8)
            is_decided = bool(final.prediction.q_halt > 0)
            decided.append(is_decided)
            calls += int(final.carry.steps)
            if is_decided and coloring.RULES.are_valid(batch.inputs.numpy(), answer)[0]:
                right.add(coloring.to_standard(batch.inputs.numpy(), answer).tobytes())
                first += sample == 0
        f.append(len(right))
        m.append(coloring.find_answers(batch.inputs.numpy())[1][0])
    assert 0.2 < np.mean(decided) < 0.8
    assert max(f) > 1
    added, add = [], ManyAnswersEvaluator.add
    monkeypatch.setattr(
        ManyAnswersEvaluator, "add", lambda *arguments: (added.append(arguments[2]), add(*arguments))
    )
    results, (m, f) = _evaluate_all(folder, "ldt"), np.array([m, f])
    found = _metrics(results)
    assert sum((answers.is_decided.tolist() for answers in added), []) == decided
    assert found["coloring/coverage_mean"] == pytest.approx((f / m).mean())
    assert found["coloring/coverage_pairs"] == pytest.approx((m * f).sum() / (m**2).sum())
    assert found["coloring/valid_accuracy"] == pytest.approx(first / num)
    assert results["all"].scores[_STEPS, _SAMPLES, "first_to_halt", "calls"] == calls
    alone = _evaluate(folder, "ldt", num_samples=1)
    assert alone["coloring/coverage_mean_ceiling"] == pytest.approx((1 / m).mean()), "of one sample"


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, dict[str, float]]:
    return {name: _evaluate(folder, name) for name in ("ldt", "trm")}


@pytest.mark.parametrize("name", ["ldt", "trm"])
def test_labels_and_the_batch_size_change_nothing(folder, expected, tmp_path, name):
    assert expected[name]["coloring/samples"] == _SAMPLES
    other = shutil.copytree(folder, tmp_path / "other")
    path = other / "test" / "all__labels.npy"
    labels = np.load(path)
    labels[:5], labels[5:] = 0, labels[5:][::-1]
    np.save(path, labels)
    assert _evaluate(other, name, batch_size=13) == expected[name]


@pytest.mark.slow
def test_the_number_of_ranks_changes_nothing(folder, expected):
    cases = [(folder, name, 25) for name in expected]
    assert run_ranks(call_each, 3, _evaluate, cases)[0] == list(expected.values())


def test_a_retry_is_refused_before_results_are_replaced(folder, tmp_path, capsys):
    run = write_run(tmp_path / "run", folder, arch=tiny_arch("ldt").model_dump())
    paths = {"checkpoint": str(run), "output_dir": str(tmp_path / "out")}
    config = config_with(EvaluateConfig, **paths, samples=2, retry_samples=4)
    arguments = (config, find_checkpoint(run), Choice("float32", "as the test says"), torch.device("cpu"))
    with pytest.raises(SystemExit):
        evaluate.evaluate_checkpoint(*arguments)
    assert "retry_samples=4: an evaluator of set 'all' needs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_solve_shows_the_different_right_answers(folder):
    data = _open(folder)
    model, kind = searching_model(data), find_kind("coloring")
    (puzzle,) = kind.read_puzzles("?#.. #?#. .#?. ...?")
    config = config_with(SolveConfig, samples=20, steps=20)
    options = {"style": kind.style, "identifier": 0, "device": torch.device("cpu")}
    answer = answer_puzzle(model, puzzle, config, **options)
    colors = [tuple(tokens[::5].tolist()) for tokens in answer.distinct]
    assert 1 < len(set(colors)) == len(colors)
    edges = [(0, 1), (1, 2)]
    assert all(each[i] != each[j] for each, (i, j) in itertools.product(colors, edges))
    text = draw_answer(answer, width=100, color=False)
    assert f"{len(colors)} different right answers among 20 samples" in text
    assert f"right answer {len(colors)}" in text
    assert "this puzzle has 6 right answers" in text
    single = answer_puzzle(model, puzzle, config_with(SolveConfig, samples=1, steps=20), **options)
    assert "right answer 1" not in draw_answer(single, width=100, color=False)
