"""Other models by the program: stopped and resumed to the bit, with all that they draw."""

from pathlib import Path

import pytest

from tests.checkpoints import assert_equal, saved_tensors
from tests.ranks import complete_program
from tests.tiny import OVERRIDES

_RUN = tuple(each for each in OVERRIDES if not each.startswith("arch."))
_SIZES = ("arch.hidden_size=16", "arch.num_heads=2", "arch.L_layers=1", "arch.H_cycles=2", "arch.L_cycles=1")
_ARCHS = {
    "serrm": (
        *("arch=serrm", "arch.head_dim=8", "arch.head_dim_t=8", "arch.dropout=0.2", "arch.puzzle_emb_ndim=1"),
        *("arch.halt_exploration_prob=0.3", "ema=0.9"),
    ),
    "conv": (
        *("arch=trm", "arch.conv=instead", "arch.pos_encodings=none", "arch.puzzle_emb_ndim=0"),
        *("optimizer=muon", "arch.forward_dtype=bfloat16"),
    ),
    "fprm": ("arch=fprm", "arch.H_cycles=1", "arch.L_cycles=3", "arch.eval_halt_max_steps=5", "halting=act"),
    "gate": ("arch=trm", "arch.update=gate", "arch.forward_dtype=bfloat16"),
}


def _train(folder: Path, data: Path, *options: str) -> None:
    arguments = (*_RUN, *_SIZES, "arch.halt_max_steps=3", f"data_path={data}", "epochs=2", *options)
    complete_program("pretrain", *arguments, folder=folder, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", _ARCHS)
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(name, tmp_path, sudoku_folder):
    _train(tmp_path, sudoku_folder, *_ARCHS[name], "checkpoint_path=whole")
    _train(tmp_path, sudoku_folder, *_ARCHS[name], "checkpoint_path=stopped", "max_steps=7")
    _train(tmp_path, sudoku_folder, *_ARCHS[name], "checkpoint_path=stopped")
    (last,) = (tmp_path / "whole").glob("step_*")
    files = sorted(last.glob("*.safetensors"))
    # Two shards of the carry, of masters, and of moments; and the last two whole, outside of the blocks.
    assert len(files) == 8 + 6 * ("ema=0.9" in _ARCHS[name])
    ours, theirs = (saved_tensors(tmp_path / run / last.name) for run in ("stopped", "whole"))
    assert_equal(ours, theirs)
    if name == "serrm":
        halted = theirs["carry.halted"]
        assert 0 < halted.sum() < len(halted), "stops are random"
