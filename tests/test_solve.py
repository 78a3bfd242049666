"""solve.py: puzzles as people write them, the answer that evaluate.py would give, and its picture."""

import dataclasses
import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from config.files import load_defaults
from config.schema import SolveConfig, validate_config
from dataset.build_arc import main as build_arc
from dataset.build_maze import main as build_maze
from dataset.facts import read_facts
from dataset.format import open_dataset
from dataset.kinds import Look, all_kinds
from dataset.pairs import Pairs, make_split
from dataset.question import Question, read_symbols
from dataset.writing import write_dataset
from evaluation.evaluate import evaluate_split
from evaluation.evaluators import Evaluators
from evaluation.picture import draw_answer
from evaluation.solving import Answer, Step, answer_question
from evaluation.tally import Grid
from solve import Solver, load
from tests.arc_source import make_tasks, write_source
from tests.ranks import REPOSITORY, run_program
from tests.test_show import MAZE
from tests.tiny import OVERRIDES, tiny_arch, tiny_config
from training.adaptation import adapt
from training.checkpoint_manager import CheckpointManager
from training.state import build_train_state

PUZZLE = "1..4 .... .... 4..1"
CLUES = [2, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 5, 1, 1, 2]


def save_run(run: Path, data: Path, *, has_facts: bool = True, **arch) -> Path:
    """A run folder with a model as it is drawn from the seed, but for its Q head and puzzle table."""
    dataset = open_dataset(data, read_everything=False)
    config = tiny_config(arch=tiny_arch(**arch).model_dump(), checkpoint_path=str(run), data_path=[str(data)])
    state = build_train_state(config, dataset.metadata, device=torch.device("cpu"))
    state.step = 1
    network = state.model.network
    with torch.no_grad():
        if hasattr(network, "q_head"):
            network.q_head.weight.normal_()
            network.q_head.bias.normal_()
        if network.puzzle_emb is not None:
            network.puzzle_emb.weights.normal_()
    facts = read_facts([data], dataset.metadata).to_json() if has_facts else None
    run.mkdir(parents=True, exist_ok=True)
    with CheckpointManager(run, config=config, fingerprint="of the data", facts=facts) as checkpoints:
        checkpoints.save(state)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("solve")


@pytest.fixture(scope="module")
def sudoku(folder, sudoku_folder) -> Path:
    return save_run(folder / "sudoku", sudoku_folder)


@pytest.fixture(scope="module")
def maze(folder) -> Path:
    build_maze(["--output-dir", str(folder / "mazes"), "--generate", "30", "--size", "4"])
    return save_run(folder / "maze", folder / "mazes")


