"""Tensors spread over ranks, on disk: written by any number of ranks, read by any other."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from checkpointing.tensors import find_files, load_into_, load_joined, save_section
from checkpointing.writer import local_part
from distributed.collectives import Ranks
from distributed.shards import (
    Shard,
    Span,
    Tensors,
    rows_of_rank,
    shard_of_own,
    shard_of_rows,
    tensor_of,
)

_PART = "ema_weights"
_WHOLE = {
    "dense": torch.arange(35.0).view(7, 5),
    "table": torch.arange(33.0).view(11, 3),
    "steps": torch.arange(11, dtype=torch.int32),
    "count": torch.tensor(7),
}


def _become(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def _kept(rank: int, size: int, *, is_blank: bool = False) -> Tensors:
    """What a rank has: a range of the dense elements, rows by identifier, what all have, and its own."""
    ranks, cut = Ranks(rank, size), 13  # of 35: the third of three ranks gets 9, the fourth of four none
    first, end = min(cut * rank, 35), 35 if rank == size - 1 else min(cut * (rank + 1), 35)
    dense = _WHOLE["dense"].view(-1)[first:end].clone()
    spans = (Span(first, end - first),) if first < end else ()
    kept = {
        "dense": Shard(dense, spans, (7, 5)) if size > 1 else dense.view(7, 5),
        "count": _WHOLE["count"],
        "own": shard_of_own(torch.full((2, 3), float(rank)), ranks),
    }
    for name in ("table", "steps"):
        rows = rows_of_rank(11, rank, size)
        kept[name] = shard_of_rows(_WHOLE[name][rank::size].clone(), rows, 11, ranks)
    for name, each in kept.items() if is_blank else ():
        blank = torch.full_like(tensor_of(each), 99)
        kept[name] = each._replace(tensor=blank) if isinstance(each, Shard) else blank
    return kept


def _write(folder: Path, size: int, monkeypatch) -> None:
    for rank in range(size):
        _become(monkeypatch, rank, size)
        save_section(local_part(_kept(rank, size)), folder, _PART)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, monkeypatch, size):
    _write(tmp_path, size, monkeypatch)
    assert len(list(tmp_path.iterdir())) == 1 + size
    joined = load_joined(tmp_path, _PART)
    assert joined.pop("own")[:, 0, 0].tolist() == list(range(size))
    assert joined.keys() == _WHOLE.keys()
    for name, value in _WHOLE.items():
        assert joined[name].dtype == value.dtype
        assert torch.equal(joined[name], value), name
    for other in (1, 2, 3, 5):
        for rank in range(other):
            _become(monkeypatch, rank, other)
            targets = _kept(rank, other, is_blank=True)
            load_into_(targets, tmp_path, _PART)
            mean = rank if other == size else (size - 1) / 2
            assert torch.allclose(targets.pop("own").tensor, torch.tensor(float(mean)))
            expected = _kept(rank, other)
            for name, kept in expected.items() if expected.pop("own") else ():
                assert torch.equal(tensor_of(targets[name]), tensor_of(kept)), (name, rank, other)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path, monkeypatch):
    _write(tmp_path, 3, monkeypatch)
    _become(monkeypatch, 0, 1)
    (targets,) = (_kept(0, 1, is_blank=True),)
    for changes, part in (
        ({"more": torch.zeros(2)}, "more is missing in the checkpoint, but "),
        ({"table": torch.zeros(12, 3)}, r"table is \(11, 3\) in the checkpoint, but \(12, 3\) in"),
        ({"steps": torch.zeros(11)}, "steps is torch.int32 in the checkpoint, but torch.float32 in"),
    ):
        with pytest.raises(ValueError, match=part):
            load_into_(targets | changes, tmp_path, _PART)
    with pytest.raises(ValueError, match="count is .* in the checkpoint, but missing in this run"):
        load_into_({key: each for key, each in targets.items() if key != "count"}, tmp_path, _PART)
    (tmp_path / "ema_weights_1_of_3.safetensors").unlink()
    for read in (find_files, load_joined, lambda *where: load_into_(targets, *where)):
        with pytest.raises(
            ValueError, match="ema_weights_1_of_3.safetensors is missing. Each process wrote one"
        ):
            read(tmp_path, _PART)


@pytest.mark.parametrize(
    "spans",
    [
        [[0, 4], [5, 5], [12, 1]],  # elements that nobody has
        [[0, 13], [0, 0]],  # which another has too
        [[0, 13, 1, 2]],
        [[-1, 13]],
        [[30, 13]],
        [[0, 13.0]],
        [[0, 1, 1, 10**12]],
        [[13, 13], [0, 0, 0, 10**12]],
        [["0", 13]],
        None,
    ],
)
def test_slices_that_make_no_whole_are_refused(tmp_path, monkeypatch, spans):
    _write(tmp_path, 3, monkeypatch)
    path = tmp_path / f"{_PART}_1_of_3.safetensors"
    with safe_open(path, "pt") as file:
        shards = json.loads(file.metadata()["shards"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert shards["dense"][0] == [[13, 13, 0, 1]]
    shards["dense"][0] = spans
    save_file(tensors, path, metadata={"shards": json.dumps(shards)})
    _become(monkeypatch, 0, 1)
    for read in (load_joined, lambda *where: load_into_(_kept(0, 1), *where)):
        with pytest.raises(ValueError, match="dense"):
            read(tmp_path, _PART)


@pytest.mark.parametrize(
    "shards",
    ["null", "7", '["own"]', '{"own": [[[0, 3]], [1, 2, 3], true]}', '{"own": [[[0, 3]], [3], true]}'],
)
def test_shards_that_nobody_wrote_are_refused(tmp_path, shards):
    path = tmp_path / f"{_PART}_0_of_1.safetensors"
    save_file({"own": torch.zeros(3)}, path, metadata={"shards": shards})
    with pytest.raises(ValueError, match=f"^{path}: .*Use another checkpoint.$"):
        load_into_({"own": torch.zeros(2, 3)}, tmp_path, _PART)


def test_a_file_that_contains_no_tensors_is_refused(tmp_path):
    path = tmp_path / f"{_PART}.safetensors"
    path.write_bytes(b"no tensors" * 10)
    with pytest.raises(ValueError, match=f"^{path} cannot be read"):
        load_into_({"own": torch.zeros(2, 3)}, tmp_path, _PART)


def test_what_each_rank_has_becomes_one_and_one_what_each_has(tmp_path, monkeypatch):
    """A run with local steps that goes on without, and the other way round."""
    _write(tmp_path, 3, monkeypatch)
    targets = _kept(0, 1, is_blank=True) | {"own": torch.zeros(2, 3)}
    load_into_(targets, tmp_path, _PART)
    assert torch.allclose(targets["own"], torch.ones(2, 3))
    targets = _kept(0, 2, is_blank=True) | {"count": shard_of_own(torch.zeros(()).long(), Ranks(1, 2))}
    load_into_(targets, tmp_path, _PART)
    assert targets["count"].tensor.tolist() == [7]
