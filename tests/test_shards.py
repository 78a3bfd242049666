"""Tensors spread over ranks, on disk: written by any number of ranks, read by any other."""

from pathlib import Path

import pytest
import torch

from checkpointing.tensors import files_of, find_files, load_into_, load_joined, save_tensors
from parallel.shards import Slice, owned_rows, spread, tensor_of

_NAME = "ema_weights.safetensors"
_WHOLE = {
    "dense": torch.arange(35.0).view(7, 5),
    "table": torch.arange(33.0).view(11, 3),
    "steps": torch.arange(11, dtype=torch.int32),
    "count": torch.tensor(7),
}


def _become(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def _kept(rank: int, size: int, *, is_blank: bool = False) -> dict[str, torch.Tensor | Slice]:
    """What a rank has: a range of the dense elements, rows by identifier, and what all have."""
    rows, cut = owned_rows(11), 13  # of 35: the third of three ranks gets 9, the fourth of four none
    place = range(min(cut * rank, 35), 35 if rank == size - 1 else min(cut * (rank + 1), 35))
    kept = {
        "dense": spread(_WHOLE["dense"].view(-1)[place.start : place.stop], place, (7, 5)),
        **{name: spread(_WHOLE[name][rank::size], rows, _WHOLE[name].shape) for name in ("table", "steps")},
        "count": _WHOLE["count"],
    }
    for name, each in kept.items() if is_blank else ():
        blank = torch.full_like(tensor_of(each), 99)
        kept[name] = each._replace(tensor=blank) if isinstance(each, Slice) else blank
    return kept


def _write(folder: Path, size: int, monkeypatch) -> None:
    for rank in range(size):
        _become(monkeypatch, rank, size)
        for name, tensors in files_of(_NAME, _kept(rank, size)).items():
            contiguous = {
                key: each._replace(tensor=each.tensor.clone()) if isinstance(each, Slice) else each.clone()
                for key, each in tensors.items()
            }
            save_tensors(contiguous, folder / name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, monkeypatch, size):
    _write(tmp_path, size, monkeypatch)
    assert len(list(tmp_path.iterdir())) == (1 if size == 1 else 1 + size)
    joined = load_joined(tmp_path, _NAME)
    assert joined.keys() == _WHOLE.keys()
    for name, value in _WHOLE.items():
        assert joined[name].dtype == value.dtype
        assert torch.equal(joined[name], value), name
    for other in (1, 2, 3, 5):
        for rank in range(other):
            _become(monkeypatch, rank, other)
            targets = _kept(rank, other, is_blank=True)
            load_into_(targets, tmp_path, _NAME)
            for name, kept in _kept(rank, other).items():
                assert torch.equal(tensor_of(targets[name]), tensor_of(kept)), (name, rank, other)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path, monkeypatch):
    _write(tmp_path, 3, monkeypatch)
    _become(monkeypatch, 0, 1)
    (targets,) = (_kept(0, 1, is_blank=True),)
    for changes, part in (
        ({"more": torch.zeros(2)}, "more is None there and "),
        ({"table": torch.zeros(12, 3)}, r"table is \(11, 3\) there and \(12, 3\) here"),
        ({"steps": torch.zeros(11)}, "steps is torch.int32 there and torch.float32 here"),
    ):
        with pytest.raises(ValueError, match=part):
            load_into_(targets | changes, tmp_path, _NAME)
    with pytest.raises(ValueError, match="count is .* there and None here"):
        load_into_({key: each for key, each in targets.items() if key != "count"}, tmp_path, _NAME)
    (tmp_path / "ema_weights_1_of_3.safetensors").unlink()
    for read in (find_files, load_joined, lambda *place: load_into_(targets, *place)):
        with pytest.raises(ValueError, match="ema_weights_1_of_3.safetensors is missing: each process"):
            read(tmp_path, _NAME)