@pytest.fixture(scope="module")
def arc(folder) -> Path:
    source = write_source(folder / "tasks", count=2)
    build_arc(["--output-dir", str(folder / "arc_data"), "--source", str(source), "--num-aug", "2"])
    small = {"hidden_size": 16, "puzzle_emb_ndim": 16, "H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2}
    return save_run(folder / "arc", folder / "arc_data", name="trm", puzzle_emb_len=1, **small)


@pytest.fixture(scope="module")
def solvers(sudoku, maze, arc) -> dict[str, Solver]:
    return {run.name: load(run, device="cpu") for run in (sudoku, maze, arc)}


@pytest.fixture
def program(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs solve.py in this process: its status, what it printed, and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["solve.py", "cpu_threads=1", "device=cpu", *arguments])
        with pytest.raises(SystemExit) as exit_of:
            runpy.run_path(str(REPOSITORY / "solve.py"), run_name="__main__")
        shown = capsys.readouterr()
        return exit_of.value.code or 0, shown.out, shown.err

    return run


# ------------------------------------------------------------------------------------------- puzzles as texts


@pytest.mark.parametrize(
    "text",
    [
        PUZZLE,
        "1004000000004001",
        "1__4\n____\n____\n4__1\n",
        "1 . | . 4\n. . | . .\n----+----\n. . | . .\n4 . | . 1\n",
        "1,0,0,4\n0,0,0,0\n0,0,0,0\n4,0,0,1",
    ],
)
def test_the_usual_forms_of_a_sudoku(text):
    (question,) = all_kinds()["sudoku"].read_questions(text)
    assert question.tokens.tolist() == CLUES
    assert question.vocab_size == 6
    answers = np.array([[2, 4, 3, 5, 3, 5, 2, 4, 4, 2, 5, 3, 5, 3, 4, 2], CLUES])
    assert question.rules(question.tokens[None].repeat(2, 0), answers).tolist() == [True, False]


@pytest.mark.parametrize("text", [MAZE, "S# \n   \nG##", "S#\n\nG##\n", "S#.\r\n...\r\nG##\r\n"])
def test_the_usual_forms_of_a_maze(text):
    (question,) = all_kinds()["maze"].read_questions(text)
    assert question.tokens.tolist() == [3, 1, 2, 2, 2, 2, 4, 1, 1]


def test_symbols_of_other_datasets():
    def tokens(text: str, symbols=(), size: int = 12) -> list[int]:
        return read_symbols(text, symbols, vocab_size=size)[0].tokens.tolist()

    assert tokens("10 2\n 0 11") == [10, 2, 0, 11]
    assert tokens("ab\nba", "ab") == tokens("a b b a", "ab") == [0, 1, 1, 0]
    assert tokens("red blue", ["red", "blue"]) == [0, 1]


# ------------------------------------------------------------------------------------------------ bad puzzles


def _task(**changes) -> str:
    pair = {"input": [[1, 2]], "output": [[2, 1]]}
    return json.dumps({"train": [pair], "test": [{"input": [[3]]}], **changes})


@pytest.mark.parametrize(
    ("run", "puzzle", "keys", "message"),
    [
        ("sudoku", "1..4 .... .... 4..", {}, "15 cells make no Sudoku, which has one of 16 (4x4)"),
        ("sudoku", "1..4 ..?. .... 4..1", {}, "'?' is no cell of a Sudoku: give digits, and '.'"),
        ("sudoku", "1..4 ..5. .... 4..1", {}, "row 2 has the digit 5, but 4x4 cells take 1 to 4"),
        ("sudoku", "1.14 .... .... 4...", {}, "contradict each other: row 1 has the digit 1 twice"),
        ("sudoku", "3... .... 3... ....", {}, "column 1 has the digit 3 twice"),
        ("sudoku", "3... .3.. .... ....", {}, "box 1 has the digit 3 twice"),
        ("sudoku", "." * 81, {}, "the puzzle has 81 cells of 11 tokens, but"),
        ("sudoku", PUZZLE, {"test": 1}, "test=1 is out of range: puzzle has only test=0"),
        ("sudoku", PUZZLE, {"adapt": True}, "adapt=true is for puzzles with demonstrations"),
        ("sudoku", PUZZLE, {"task": "x"}, "task=x is no puzzle identifier in"),
        ("sudoku", PUZZLE, {"samples": 2, "noise": 0}, "samples=2 would all be the same run"),
        ("maze", "S#\n##G", {}, "the maze has 2 rows, the longest of 3 cells: it must be a square"),
        ("maze", "S..x\n....\n....\n...G", {}, "row 1 of the maze has 'x': its cells are '#', ' '"),
        ("maze", "....\n....\n....\n...G", {}, "the maze has no start S"),
        ("maze", "S...\n....\n..G.\n...G", {}, "the maze has more than one goal G"),
        ("maze", "S#..\n##..\n....\n...G", {}, "the maze has no path from S to G"),
        ("maze", "S.\n.G", {}, "the puzzle has 4 cells of 6 tokens, but"),
        ("arc", '{"train": [', {}, "it is not valid JSON"),
        ("arc", _task(train=[]), {}, "it is no ARC task: it has no demonstration pair"),
        ("arc", _task(test=[{"input": [[10]]}]), {}, "has the cell 10, not a colour from 0 to 9"),
        ("arc", _task(test=[1]), {}, "it is no ARC task: test pair 1 has no input"),
        ("arc", _task(test=[{"input": [[1]], "output": [[]]}]), {}, "the output of test pair 1 is empty"),
        ("arc", [[1, 2]], {}, "it is not valid JSON"),
        ("arc", _task(), {"test": 1}, "test=1 is out of range: puzzle has only test=0"),
        ("arc", _task(), {}, "the model has no embedding for this task"),
        ("arc", _task(), {"task": "00000001x"}, "did you mean '00000001'?"),
        ("arc", _task(), {"task": "00000001", "select": "rules"}, "rules of this puzzle cannot tell"),
    ],
)
def test_a_bad_puzzle_is_one_line(solvers, run, puzzle, keys, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        solvers[run].solve(puzzle, **keys)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "puzzle=... is needed"),
        ([f"puzzle={PUZZLE}", f"puzzle={PUZZLE}"], "puzzle is given twice: drop one"),
        (["puzzle="], "puzzle is empty"),
        (["puzzle=EMPTY.txt"], "EMPTY.txt is empty"),
        (["puzzle=BINARY.txt"], "is no text (UTF-8)"),
        (["puzzle=nowhere.txt"], "puzzle=nowhere.txt is no file"),
        (["puzzle=-"], "standard input is empty"),
        (["puzzle=1..4 .... .... 4.."], "puzzle: 15 cells make no Sudoku"),
        ([f"puzzle={PUZZLE}", "step=4"], "unknown key 'step', did you mean 'steps'?"),
        ([f"puzzle={PUZZLE}", "steps=0"], "steps=0 should be"),
        ([f"puzzle={PUZZLE}", "data_path=nowhere"], "data folder nowhere does not exist"),
        ([f"puzzle={PUZZLE}", "checkpoint=nowhere"], "nowhere does not exist: give a run folder"),
        ([f"puzzle={PUZZLE}", "checkpoint=nowhere"], "`make demo` trains a small one"),
    ],
)
def test_the_program_refuses_in_one_line(sudoku, program, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    Path("EMPTY.txt").write_text("\n")
    Path("BINARY.txt").write_bytes(b"\xff\xfe1")
    has_own = any(argument.startswith("checkpoint=") for argument in arguments)
    status, out, errors = program(*([] if has_own else [f"checkpoint={sudoku}"]), *arguments)
    assert (status, out) == (1, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1, errors
    assert message in errors


# -------------------------------------------------------------------------------------------- the same answer


@pytest.mark.parametrize(
    ("steps", "samples", "select", "halting"),
    [
        (4, 1, "q_head", "max"),
        (4, 4, "q_head", "max"),
        (6, 4, "q_head_any_step", "max"),
        (6, 3, "first_to_halt", "max"),
        (4, 3, "residual", "max"),
        (6, 4, "rules", "act"),
        (6, 4, "vote", "act"),
    ],
)  # fmt: skip
def test_the_answer_is_that_of_an_evaluation(sudoku, sudoku_folder, steps, samples, select, halting):
    """Of example 7 of the test set; and the steps of the run are those of the answer."""
    solver, row = load(sudoku, device="cpu"), 7
    model = solver._model_for(solver.facts.metadata)
    model.halt_max_steps, noise = steps, 0.3 if samples > 1 else 0.0
    model.network.step_noise = noise
    data = open_dataset(sudoku_folder, splits=("test",), read_everything=False)
    result = evaluate_split(
        model,
        data,
        loss_type="stablemax_cross_entropy",
        global_batch_size=samples,
        device=torch.device("cpu"),
        halting=halting,
        outputs=["preds", "q_halt_logits"],
        evaluators=Evaluators(["sudoku"], data),
        grid=Grid((steps,), (samples,), (select,)),
        seed=3,
        puzzles={"all": np.array([row])},
    )["all"]

    puzzle = data.splits["test"].sets["all"].inputs[row]
    question = Question(puzzle, 6, rules=all_kinds()["sudoku"].read_questions(PUZZLE)[0].rules)
    keys = {"steps": steps, "samples": samples, "select": select, "halting": halting, "seed": 3}
    answer = _answer(solver, question, row=row, **keys)
    assert answer.step.tokens.tolist() == result.outputs["preds"][0].tolist()
    assert answer.valid == question.rules(puzzle[None], answer.step.tokens[None])[0]
    logit = float(result.outputs["q_halt_logits"][0])
    assert answer.q_halt == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5)
    assert [step.number for step in answer.steps] == list(range(1, len(answer.steps) + 1))
    assert len(answer.steps) == steps or halting == "act"


def _answer(solver: Solver, question: Question, *, row: int, **keys) -> Answer:
    config = validate_config(SolveConfig, load_defaults("solve") | keys)
    model = solver._model_for(solver.facts.metadata)
    options = {"look": solver.facts.look, "identifier": 0, "device": torch.device("cpu")}
    return answer_question(model, question, config, row=row, **options)


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
    assert model.solve(rows, steps=5).text == answer.text
    assert model.solve(PUZZLE, samples=2).num_samples == 2, "with noise, as it needs some"
    assert len(model.solve(PUZZLE).steps) == 4, "an earlier call changes nothing"
    with pytest.raises(ValueError, match="unknown key 'step'"):
        model.solve(PUZZLE, step=3)


# ---------------------------------------------------------------------------------- what is known of the data


def test_the_dataset_may_be_gone(folder, sudoku, maze):
    data = shutil.copytree(folder / "mazes", folder / "moved")
    runs = [save_run(folder / f"gone_{has}", data, has_facts=has) for has in (True, False)]
    maze_text = "S...\n.##.\n.##.\n...G"
    expected = load(runs[0], device="cpu").solve(maze_text).text
    shutil.rmtree(data)
    assert load(runs[0], device="cpu").solve(maze_text).text == expected
    with pytest.raises(ValueError, match="does not say whether its puzzles are maze or .*: give data_path$"):
        load(runs[1], device="cpu")  # of an earlier version, which kept no facts
    kinds = [load(run, device="cpu").facts.kind.name for run in (sudoku, maze)]
    assert kinds == ["sudoku", "maze"], "by their builders: both have 16 cells and 6 tokens"


def test_a_dataset_of_no_kind_and_one_with_several_tasks(folder):
    draw = np.random.default_rng(0)
    pairs = Pairs(*draw.integers(1, 5, (2, 8, 3), dtype=np.uint8))
    split = make_split(pairs, vocab_size=5)
    metadata = dataclasses.replace(split.metadata, num_puzzle_identifiers=3)
    split = dataclasses.replace(split, metadata=metadata)
    names = ["<blank>", "sort", "reverse"]
    data, builder = folder / "numbers", {"module": "mine"}
    write_dataset(data, splits={"train": split, "test": split}, identifiers=names, builder=builder)
    model = load(save_run(folder / "numbers_run", data), device="cpu")
    with pytest.raises(ValueError, match="knows several tasks by name: give task=NAME, one of sort, reverse"):
        model.solve("1 2 3")
    answers = {name: model.solve("1 2 3", task=name, steps=2) for name in names[1:]}
    first, second = (answers[name].confidence for name in names[1:])
    assert first.shape == (1, 3)
    assert not np.array_equal(first, second), "each by its own embedding"
    with pytest.raises(ValueError, match="the puzzle has 2 cells of 5 tokens, but"):
        model.solve("1 2", task="sort")
    with pytest.raises(ValueError, match="'9' is no symbol of its puzzles: 0 1 2 3 4"):
        model.solve("1 2 9", task="sort")


def test_a_model_of_any_size_solves_larger_puzzles(folder, sudoku_folder):
    arch = {"name": "serrm", "puzzle_emb_ndim": 0}
    model = load(save_run(folder / "any", sudoku_folder, **arch), device="cpu")
    answer = model.solve("." * 35 + "6", steps=2)
    assert answer.grid.shape == (6, 6)
    assert answer.step.tokens.max() <= 7
    assert model.solve(PUZZLE, steps=2).grid.shape == (4, 4)


# -------------------------------------------------------------------------------------------------------- ARC


def test_an_arc_task_is_known_by_its_demonstrations_or_by_name(arc, folder):
    model, names = load(arc, device="cpu"), json.loads((folder / "arc_data/identifiers.json").read_text())
    tasks = {path.stem: json.loads(path.read_text()) for path in (folder / "tasks").rglob("*.json")}
    used = []
    model._model_for(model.facts.metadata).network.puzzle_emb.register_forward_hook(
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
    assert answer.question.tokens.reshape(30, 30)[:2, :2].tolist() == [[4, 1], [1, 0]]


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
    assert "4 steps train an embedding for this puzzle, alone, on its 4 demonstrations" in shown.out
    losses = [float(loss) for loss in re.findall(r"loss=([0-9.]+)", shown.err)]
    assert losses, "a progress bar"

    trained = load(arc, device="cpu")._model_for(model.facts.metadata).network.state_dict()
    adapted = made[0].network.state_dict()
    table = "puzzle_emb.weights"
    assert all(torch.equal(adapted[name], trained[name]) for name in trained if name != table)
    blank, own = adapted[table]
    assert torch.equal(blank, trained[table].double().mean(0).float()), "where its training began"
    assert (own != blank).all()
    # The demonstrations are likelier under the new embedding than under the mean.
    assert _loss(made[0], answers[0].question, 1) < _loss(made[0], answers[0].question, 0)


def _loss(model, question, identifier: int) -> float:
    """Mean cross-entropy of the demonstrations after one step."""
    views = question.draw_demonstrations(1, seed=0)
    rows = np.arange(views.num_examples)
    inputs, labels = (torch.from_numpy(each.astype(np.int64)) for each in views.read(rows, 0 * rows))
    state = model.network.initial_state(len(rows), seq_len=900)
    with torch.no_grad():
        identifiers = torch.full((len(rows),), identifier)
        _, prediction = model.network(state, inputs.int(), identifiers)
    return float(torch.nn.functional.cross_entropy(prediction.logits.transpose(1, 2), labels, ignore_index=0))


# ------------------------------------------------------------------------------------------------ the picture


def _step(number: int, text: str, before: str, *, q: float, sure: float = 1.0, stops: bool = False) -> Step:
    symbols = "_.1234"
    tokens, last = (np.array([symbols.index(each) for each in cells]) for cells in (text, before))
    shape = (2, 2)
    return Step(
        number,
        tokens,
        grid=np.array(list(text)).reshape(shape),
        confidence=np.array([1, 1, 1, sure]).reshape(shape),
        changed=(tokens != last).reshape(shape),
        q_halt=q,
        wants_to_halt=stops,
    )


def _picture(*, width: int = 80, color: bool = False) -> str:
    texts = ["1.3.", "1234", "1214", "1214"]
    steps = [
        _step(1, texts[1], texts[0], q=0.1, sure=0.4),
        _step(2, texts[2], texts[1], q=0.62, stops=True),
        _step(3, texts[3], texts[2], q=0.999, stops=True),
    ]
    look = dataclasses.replace(all_kinds()["sudoku"].look)
    question = Question(np.array([2, 1, 4, 1]), 6)
    answer = Answer(
        question, look, steps, number=3, sample=1, num_samples=4, select="vote", valid=True, correct=None
    )
    return draw_answer(answer, width=width, color=color)


def test_the_picture_in_plain_text():
    assert _picture() == (
        "puzzle   answer   sure (tenths)\n"
        "1 .      1 2      9 9             valid: the rules of the puzzle hold\n"
        "3 .      1 4      9 9             run 2 of 4 (vote), step 3 of 3\n"
        "                                  halting value 1.00, least sure cell 1.00\n"
        "                                  the model would halt after step 2\n"
        "\n"
        "halting values: .10 .62 1.0\n"
        "\n"
        "step 1   steps 2-3\n"
        "q 0.10   q 0.62-1.00 stop@2\n"
        "1  2*    1  2\n"
        "3  4*    1* 4\n"
        "\n"
        "q: halting value; stop: where the model would halt; * changed"
    )
    assert max(map(len, _picture(width=45).splitlines()[:-1])) <= 45, "what has no room goes below"


def test_the_picture_in_colour_is_the_same_with_codes():
    colored = _picture(color=True)
    assert "\x1b[97;48;5;124;1;4m4\x1b[0m" in colored, "in doubt, and changed"
    assert "\x1b[32;1;4m2\x1b[0m" in colored, "sure, new and changed"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert plain.splitlines()[:7] == _picture().splitlines()[:7]
    areas = Look(symbols="_.1234", styles={3: "30;103"}, gap="")
    step = _step(1, "1234", "1.3.", q=0.5, sure=0.7)
    question = Question(np.array([2, 1, 4, 1]), 6)
    answer = Answer(question, areas, [step], 1, 0, 1, "q_head", valid=None, correct=None)
    assert "\x1b[1;4m:\x1b[0m" in draw_answer(answer, width=80, color=True), "a mark in place of the symbol"


def test_the_program_reads_files_and_standard_input(sudoku, program, tmp_path, monkeypatch):
    (tmp_path / "puzzle.txt").write_text(PUZZLE)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PUZZLE))
    shown = [
        program(f"checkpoint={sudoku}", f"puzzle={puzzle}", "steps=2")
        for puzzle in (PUZZLE, tmp_path / "puzzle.txt", "-")
    ]
    assert shown[0] == shown[1] == shown[2]
    status, out, errors = shown[0]
    assert (status, errors) == (0, "")
    assert "\x1b" not in out, "no colour in pipes"
    assert "step 2 of 2" in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, has_color in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert ("\x1b" in program(f"checkpoint={sudoku}", f"puzzle={PUZZLE}")[1]) == has_color


