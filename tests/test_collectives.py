"""Ranks that have drifted apart are noticed, and the first tensor that differs is named."""

import pytest
import torch

from distributed.collectives import broadcast_difference, checksum
from distributed.world import rank
from tests.ranks import run_program, run_ranks
from tests.tiny import OVERRIDES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_any_changed_bit_changes_the_checksum(dtype):
    tensor = torch.arange(999).to(dtype).reshape(27, 37)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    assert checksum(tensor.t()) == before, "memory need not be contiguous"
    bits = tensor.view(torch.uint8).flatten()
    for place in (0, 500, len(bits) - 1):
        bits[place] ^= 1
        assert checksum(tensor) != before
        bits[place] ^= 1


def _compare(cases: list[dict[int, str]]) -> list[tuple[str, list[int], int] | None]:
    """Compares in each case; ranks 1 and 2 have the same part of d, and rank 0 another one."""
    found = []
    for changed in cases:
        tensors = {"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.arange(4)}
        tensors["d"] = torch.full((5,), float(rank() > 0))
        if name := changed.get(rank()):
            tensors[name].view(-1)[2] += 1
        parts = {"d": (rank() > 0,)}
        found.append(broadcast_difference({(n, parts.get(n, ())): each for n, each in tensors.items()}))
    return found


def test_the_first_differing_tensor_is_named_on_all_ranks():
    changed = [{}, {0: "d"}, {1: "b"}, {0: "c"}, {1: "c", 2: "a"}, {2: "d"}]
    expected = [None, None, ("b", [1], 0), ("c", [1, 2], 0), ("a", [2], 0), ("d", [2], 1)]
    assert run_ranks(_compare, 3, changed) == [expected] * 3


def _change_a_bit() -> None:
    """Changes one weight of this rank in step 3."""
    import training.step

    train_step = training.step.train_step

    def changed(state, *arguments, **options):
        result = train_step(state, *arguments, **options)
        if state.step == 3:
            with torch.no_grad():
                state.model.network.lm_head.weight.view(torch.int32)[0, 0] ^= 1
        return result

    training.step.train_step = changed


@pytest.mark.slow
def test_a_run_whose_ranks_drift_apart_ends(tmp_path, sudoku_folder):
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "replica_check_interval=2")
    words += ("data_parallel_shard_degree=1",)  # with shares the other rank would overwrite the bit
    finished = run_program("pretrain", *words, folder=tmp_path, world_size=2, spoil=_change_a_bit)
    assert finished.statuses == [1, 1]
    assert "replicas differ at step 4" in finished.stderr
    assert "on ranks [1] is not equal" in finished.stderr
    assert not list((tmp_path / "run").glob("step_*"))
