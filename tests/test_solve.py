"""solve.py gives the answer that evaluate.py would give, and what it says of it."""

import ast
import dataclasses
import functools
import io
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import models
from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_weights
from config.compose import config_with
from config.programs import SolveConfig
from dataset.build import build_dataset
from dataset.build.splits import make_split
from dataset.build.writing import write_dataset
from dataset.files import open_dataset
from dataset.kinds.kind import Puzzle, find_kind
from evaluation.evaluators import Evaluators
from evaluation.passes import evaluate_split
from evaluation.selection import Settings
from evaluation.solving import Answer, answer_puzzle
from solve import Solver, load
from tests.arc_source import make_tasks
from tests.solvers import CLUES, PUZZLE, run_solve, save_arc_run, save_maze_run, save_run
from training.adaptation import adapt


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("solve")


@pytest.fixture(scope="module")
def sudoku(folder, sudoku_folder) -> Path:
    return save_run(folder / "sudoku", sudoku_folder)


@pytest.fixture(scope="module")
def arc(folder) -> Path:
    return save_arc_run(folder)


@pytest.mark.parametrize(
    ("steps", "samples", "select", "halting"),
    [
        (4, 1, "q_head", "max"),
        (4, 4, "q_head", "max"),
        (6, 4, "q_head_any_step", "max"),
        (6, 3, "first_to_halt", "max"),
        (4, 3, "residual", "max"),
        (6, 4, "vote", "act"),
    ],
)  # fmt: skip
def test_the_answer_is_that_of_an_evaluation(sudoku, sudoku_folder, steps, samples, select, halting):
    """Of example 14 of the test set; and the steps of the run are those of the answer."""
    solver, row = load(sudoku, device="cpu"), 14
    model = solver._model_for(solver.info.metadata)
    changes = {"max_steps": steps, "step_noise": 0.3 if samples > 1 else 0.0, "halting": halting}
    data = open_dataset(sudoku_folder, splits=("test",), read_everything=False)
    result = evaluate_split(
        model,
        data,
        global_batch_size=samples,
        reasoning=dataclasses.replace(model.eval_reasoning("max"), **changes),
        outputs=["preds", "q_halt_logits"],
        evaluators=Evaluators(["sudoku"], data),
        settings=Settings((steps,), (samples,), (select,)),
        seed=3,
        puzzles={"all": np.array([row])},
    )["all"]

    puzzle = data.splits["test"].sets["all"].inputs[row]
    question = Puzzle(puzzle, 6, rules=find_kind("sudoku").read_puzzles(PUZZLE)[0].rules)
    keys = {"steps": steps, "samples": samples, "select": select, "halting": halting, "seed": 3}
    answer = _answer(solver, question, row=row, **keys)
    assert answer.tokens.tolist() == result.outputs["preds"][0].tolist()
    assert answer.valid == question.rules(puzzle[None], answer.tokens[None])[0]
    logit = float(result.outputs["q_halt_logits"][0])
    assert answer.q_halt == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5)
    assert [step.number for step in answer.steps] == list(range(1, len(answer.steps) + 1))
    assert len(answer.steps) == steps or halting == "act"


def _answer(solver: Solver, question: Puzzle, *, row: int, **keys) -> Answer:
    config = config_with(SolveConfig, **keys)
    model = solver._model_for(solver.info.metadata)
    options = {"style": solver.info.style, "identifier": 0, "device": torch.device("cpu")}
    return answer_puzzle(model, question, config, row=row, **options)


