"""Datasets of other sizes than that trained on: read by models that can, refused by the others."""

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from checkpointing.tensors import load_joined
from dataset.build import build_dataset
from dataset.files import open_dataset
from dataset.kinds.sudoku.texts import SYMBOLS
from dataset.show import main as show
from tests.checkpoints import assert_equal, open_checkpoints, random_state
from tests.ranks import NUM_THREADS, complete_program
from tests.tiny import FACTS, OVERRIDES, tiny_arch

_LARGER = {"vocab_size": 9, "seq_len": 36, "num_puzzle_identifiers": 3}


_CONV = {"name": "trm", "conv": "instead", "pos_encodings": "none", "puzzle_emb_ndim": 0}


def _load(run: Path, arch: dict, *fields: str):
    """Saves a model of `FACTS`, and loads it for data with other values of these fields."""
    options = {"arch": tiny_arch(**arch).model_dump()}
    with open_checkpoints(run, **options) as checkpoints:
        checkpoints.save(random_state(1, **options))
    return load_trained_model(find_checkpoint(run), _metadata(*fields))


def _metadata(*fields: str) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(FACTS), **{field: _LARGER[field] for field in fields}})


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ({"name": "serrm", "puzzle_emb_ndim": 0}, ("vocab_size", "seq_len", "num_puzzle_identifiers")),
        ({"name": "serrm", "equivariant_symbols": False}, ("seq_len",)),
        ({"name": "serrm"}, ("seq_len",)),
        ({"name": "trm", "puzzle_emb_ndim": 0}, ("num_puzzle_identifiers",)),
        (_CONV, ("seq_len", "num_puzzle_identifiers")),
    ],
)
def test_a_model_reads_what_it_can(run, arch, fields):
    model = _load(run, arch, *fields)
    assert_equal(dict(model.network.state_dict()), load_joined(run / "step_1", "weights"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "field", "weights_tell"),
    [
        ({"name": "hrm"}, "vocab_size", True),
        ({"name": "hrm"}, "seq_len", False),
        ({"name": "trm"}, "num_puzzle_identifiers", False),
        ({"name": "trm", "mlp_t": True, "pos_encodings": "none"}, "seq_len", True),
        ({"name": "urm", "puzzle_emb_ndim": 0, "pos_encodings": "learned"}, "seq_len", True),
        ({"name": "transformer"}, "seq_len", False),
        (_CONV, "vocab_size", False),
        (_CONV | {"pos_encodings": "learned"}, "seq_len", False),
        ({"name": "serrm"}, "vocab_size", False),
        ({"name": "serrm"}, "num_puzzle_identifiers", False),
        ({"name": "serrm", "puzzle_emb_ndim": 0, "equivariant_symbols": False}, "vocab_size", False),
        ({"name": "serrm", "puzzle_emb_ndim": 0, "pos_encodings": "learned"}, "seq_len", True),
    ],
)
def test_what_it_cannot_is_refused(run, arch, field, weights_tell):
    """weights_tell: also weights as they are published, without the record of a run."""
    expected = f"was trained with {field} {vars(FACTS)[field]}, but the puzzles have {field} {_LARGER[field]}"
    with pytest.raises(ValueError, match=f"{expected}. Use puzzles, or a dataset,"):
        _load(run, arch, field)
    for name in ("state.json", "manifest.json") if weights_tell else ():
        (run / "step_1" / name).unlink()
    if weights_tell:
        with pytest.raises(ValueError, match=expected.partition(" the puzzles have")[0]):
            load_trained_model(find_checkpoint(run / "step_1"), _metadata(field))


_SERRM = ("arch=serrm", "arch.hidden_size=16", "arch.num_heads=2", "arch.head_dim=8", "arch.head_dim_t=8")
_SMALL = ("arch.L_layers=1", "arch.L_cycles=2", "arch.halt_max_steps=3", "arch.forward_dtype=float32")
_MACHINE = ("device=cpu", f"cpu_threads={NUM_THREADS}")
_RUN = tuple(each for each in OVERRIDES if not each.startswith("arch."))


@pytest.mark.long
@pytest.mark.slow
def test_a_run_on_4x4_sudokus_is_evaluated_on_6x6_and_asked_16x16(tmp_path, capsys):
    """SE-RRM (arXiv 2603.02193)."""
    for box, *more in (("2x2", "100", "40"), ("2x3", "1", "40"), ("4x4", "1", "3", "--clues", "150-160")):
        words = ("--box", box, "--generate", more[0], "--num-test", *more[1:])
        build_dataset("sudoku", ["--output-dir", str(tmp_path / f"sudoku_{box}"), *words])
    data = f"data_path={tmp_path / 'sudoku_2x2'}"
    complete_program("pretrain", *_SERRM, *_SMALL, *_RUN, data, "checkpoint_path=run", folder=tmp_path)
    words = ("checkpoint=run", "evaluators=[sudoku]", "save_outputs=[inputs,labels,preds,logits]", *_MACHINE)
    for box, size, count in (("2x2", 4, 40), ("2x3", 6, 40), ("4x4", 16, 3)):
        more = (f"data_path={tmp_path / f'sudoku_{box}'}", f"output_dir=out_{box}")
        more += ("eval_batch_size=2",) if count < 24 else ()
        complete_program("evaluate", *words, *more, folder=tmp_path, world_size=2)
        metrics = json.loads((tmp_path / f"out_{box}" / "metrics.json").read_text())["all"]
        assert metrics["count"] == metrics["sudoku/count"] == count
        assert metrics["accuracy"] > 1.2 / size, "better than any digit for all"
    test = open_dataset(tmp_path / "sudoku_4x4", read_everything=False).splits["test"].sets["all"]
    text = "".join(f"_.{SYMBOLS}"[token] for token in test.inputs[0])
    asked = ("checkpoint=run", f"puzzle={text}", "picture=large.svg", *_MACHINE)
    solved = complete_program("solve", *asked, folder=tmp_path)
    warning = "the puzzle has 256 cells, but run/step_16 was trained on puzzles of 16 cells"
    more = "The answer may be worse. Set steps=N for more thinking steps."
    assert solved.stderr == f"warning: {warning}. {more}\n"
    drawn = ElementTree.parse(tmp_path / "large.svg").iter("{http://www.w3.org/2000/svg}text")
    assert set(SYMBOLS[:16]) <= {each.text for each in drawn}
    capsys.readouterr()  # of the builder
    show([str(tmp_path / "sudoku_4x4"), "--outputs", str(tmp_path / "out_4x4"), "--count", "1"])
    shown = capsys.readouterr().out
    assert " G " in shown
    assert "16" not in shown
