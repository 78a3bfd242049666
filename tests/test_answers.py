"""Several right answers of a puzzle: what a batch has, and how LDT trains on them (arch.num_answers)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dataset.answers import read_answers
from dataset.description import with_candidates
from dataset.files import open_dataset
from dataset.kinds import coloring
from dataset.loader import PuzzleDataset
from dataset.metadata import IGNORE_LABEL_ID
from dataset.plan import Stage, TrainPlan
from dataset.sets import PuzzleSet
from distributed.world import rank
from models.carry import Carry, StepOutput
from models.lattice import is_lost, is_right, leaves, with_target
from models.ldt import LDTPrediction
from tests import golden
from tests.checkpoints import do_step
from tests.float64 import assert_close, in_float64
from tests.golden import ldt
from tests.puzzle_sets import make_set
from tests.ranks import run_ranks
from tests.report_runs import searching_model
from tests.sudoku_source import build_sets
from tests.tiny import draws_of, tiny_arch, tiny_config, tiny_model
from training.checkpoints import CheckpointManager
from training.state import build_first_state


def _set() -> PuzzleSet:
    """Groups of puzzles in which only the first cell of the input differs, and only two cells of labels."""
    made = make_set([[3, 2], [1], [9, 4, 6], [2]])
    inputs, labels = made.inputs % 3, made.labels % 3
    inputs[:, 1:], labels[:, 2:] = 0, 1
    return dataclasses.replace(made, inputs=inputs, labels=labels)


def test_answers_are_the_labels_of_equal_inputs_in_the_group():
    puzzles, sizes = _set(), []
    rows = np.random.default_rng(0).permutation(puzzles.num_examples)
    of_rows = puzzles.puzzle_indices.searchsorted(rows, side="right") - 1
    found = {}
    for num_answers in (8, 3):
        answers = read_answers(puzzles, rows, of_rows, num_answers=num_answers, seed=1)
        found[num_answers] = answers
        assert answers.shape == (len(rows), num_answers, 4)
        for row, puzzle, each in zip(rows, of_rows, answers, strict=True):
            group = puzzles.group_indices.searchsorted(puzzle, side="right") - 1
            first, last = puzzles.puzzle_indices[puzzles.group_indices[[group, group + 1]]]
            expected = {
                tuple(puzzles.labels[other])
                for other in range(first, last)
                if (puzzles.inputs[other] == puzzles.inputs[row]).all()
            }
            kept = [tuple(answer) for answer in each if answer[0] != IGNORE_LABEL_ID]
            assert kept[0] == tuple(puzzles.labels[row])
            assert len({*kept}) == len(kept) == min(len(expected), num_answers)
            assert {*kept} <= expected
            sizes.append(len(expected))
    assert {1, 2} < {*sizes}
    assert max(sizes) > 3, "or no part of them is chosen"
    again = read_answers(puzzles, rows[::-1], of_rows[::-1], num_answers=3, seed=1)
    assert np.array_equal(again[::-1], found[3]), "the part depends on the example only"
    assert not np.array_equal(read_answers(puzzles, rows, of_rows, num_answers=3, seed=2), found[3])


def test_answers_of_variants_are_transformed_as_their_labels(tmp_path):
    words = ("--generate", 6, "--num-test", 2, "--box", "2x2", "--num-aug", 3)
    puzzles = build_sets("sudoku", tmp_path, *words)["train"]
    assert puzzles.augmentation
    sizes = puzzles.puzzle_indices * 2  # each puzzle gets a second example: another label of the same input
    labels = puzzles.labels.repeat(2, axis=0)
    labels[1::2] = labels[1::2][:, ::-1]
    several = dataclasses.replace(
        puzzles, inputs=puzzles.inputs.repeat(2, axis=0), labels=labels, puzzle_indices=sizes
    )
    rows = np.arange(several.num_examples)
    answers = read_answers(several, rows, rows // 2, num_answers=4, seed=0)
    assert (answers[:, 1] != IGNORE_LABEL_ID).all()
    whole = several.materialize()
    assert np.array_equal(answers, read_answers(whole, rows, rows // 2, num_answers=4, seed=0))


@pytest.mark.usefixtures("float64")
def test_several_answers_give_the_target_and_the_losses_of_a_plain_loop():
    """A loop over boards and answers, by section 2 of the docstring of models/lattice.py."""
    arch, random = tiny_arch("ldt", num_answers=3), np.random.default_rng(0)
    boards, cells, values = 60, 5, 3
    answers = random.integers(values, size=(boards, 3, cells))
    answers[random.random((boards, 3)) < 0.3] = -1
    alive = (random.random((boards, cells, values)) < 0.9).astype(np.uint8)
    entered = np.maximum(alive, random.random(alive.shape) < 0.5).astype(np.uint8)
    old = (random.random(alive.shape) < 0.4).astype(np.uint8)
    logits = random.normal(size=(boards, 2, cells, values)), random.normal(size=(boards, 2))
    state = {"alive": alive, "entered": entered, "target": old, "answers": answers.astype(np.int16)}
    state |= {"outcome": np.full(boards, 2, np.uint8), "guess": np.zeros(boards, np.int16)}
    state = {name: torch.from_numpy(array) for name, array in state.items()}

    target, fitting = old.copy(), []
    for board in range(boards):
        fits = [
            answer
            for answer in answers[board]
            if all(value >= 0 and alive[board, cell, value] for cell, value in enumerate(answer))
        ]
        if fits:
            target[board] = 0
            for answer in fits:
                target[board, np.arange(cells), answer] = 1
        fitting.append(bool(fits))
    lost = [any(not (alive[board, cell] & target[board, cell]).any() for cell in range(cells))
            for board in range(boards)]  # fmt: skip
    assert not any(is_bad and fits for is_bad, fits in zip(lost, fitting, strict=True))
    assert {(False, True), (False, False), (True, False)} == {*zip(lost, fitting, strict=True)}
    now = with_target(state)
    assert np.array_equal(now["target"], target)
    assert is_lost(now).tolist() == leaves(now).tolist() == lost
    assert is_right(now).tolist() == fitting

    keep_loss = digit_loss = conflict_loss = num_cells = 0
    for board in range(boards):
        for loop in range(2):
            keep, conflict = logits[0][board, loop], logits[1][board, loop]
            log_digit = F.log_softmax(torch.from_numpy(keep), -1).numpy()
            for cell in range(cells):
                for value in range(values):
                    p = 1 / (1 + np.exp(-keep[cell, value]))
                    is_kept = alive[board, cell, value] and target[board, cell, value]
                    term = arch.keep_weight * np.log(p) if is_kept else arch.kill_weight * np.log(1 - p)
                    keep_loss -= term / cells / values / 2
                if not lost[board] and entered[board, cell].sum() != 1 and target[board, cell].sum() == 1:
                    digit_loss -= log_digit[cell, target[board, cell].argmax()] / 2
                    num_cells += 1 / 2
            p = 1 / (1 + np.exp(-conflict))
            conflict_loss -= np.log(p if lost[board] else 1 - p) / 2
    network = tiny_model("ldt", num_answers=3).network
    nothing = torch.zeros(boards).int()
    before = Carry(state, nothing, nothing.bool(), None)
    keep, conflict = map(torch.from_numpy, logits)
    output = StepOutput(before, LDTPrediction(keep, conflict[:, 0], None, keep, keep, conflict))
    divisors = network.objective.divisors(before)
    assert (divisors["digit_cells"], divisors["bad"]) == (round(num_cells), sum(lost))
    options = {"divisors": divisors | {"slots": boards}, "reasoning": None, "rng": None}
    loss, sums = network.objective.losses(network, before, output, **options)
    for name, expected in (("keep", keep_loss), ("digit", digit_loss), ("conflict", conflict_loss)):
        assert_close(sums[f"{name}_loss"], torch.tensor(expected), what=name)
    expected = keep_loss + arch.conflict_weight * conflict_loss
    assert_close(loss, torch.tensor(expected + arch.digit_weight * digit_loss * boards / num_cells))


def test_one_answer_given_twice_is_the_golden_run(monkeypatch):
    """So a lost board keeps its last target, as in the public code."""

    def start(entered, target):
        solution = torch.where(target.bool().any(-1), target.int().argmax(-1), -1).to(torch.int16)
        answers = torch.stack((torch.full_like(solution, -1), solution, solution), dim=1)
        return with_target(new(entered, target) | {"target": torch.zeros_like(target), "answers": answers})

    new = ldt._new
    monkeypatch.setattr(ldt, "_new", start)
    ldt.replay(golden.GOLDEN / "ldt_a")


def test_an_evaluation_and_a_batch_without_answers_need_none():
    model = tiny_model("ldt", num_answers=3)
    carry = model.blank_carry(2, seq_len=16, device=torch.device("cpu"))
    assert carry.state["answers"].shape == (2, 3, 16)
    assert "answers" not in model.eval().initial_carry(carry.data).state


def test_candidates_are_those_of_all_answers(tmp_path):
    """Every graph has a coloring with two colors, which is its first answer. Other answers use the third."""
    words = ("--nodes", 8, "--edge-probability", 0.05, "--generate", 30, "--num-test", 4)
    build_sets("coloring", tmp_path, *words)
    data = open_dataset(tmp_path, read_everything=False)
    puzzles = data.splits["train"].sets["all"]
    assert puzzles.labels[puzzles.group_indices[:-1]].max() == coloring.COLORS[1], "or this proves little"
    pairs = [divmod(pair, coloring.VOCAB_SIZE) for pair in with_candidates(data).metadata.candidates]
    assert [label for token, label in pairs if token == coloring.OPEN] == [*coloring.COLORS]


def _write_all_grids(folder: Path) -> Path:
    """Sudokus of one group: the inputs are blank but for a digit, and the labels are many grids."""
    from dataset.build.writing import write_dataset

    data = open_dataset(folder, read_everything=False)
    splits = {}
    for name, split in data.splits.items():
        puzzles = split.sets["all"]
        inputs = np.ones_like(puzzles.labels)
        inputs[:, 0] = puzzles.labels[:, 0]
        offsets = np.array([0, len(inputs)])
        one = PuzzleSet(inputs, np.asarray(puzzles.labels), np.zeros(1, np.int32), offsets, np.arange(2))
        splits[name] = dataclasses.replace(split, sets={"all": one})
    output = folder.parent / "all_grids"
    write_dataset(output, splits=splits, identifiers=["<blank>"], builder={"module": "tests"})
    return output


def _train(folder: Path, run: Path, steps: range):
    """Trains these steps, from a checkpoint in `run` if there is one, and leaves one there."""
    data = with_candidates(open_dataset(folder, read_everything=False))
    arch = tiny_arch("ldt", num_answers=5, boards_per_slot=2, true_pin_prob=0.5, hint_prob=0.0).model_dump()
    config = tiny_config(arch=arch, global_batch_size=12, checkpoint_path=str(run))
    state = build_first_state(config, data.metadata, device=torch.device("cpu"))
    state.broadcast_model_()
    state.model.train()
    plan = TrainPlan(data.splits["train"].sets, [Stage((0,), 8, 8)], seed=0, global_batch_size=12)
    run.mkdir(parents=True, exist_ok=True)
    with CheckpointManager(run, config=config, fingerprint="same") as checkpoints:
        if steps.start:
            checkpoints.resume(state)
        options = {"rank": 0, "world_size": 1, "first_step": steps.start, "num_answers": 5}
        batches = iter(PuzzleDataset(data, "train", plan, **options))
        while state.step < steps.stop:
            do_step(state, config, next(batches)[1], total_steps=8)
        checkpoints.save(state)
    weights = {name: value.clone() for name, value in state.model.network.state_dict().items()}
    return weights, state.carry.tensors(), rank()


@pytest.mark.slow
def test_two_ranks_that_resume_are_the_run_of_one(sudoku_folder, tmp_path):
    folder = _write_all_grids(sudoku_folder)
    ((weights, carry, _),) = run_ranks(in_float64, 1, _train, folder, tmp_path / "alone", range(8))
    assert (carry["answers"][:, :, -1] >= 0).all(-1).any(), "or no puzzle has many answers"
    run_ranks(in_float64, 1, _train, folder, tmp_path / "run", range(4))
    ranks = run_ranks(in_float64, 2, _train, folder, tmp_path / "run", range(4, 8))
    for name, tensor in carry.items():
        assert torch.equal(torch.cat([each[1][name] for each in ranks]), tensor), name
    for name, tensor in weights.items():
        assert_close(ranks[1][0][name], tensor, what=name)


def test_a_search_of_a_model_with_several_answers_is_that_of_one(sudoku_folder):
    data = with_candidates(open_dataset(sudoku_folder, read_everything=False))
    states = []
    for num_answers in (1, 4):
        model = searching_model(data, num_answers=num_answers).eval()
        batch = model.blank_carry(3, seq_len=16, device=torch.device("cpu")).data
        states.append(model.network.start(batch, model.reasoning, draws_of(3), torch.ones(3).bool()))
    assert states[0].keys() == states[1].keys()
