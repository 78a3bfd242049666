"""Pictures of puzzles: what is drawn where, and that drawing them changes nothing."""

import copy
import json
import re
import xml.etree.ElementTree

import numpy as np
import pytest
import torch

from dataset.build import build_dataset
from dataset.kinds import queens
from dataset.kinds.kind import Style, find_kind, kind_names
from dataset.metadata import IGNORE_LABEL_ID
from dataset.show import main as show_dataset
from evaluation.trace import Trace
from models.lattice import NO_GUESS
from report.trace import trace_puzzles
from tests.checkpoints import replicated_tensors
from tests.tiny import tiny_config
from training.data import open_data
from training.pictures import Thoughts, shown_steps, think_of_puzzles
from training.state import build_first_state


def test_few_steps_are_shown_of_many():
    assert shown_steps(1) == [1]
    assert shown_steps(5) == [1, 2, 3, 4, 5]
    assert shown_steps(16) == [1, 2, 4, 8, 16]
    assert shown_steps(100) == [1, 2, 4, 8, 100]


def _thoughts(preds: np.ndarray, *, halts_after: int) -> Trace:
    wants = np.tile(np.arange(1, preds.shape[1] + 1) >= halts_after, (len(preds), 1))
    no_board = np.zeros((*wants.shape, 0), np.int64), np.full(wants.shape, NO_GUESS, np.int16)
    return Trace(preds, np.ones(preds.shape, np.float32), np.zeros(wants.shape, np.float32), wants, *no_board)