def test_from_python(sudoku):
    model = load(sudoku, device="cpu")
    answer = model.solve(PUZZLE, steps=5)
    assert len(answer.steps) == 5
    assert answer.grid.shape == answer.confidence.shape == (4, 4)
    assert answer.text == str(answer) == "\n".join("".join(row) for row in answer.grid)
    assert answer.valid in (True, False)
    before = np.array(CLUES)
    for step in answer.steps:
        assert np.array_equal(step.changed, (step.tokens != before).reshape(4, 4))
        before = step.tokens
        assert 0 <= step.q_halt <= 1
    assert answer.halting_step == next((s.number for s in answer.steps if s.wants_to_halt), None)
    rows = np.array([[1, 0, 0, 4], [0] * 4, [0] * 4, [4, 0, 0, 1]])
    for same in (
        rows,
        rows.tolist(),
        PUZZLE.split(),
        ["1 . . 4", *PUZZLE.split()[1:]],
        [*PUZZLE.replace(" ", "")],
    ):
        assert model.solve(same, steps=5).text == answer.text
    for wrong, message in {
        "[[1, 0, 0, 4], [0, 0]]": "the puzzle is ragged: row 2 has 2 cells, row 1 has 4",
        "[[1, None]]": "the puzzle has the cell None, neither a text nor an integer",
        "[]": "the puzzle is empty",
        "None": "the puzzle is None, neither a grid nor a text",
        "{'a': 1}": "the puzzle is a dict, but the model is not for ARC tasks. Pass its rows.",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            model.solve(ast.literal_eval(wrong))
    assert model.solve(PUZZLE, samples=2).num_samples == 2, "with noise, as it needs some"
    assert len(model.solve(PUZZLE).steps) == 4, "an earlier call changes nothing"
    with pytest.raises(ValueError, match="unknown key 'step'"):
        model.solve(PUZZLE, step=3)


@pytest.mark.parametrize("space", [" ", "."])
def test_rows_of_pairs_are_read_as_in_a_file_of_pairs(tmp_path, space):
    pairs = [[row.replace(" ", space) for row in rows] for rows in (["  47", "+ 85", "    "], ["+8", "5 "])]
    lines = [json.dumps({"input": rows, "output": "8"}) for rows in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    data = tmp_path / "data"
    build_dataset("pairs", ["--source", str(tmp_path / "pairs.jsonl"), "--output-dir", str(data)])
    model = load(save_run(tmp_path / "run", data), device="cpu")
    cells = [[*row] for row in pairs[0]]
    expected = model.solve("\n".join(pairs[0]), steps=1)
    for same in (pairs[0], cells, np.array(cells), tuple(map(tuple, cells))):
        step = model.solve(same, steps=1).steps[0]
        assert (step.tokens == expected.tokens).all()
        assert (step.changed == expected.steps[0].changed).all()
    messages = {
        "['+4', '8']": "the puzzle is ragged: row 2 has 1 cells, row 1 has 2",
        "[['', '', '4', '7']]": "the puzzle has the cell '', neither a text nor an integer",
        "[['47', '8']]": "'47' is not a symbol of the dataset.",
        "[[4, 7, 8, 5, 4]]": "the grid has 1x5 cells, but the dataset has at most 3x4",
        "{'a': 1}": "the puzzle is a dict, but the model is not for ARC tasks. Pass its rows.",
    }
    if space == ".":  # spaces between symbols are removed, as in a file
        assert (model.solve(["4 7", "8 5"], steps=1).tokens == model.solve("47 85", steps=1).tokens).all()
        messages["[['4', ' ']]"] = "' ' is not a symbol of the dataset."
    for wrong, message in messages.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            model.solve(ast.literal_eval(wrong))


def test_the_answer_forms_in_the_recorded_states(sudoku):
    model, samples = load(sudoku, device="cpu"), 2
    with models.record(model, ["z_H"]) as seen:
        answer = model.solve(PUZZLE, steps=3, samples=samples)
    ends = {each.step: each.network.answer(each.output) for each in seen}  # after the last call of each step
    for step in answer.steps:
        assert (ends[step.number].logits[answer.sample].argmax(-1).numpy() == step.tokens).all()
    assert [each.rows.tolist() for each in seen] == [[0, 1]] * len(seen)


def test_the_dataset_may_be_gone(folder, sudoku):
    maze = save_maze_run(folder)
    data = shutil.copytree(folder / "mazes", folder / "moved")
    runs = [save_run(folder / f"gone_{has}", data, has_facts=has) for has in (True, False)]
    maze_text = "S...\n.##.\n.##.\n...G"
    expected = load(runs[0], device="cpu").solve(maze_text).text
    shutil.rmtree(data)
    assert load(runs[0], device="cpu").solve(maze_text).text == expected
    rows = [[*row.replace(".", " ")] for row in maze_text.split()]  # a space is an open cell
    assert load(runs[0], device="cpu").solve(rows).text == expected
    with pytest.raises(ValueError, match="does not say whether its puzzles are maze or .*. Set data_path.$"):
        load(runs[1], device="cpu")  # of an earlier version, which kept no facts
    kinds = [load(run, device="cpu").info.kind.name for run in (sudoku, maze)]
    assert kinds == ["sudoku", "maze"], "by their builders: both have 16 cells and 6 tokens"


def test_a_dataset_of_no_kind_and_one_with_several_tasks(folder):
    draw = np.random.default_rng(0)
    pairs = draw.integers(1, 5, (8, 2, 3), dtype=np.uint8)
    split = make_split(pairs, vocab_size=5)
    metadata = dataclasses.replace(split.metadata, num_puzzle_identifiers=3)
    split = dataclasses.replace(split, metadata=metadata)
    names = ["<blank>", "sort", "reverse"]
    data, builder = folder / "numbers", {"name": "mine", "arguments": {}}
    write_dataset(data, splits={"train": split, "test": split}, identifiers=names, builder=builder)
    model = load(save_run(folder / "numbers_run", data), device="cpu")
    with pytest.raises(ValueError, match="knows several tasks by name. Set task=NAME, one of sort, reverse"):
        model.solve("1 2 3")
    answers = {name: model.solve("1 2 3", task=name, steps=2) for name in names[1:]}
    first, second = (answers[name].confidence for name in names[1:])
    assert first.shape == (1, 3)
    assert not np.array_equal(first, second), "each by its own embedding"
    with pytest.raises(ValueError, match="the puzzle has 2 cells of 5 tokens, but"):
        model.solve("1 2", task="sort")
    message = (
        r"'9' is not a symbol of its puzzles: 0 1 2 3 4\. If a plugin defines the kind 'mine', add plugins="
    )
    with pytest.raises(ValueError, match=message):
        model.solve("1 2 9", task="sort")
    shutil.rmtree(data)
    gone = load(folder / "numbers_run", device="cpu")
    for task in (None, "sort"):
        with pytest.raises(ValueError, match="does not name the 3 puzzle identifiers .* Set data_path"):
            gone.solve("1 2 3", task=task)


def test_a_model_of_any_size_solves_larger_puzzles_with_a_warning(folder, sudoku_folder, capsys, monkeypatch):
    monkeypatch.setattr("solve._MOST_MODELS", 1)
    arch = {"name": "serrm", "puzzle_emb_ndim": 0}
    model = load(save_run(folder / "any", sudoku_folder, **arch), device="cpu")
    answer = model.solve("." * 35 + "6", steps=2)
    assert answer.grid.shape == (6, 6)
    assert answer.tokens.max() <= 7
    assert "warning: the puzzle has 36 cells, but" in capsys.readouterr().err
    assert model.solve(PUZZLE, steps=2).grid.shape == (4, 4)
    assert capsys.readouterr().err == ""
    assert len(model._models) == 1
    with pytest.raises(ValueError, match=r"^task=x: .* has no puzzle embeddings\. Remove it"):
        model.solve(PUZZLE, task="x")


def test_a_puzzle_with_other_symbols_is_refused_without_a_warning(folder, sudoku_folder, capsys):
    arch = {"name": "trm", "conv": "instead", "puzzle_emb_ndim": 0, "pos_encodings": "none"}
    model = load(save_run(folder / "symbols", sudoku_folder, **arch), device="cpu")
    with pytest.raises(ValueError, match="was trained with vocab_size 6, but the puzzles have vocab_size 8"):
        model.solve("." * 35 + "6")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arch", [{"name": "serrm"}, {"name": "trm", "conv": "instead"}])
def test_learned_positions_are_of_one_size(folder, sudoku_folder, capsys, arch):
    """The table of the positions has a row for each cell."""
    arch = arch | {"pos_encodings": "learned", "puzzle_emb_ndim": 0}
    model = load(save_run(folder / f"learned_{arch['name']}", sudoku_folder, **arch), device="cpu")
    with pytest.raises(
        ValueError, match="^the puzzle has 6x6 cells of 8 tokens, but .* reads 4x4 cells of 6"
    ):
        model.solve("." * 35 + "6", steps=2)
    assert capsys.readouterr().err == ""


def test_an_arc_task_is_known_by_its_demonstrations_or_by_name(arc, folder):
    model, names = load(arc, device="cpu"), json.loads((folder / "arc_data/identifiers.json").read_text())
    tasks = {path.stem: json.loads(path.read_text()) for path in (folder / "tasks").rglob("*.json")}
    used = []
    model._model_for(model.info.metadata).network.puzzle_emb.register_forward_hook(
        lambda _module, arguments, _output: used.append(int(arguments[0][0]))
    )
    for name, task in tasks.items():
        model.solve(task | {"train": task["train"][::-1]}, steps=1)
        assert names[used[-1]] == name
    model.solve(tasks["00010000"], steps=1, task="00000001")
    assert names[used[-1]] == "00000001"

    answer = model.solve(task, steps=1)
    assert answer.correct is False
    assert set(answer.grid.flat) <= set("0123456789"), "cut out as the evaluation does"
    answer = model.solve(task | {"test": [{"input": [[1]]}, {"input": [[2]]}]}, steps=1, test=1)
    assert (answer.correct, answer.valid) == (None, None)
    assert answer.puzzle.tokens.reshape(8, 8)[:2, :2].tolist() == [[4, 1], [1, 0]]


def test_identifiers_of_a_rebuilt_dataset_are_refused(tmp_path):
    """The run does not name its identifiers, so other numbers would be rows of other tasks, or of none."""
    model, source = load(save_arc_run(tmp_path), device="cpu"), tmp_path / "tasks"
    where = ["--output-dir", str(tmp_path / "arc_data"), "--source", str(source), "--max-size", "8"]
    shutil.rmtree(tmp_path / "arc_data")
    build_dataset("arc", [*where, "--num-aug", "5"])
    for path in source.rglob("*.json"):
        with pytest.raises(
            ValueError, match="has 25 puzzle identifiers, but .* was trained with 13. Set data"
        ):
            model.solve(path, steps=1)


def test_adapting_trains_one_embedding_and_nothing_else(arc, capsys, monkeypatch):
    (task,) = make_tasks(1, seed=9).values()
    made = []
    monkeypatch.setattr("solve.adapt", lambda *a, **k: made.append(adapt(*a, **k)) or made[-1])
    model = load(arc, device="cpu")
    task["train"] += make_tasks(3, seed=8)["00080002"]["train"]
    keys = {"adapt": True, "adapt_lr": 0.3, "adapt_steps": 4, "steps": 1}
    answers = [model.solve(task, **keys) for _ in range(2)]
    assert np.array_equal(answers[0].confidence, answers[1].confidence), "drawn from the seed"
    shown = capsys.readouterr()
    assert "4 steps train only an embedding for this puzzle, on its 4 demonstrations" in shown.err
    losses = [float(loss) for loss in re.findall(r"loss=([0-9.]+)", shown.err)]
    assert max(losses) < 5, "a progress bar with the mean over the batch"

    trained = load(arc, device="cpu")._model_for(model.info.metadata).network.state_dict()
    adapted = made[0].network.state_dict()
    table = "puzzle_emb.weights"
    assert all(torch.equal(adapted[name], trained[name]) for name in trained if name != table)
    blank, own = adapted[table]
    assert torch.equal(blank, trained[table].double().mean(0).float()), "where its training began"
    assert (own != blank).all()
    # The demonstrations are likelier under the new embedding than under the mean.
    assert _loss(made[0], answers[0].puzzle, 1) < _loss(made[0], answers[0].puzzle, 0)


def test_adapting_starts_at_the_mean_also_of_as_many_embeddings_as_it_needs(arc, monkeypatch):
    (task,) = make_tasks(1, seed=9).values()
    stored, table, made = load_weights(find_checkpoint(arc)), "puzzle_emb.weights", []
    stored[table] = stored[table][1:3]
    monkeypatch.setattr("training.adaptation.load_weights", lambda *_, **__: stored)
    monkeypatch.setattr("solve.adapt", lambda *a, **k: made.append(adapt(*a, **k)) or made[-1])
    load(arc, device="cpu").solve(task, adapt=True, adapt_steps=1, steps=1)
    assert torch.equal(made[0].network.state_dict()[table][0], stored[table].double().mean(0).float())


def _loss(model, question, identifier: int) -> float:
    """Mean cross-entropy of the demonstrations after one step."""
    views = question.draw_demonstrations(1, seed=0)
    rows = np.arange(views.num_examples)
    inputs, labels = (torch.from_numpy(each.astype(np.int64)) for each in views.read(rows, 0 * rows))
    state = model.network.initial_state(len(rows), seq_len=64)
    with torch.no_grad():
        identifiers = torch.full((len(rows),), identifier)
        _, prediction = model.network(state, inputs.int(), identifiers, reasoning=model.eval_reasoning("max"))
    return float(torch.nn.functional.cross_entropy(prediction.logits.transpose(1, 2), labels, ignore_index=0))


@pytest.mark.slow
def test_the_program_reads_files_and_standard_input(sudoku, tmp_path, monkeypatch, capsys):
    program = functools.partial(run_solve, monkeypatch, capsys)
    (tmp_path / "puzzle.txt").write_text(f"\ufeff{PUZZLE}")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\ufeff{PUZZLE}"))
    shown = [
        program(f"checkpoint={sudoku}", f"puzzle={puzzle}", "steps=2")
        for puzzle in (PUZZLE, tmp_path / "puzzle.txt", "-")
    ]
    assert shown[0] == shown[1] == shown[2]
    status, out, errors = shown[0]
    assert (status, errors) == (0, "")
    assert "\x1b" not in out, "no colour in pipes"
    assert "step 2 of 2" in out
    picture = tmp_path / "solved.svg"
    asked = (f"checkpoint={sudoku}", f"puzzle={PUZZLE}", "steps=2")
    assert f"wrote {picture}" in program(*asked, f"picture={picture}")[1]
    drawn = ElementTree.fromstring(picture.read_text())
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("1") >= 2, "the clues"
    assert {"puzzle", "step 1", "4 of 16 cells given"} <= set(texts)
    (tmp_path / "folder.svg").mkdir()
    status, _, errors = program(*asked, f"picture={tmp_path / 'folder.svg'}")
    assert (status, errors.count("\n")) == (1, 1)
    assert "folder.svg (Is a directory). Choose another file" in errors
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, has_color in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert ("\x1b" in program(f"checkpoint={sudoku}", f"puzzle={PUZZLE}")[1]) == has_color


def test_a_kind_that_reads_no_texts_itself_checks_answers_by_what_it_accepts(sudoku, monkeypatch):
    """As a kind of a plugin may."""
    kind = find_kind("sudoku")
    for is_right in (True, False):

        def accepts(inputs, _answers, is_right=is_right):
            return np.full(len(inputs), is_right)

        of_plugin = dataclasses.replace(kind, read_puzzles=None, accepts=accepts)
        monkeypatch.setattr("dataset.kinds.sudoku.KIND", of_plugin)
        puzzle = PUZZLE.replace(" ", "").replace(".", find_kind("sudoku").style.symbols[1])
        assert load(sudoku).solve(puzzle).valid == is_right