@pytest.mark.slow
def test_a_trained_model_answers_as_evaluate_does(sudoku_folder, tmp_path):
    arguments = (f"data_path={sudoku_folder}", *OVERRIDES, "max_steps=20", "checkpoint_path=run")
    assert run_program("pretrain", *arguments, folder=tmp_path).statuses == [0]
    facts = json.loads((tmp_path / "run" / "step_20" / "state.json").read_text())["dataset"]
    assert facts["builder"] == "dataset.build_sudoku", "a puzzle can be read where the dataset is gone"
    rows = np.load(sudoku_folder / "test" / "all__inputs.npy")
    puzzle = "".join("_.1234"[token] for token in rows[0])
    for keys in (["samples=1"], ["samples=4", "noise=0.3"]):
        evaluated = (
            "checkpoint=run",
            "device=cpu",
            "halt_max_steps=6",
            "output_dir=out",
            "save_outputs=[preds]",
        )
        assert run_program("evaluate", *evaluated, *keys, folder=tmp_path).statuses == [0]
        preds = np.load(tmp_path / "out" / "all__outputs.npz")["preds"][0]
        solved = ("checkpoint=run", f"puzzle={puzzle}", "device=cpu", "steps=6", *keys)
        finished = run_program("solve", *solved, folder=tmp_path, world_size=None)
        assert finished.statuses == [0], finished.stderr
        lines = finished.stdout.splitlines()[1:5]
        answer = [line[10:17].split() for line in lines]
        assert answer == [["_.1234"[token] for token in row] for row in preds.reshape(4, 4)]
    refused = run_program("solve", "checkpoint=run", f"puzzle={puzzle}", folder=tmp_path, world_size=2)
    assert refused.statuses == [1, 1]
    assert "solve.py is one process" in refused.stderr