def test_wrong_cells_are_marked_and_captions_count_steps():
    style = find_kind("maze").style
    wall, open_cell, path = 1, 2, 5
    inputs = np.full((1, 16), open_cell)
    labels = inputs.copy()
    labels[0, 5], labels[0, 15] = path, IGNORE_LABEL_ID
    preds = np.repeat(labels[:, None], 3, axis=1)
    preds[0, :, 15] = wall  # counts nowhere
    preds[0, 0, 5], preds[0, 0, 0] = open_cell, path
    text = Thoughts(style, inputs, labels, _thoughts(preds, halts_after=3), ["all, example <7>"]).html()
    assert "<p>all, example &lt;7&gt;: right after step 2; would halt after step 3</p>" in text
    puzzle, first, second, *_ = text.split("</text>\n<rect")[1:]
    assert first.count(style.colors[path]) == 1, "a wrong cell with a colour keeps it"
    assert (first.count("l-40 40") // 2, first.count('"var(--bad)" fill-opacity="0.45"')) == (1, 1)
    assert "var(--bad)" not in puzzle + second

    preds[0, 1:, 0] = path
    text = Thoughts(style, inputs, labels, _thoughts(preds, halts_after=1), ["x"]).html()
    assert "x: never right; would halt after step 1" in text


def test_a_puzzle_without_a_label_is_not_called_right():
    inputs, unknown = np.full((1, 16), 2), np.full((1, 16), IGNORE_LABEL_ID)
    thoughts = Thoughts(
        find_kind("maze").style, inputs, unknown, _thoughts(inputs[:, None], halts_after=1), ["x"]
    )
    text = thoughts.html()
    assert "x: no label; would halt after step 1" in text
    assert ("puzzle</text>" in text, "solution</text>" in text) == (True, False)


@pytest.mark.parametrize("style", [Style(), *(find_kind(name).style for name in kind_names())])
def test_every_look_can_be_drawn(style):
    tokens = np.random.default_rng(0).integers(0, 40, (2, 36))
    thoughts = Thoughts(style, tokens, tokens, _thoughts(tokens[:, None], halts_after=1), ["a", "b"])
    text = thoughts.html()
    assert text.count(": right after step 1; would halt after step 1</p>") == 2
    for svg in text.split("</p>\n")[1:]:
        xml.etree.ElementTree.fromstring(svg.partition("<p>")[0])
    pytest.importorskip("PIL")
    for (name, image), expected in zip(thoughts.images(), ("a", "b"), strict=True):
        assert (name, image.shape[1], image.dtype) == (expected, 3 * 176 + 16, np.uint8)


def test_a_text_of_many_symbols_can_be_drawn():
    pytest.importorskip("PIL")
    tokens = np.full((1, 400), 2)
    thoughts = Thoughts(
        Style(num_columns=400), tokens, tokens, _thoughts(tokens[:, None], halts_after=1), ["a"]
    )
    assert [name for name, _ in thoughts.images()] == ["a"]


def test_drawing_leaves_training_as_it_was(sudoku_folder):
    config = tiny_config(data_path=[str(sudoku_folder)], ema=0.9)
    data = open_data(config)
    state = build_first_state(config, data.dataset.metadata, device=torch.device("cpu"))
    state.model.train()
    before = copy.deepcopy(replicated_tensors(state)), torch.get_rng_state()
    text = think_of_puzzles(state, data, count=3).html()
    assert re.findall("<p>(.*?):", text) == [f"all, example {row}" for row in (0, 33, 66)]
    assert state.model.training
    assert torch.equal(torch.get_rng_state(), before[1])
    for name, tensor in replicated_tensors(state).items():
        assert torch.equal(tensor, before[0][name]), name


def test_a_dataset_with_symbols_of_its_own_is_drawn_with_them(tmp_path):
    lines = [json.dumps({"input": f"a{digit}b", "output": f"b{digit}a"}) for digit in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "data"
    build_dataset("pairs", ["--source", str(tmp_path / "pairs.jsonl"), "--output-dir", str(folder)])
    config = tiny_config(data_path=[str(folder)])
    data = open_data(config)
    state = build_first_state(config, data.dataset.metadata, device=torch.device("cpu"))
    folder.rename(tmp_path / "moved")  # a run keeps using the files that it opened at the start
    assert think_of_puzzles(state, data, count=1).style.symbols[2:] == (*"0123456789", "a", "b")


def test_another_right_answer_is_right(tmp_path, monkeypatch, capsys):
    """Boards of 5x5 queens, and an oracle that answers the last right answer in each step."""
    folder = tmp_path / "data"
    build_dataset("queens", ["--size", "5", "--output-dir", str(folder)])
    data = open_data(tiny_config(data_path=[str(folder)]))
    test = data.dataset.splits["test"].sets["all"]
    inputs, labels = test.read(np.arange(test.num_examples), np.arange(test.num_examples))
    answers, counts = queens.find_answers(inputs)
    preds = answers[counts.cumsum() - 1].astype(np.int32)
    differs = (preds != labels).any(axis=1)
    assert differs.any()
    preds[-1] = queens.EMPTY
    oracle = {row.tobytes(): pred for row, pred in zip(inputs.astype(np.int32), preds, strict=True)}

    def solve(_model, batch, **_options):
        found = [oracle[row.tobytes()] for row in batch.inputs.cpu().numpy().astype(np.int32)]
        return _thoughts(np.stack(found)[:, None], halts_after=1)

    monkeypatch.setattr("training.pictures.record_trace", solve)
    monkeypatch.setattr("report.trace.record_trace", solve)
    config = tiny_config(data_path=[str(folder)])
    state = build_first_state(config, data.dataset.metadata, device=torch.device("cpu"))
    text = think_of_puzzles(state, data, count=test.num_examples).html()
    assert text.count("right after step 1") == test.num_examples - 1
    options = {"num_puzzles": test.num_examples, "batch_size": 8, "path": tmp_path}
    assert trace_puzzles(state.model, data.dataset, **options).is_right.sum() == test.num_examples - 1

    saved = tmp_path / "outputs"
    saved.mkdir()
    np.savez(saved / "all__outputs.npz", inputs=inputs, labels=labels, preds=preds)
    (saved / "metrics.json").write_text(json.dumps({"all": {"count": test.num_examples}}))
    show_dataset([str(folder), "--outputs", str(saved), "--index", str(differs.argmax())])
    assert "x" not in capsys.readouterr().out.partition("puzzle  ")[2]
    show_dataset([str(folder), "--outputs", str(saved), "--index", str(test.num_examples - 1)])
    assert "x" in capsys.readouterr().out.partition("puzzle  ")[2]
