"""The files of tensors in a checkpoint: their names, and how any number of ranks saves and loads them.

A shard (`Shard` in distributed/shards.py) is the part of a tensor that a rank holds: some elements, and their
positions in the flattened full tensor (`spans`). A section of a checkpoint is a named set of tensors and
shards, such as "optimizer". A section has these files:

- <section>.safetensors contains the full tensors.
- <section>_<r>_of_<w>.safetensors contains the shards of rank r of w ranks. The metadata of the file contain
  the positions of each shard.

`save_section` writes them. `load_into_` fills the tensors and shards of this rank, and `load_joined` returns
full tensors.
"""

import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distributed.shards import Shard, Span, Spans, Tensors, tensor_of
from distributed.world import rank, world_size
from runtime.reading import open_regular, parse_json

_MOST = 2**48  # maximum number of elements of a tensor
# Key of the metadata of a file, with JSON: {name: [spans, shape of the full tensor, is_by_rank]}. Example for
# the first half of a tensor [768]: {"steps": [[[0, 384, 0, 1]], [768], false]}, where [0, 384, 0, 1] are
# start, length, stride and count of a `Span`.
_SHARDS = "shards"


def _shard_file(section: str, rank: int, size: int) -> str:
    return f"{section}_{rank}_of_{size}.safetensors"


def save_section(tensors: Tensors, folder: Path, section: str) -> list[Path]:
    """Writes a section of a checkpoint, a named set of tensors. Returns the paths of the files.

    Writes full tensors to <section>.safetensors, and the shards of this rank to
    <section>_<rank>_of_<ranks>.safetensors.

    tensors: {name: full tensor or shard} that this rank writes. section: Name of the section, such as
    "optimizer".
    """
    full_tensors = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    shards = {key: shard for key, shard in tensors.items() if isinstance(shard, Shard)}
    paths = []
    if full_tensors:
        paths.append(folder / f"{section}.safetensors")
        save_file(full_tensors, paths[-1])
    if shards:
        paths.append(folder / _shard_file(section, rank(), world_size()))
        described = {key: [shard.spans, shard.shape, shard.is_by_rank] for key, shard in shards.items()}
        shard_tensors = {key: shard.tensor for key, shard in shards.items()}
        save_file(shard_tensors, paths[-1], metadata={_SHARDS: json.dumps(described)})
    return paths


def find_files(folder: Path, section: str) -> list[Path]:
    """Returns the paths of all files of a section, such as "weights", in a checkpoint folder.

    The file of full tensors comes first, if it exists. Then comes one file for each rank that saved shards.
    Returns [] if there are no files. Raises ValueError if the file of one of these ranks is missing.
    """
    pattern = re.compile(rf"{re.escape(section)}_(\d+)_of_(\d+)\.safetensors")
    found = [match for path in folder.iterdir() if (match := pattern.fullmatch(path.name)) and path.is_file()]
    shards = []
    for size in sorted({int(match[2]) for match in found}):
        # The number in a file name may be wrong and huge. Checking one more file than was found is enough.
        for index in range(min(size, len(found) + 1)):
            path = folder / _shard_file(section, index, size)
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing. Each process wrote one file. Copy all of them into {folder}."
                )
            shards.append(path)
    full_tensors = folder / f"{section}.safetensors"
    return [full_tensors] * full_tensors.is_file() + shards


def load_into_(
    targets: Tensors,
    folder: Path,
    section: str,
    *,
    is_optional: bool = False,
    absent_weights: tuple[str, ...] = (),
    casts: Collection[str] = (),
) -> bool:
    """Overwrites tensors and shards of this rank with those in a checkpoint.

    Another number of ranks may have saved the checkpoint. The values of some tensors differ between ranks
    (`Shard.is_by_rank`), for example the optimizer state with local_steps > 1. If another number of ranks
    saved such a tensor, or if this run has equal values on all ranks (local_steps=1), every rank loads the
    mean of the saved values.

    targets: {name: full tensor or shard} on this rank, changed in place. If empty, nothing is read.
    is_optional: Whether the section may be missing. If it is missing, the targets do not change.
    absent_weights: Names of weights that this rank lacks, such as "lm_head.weight". Stored tensors of these
        weights are not read, such as "first_moment.lm_head.weight".
    casts: Names of tensors that may be stored in another floating-point dtype. Their values are converted.

    Returns False if an optional section is missing, otherwise True. Raises ValueError if names, shapes or
    dtypes differ, or if files are missing or damaged.
    """
    if not targets:
        return True
    if is_optional and not find_files(folder, section):
        return False
    absent = set(targets)  # names not read so far
    num_read = Counter()  # {name: number of ranks with a tensor of this name that are read so far}
    for stored in _stored(folder, section):
        if stored.key not in targets and stored.key.endswith(absent_weights):
            continue
        if stored.key not in targets:
            raise _does_not_fit(folder, stored.key, stored=stored.shape, current=None)
        absent.discard(stored.key)
        target, weight = targets[stored.key], 1.0
        # Shapes are those of the full tensor. A tensor whose values differ between ranks is stored as [ranks,
        # ...]. If the shapes are equal, each rank loads its part. Otherwise, the number of ranks or the key
        # local_steps has changed. Then every rank loads the same value: the stored tensor, or the mean of its
        # rows. The mean is computed row by row: row n adds (row - mean so far) / n.
        if _shape_of(target) != stored.shape and isinstance(target, Shard) and target.is_by_rank:
            target = target.tensor[0]
        if _shape_of(target) != stored.shape and stored.is_by_rank:
            num_read[stored.key] += 1
            stored, weight = stored.as_full_tensor(), 1 / num_read[stored.key]
        stored.copy_into_(target, weight=weight, casts=stored.key in casts)
    for key in sorted(absent):
        raise _does_not_fit(folder, key, stored=None, current=_shape_of(targets[key]))
    return True


def load_joined(folder: Path, section: str) -> dict[str, Tensor]:
    """Returns {name: full tensor} of a section, such as "weights", in a checkpoint folder.

    Joins the shards of all ranks that saved the checkpoint. If each rank had its own full tensor of a name
    (`Shard.is_by_rank`), the result is [ranks, ...], with one row for each rank. Example: the optimizer state
    with local_steps > 1. Raises ValueError if files of the section are missing or damaged, and
    FileNotFoundError if the folder is missing.
    """
    values: dict[str, Tensor] = {}
    for stored in _stored(folder, section):
        if stored.spans is None:
            values[stored.key] = stored.read()
            continue
        if stored.key not in values:
            values[stored.key] = stored.read().new_empty(stored.shape)
        stored.copy_into_(values[stored.key])
    return values


def _does_not_fit(folder: Path, key: str, *, stored: object, current: object) -> ValueError:
    stored, current = ("missing" if value is None else value for value in (stored, current))
    return ValueError(
        f"{folder} does not match this run: {key} is {stored} in the checkpoint, but {current} in this run. "
        "Set arch, optimizer and global_batch_size to the values of the checkpoint."
    )


def _shape_of(tensor: Tensor | Shard) -> tuple[int, ...]:
    return tuple(tensor.shape)


class _Stored(NamedTuple):
    """A full tensor or a shard in an open safetensors file of a checkpoint."""

    key: str
    spans: Spans | None  # positions of the shard's elements in the flattened full tensor; None: full tensor
    shape: tuple[int, ...]  # of the full tensor
    # Whether the full tensor is [ranks, ...], and the shard is the row of the rank that wrote it. Example:
    # with local_steps > 1, each rank has its own optimizer state.
    is_by_rank: bool
    file: safe_open
    folder: Path  # of the checkpoint, for messages

    def read(self) -> Tensor:
        return self.file.get_tensor(self.key)

    def as_full_tensor(self) -> "_Stored":
        # One row of a tensor [ranks, ...], described as a full tensor.
        return self._replace(spans=None, shape=self.shape[1:], is_by_rank=False)

    def copy_into_(self, target: Tensor | Shard, *, weight: float = 1.0, casts: bool = False) -> None:
        """Copies stored elements into the same positions of `target`. Other elements do not change.

        Raises ValueError if the shape of the full tensor or the dtype differs.

        weight: Weight of the stored values in the result: target += weight * (stored - target).
        casts: Whether the stored floating-point dtype may differ from that of `target`. If True, the values
            are converted.
        """
        if self.shape != _shape_of(target):
            raise _does_not_fit(self.folder, self.key, stored=self.shape, current=_shape_of(target))
        everything = (Span(0, math.prod(self.shape)),)
        target_spans = target.spans if isinstance(target, Shard) else everything
        common = _common(everything if self.spans is None else self.spans, target_spans)
        if common is None:
            return
        unit, source, destination = common
        values, to = self.read(), tensor_of(target).detach()
        if casts and values.is_floating_point() and to.is_floating_point():
            values = values.to(to.dtype)
        if values.dtype != to.dtype:
            raise _does_not_fit(self.folder, self.key, stored=values.dtype, current=to.dtype)
        values, flat = values.view(-1, unit)[source].to(to.device), to.reshape(-1, unit)
        flat[destination] = values if weight == 1 else values.lerp(flat[destination], 1 - weight)
        if not to.is_contiguous():  # then `flat` is a copy
            to.copy_(flat.view_as(to))


def _stored(folder: Path, section: str) -> Iterator[_Stored]:
    """Yields every full tensor and shard of a section in a checkpoint, without reading the values.

    Raises ValueError if the section is missing. After the last tensor, raises ValueError if the shards of a
    tensor overlap or leave gaps.
    """
    paths = find_files(folder, section)
    if not paths:
        raise ValueError(
            f"{folder} has no {section}.safetensors, so it was trained with another config. Use that config, "
            f"or set init_from={folder} to load only its weights."
        )
    found: dict[str, list[Span]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with open_regular(path), _open(path) as file:
            metadata = file.metadata() or {}
            shards = parse_json(metadata.get(_SHARDS, "{}"), where=f"{path}: {_SHARDS}")
            if not isinstance(shards, dict):
                raise ValueError(f"{path}: {_SHARDS} is not a JSON object. Use another checkpoint.")
            for key in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
                shape, spans, is_by_rank = tuple(file.get_slice(key).get_shape()), None, False
                num_stored = math.prod(shape)
                if key in shards:
                    spans, shape, is_by_rank = _parse_shard(shards[key], num_stored, where=f"{path}: {key}")
                found[key] += (Span(0, num_stored),) if spans is None else spans
                if shapes.setdefault(key, shape) != shape:
                    raise ValueError(
                        f"{path}: the shape of {key} differs from the other files of {folder}, so the files "
                        "are from different checkpoints. Use another checkpoint."
                    )
                yield _Stored(key, spans, shape, is_by_rank, file, folder)
    for key, spans in found.items():
        if not _are_complete(spans, math.prod(shapes[key])):
            raise ValueError(f"{folder}: the shards of {key} overlap or leave gaps. Use another checkpoint.")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error})") from None


def _parse_shard(entry: Any, num_stored: int, *, where: str) -> tuple[Spans, tuple[int, ...], bool]:
    """Parses and checks the description of a shard in the metadata of its file, an untrusted JSON value.

    Returns (spans, shape, is_by_rank). `spans` are the positions of the elements in the flattened full
    tensor. `shape` is the shape of the full tensor. `is_by_rank` is True if the full tensor is [ranks, ...],
    with one row for each rank. Raises ValueError if the description is damaged.

    entry: The description [spans, shape, is_by_rank]. num_stored: Number of elements that the file stores for
    this shard. where: File and name of the shard, for messages.
    """
    try:
        spans, shape, is_by_rank = entry
        spans, size = tuple(Span(*span) for span in spans), math.prod(shape)
        are_counts = all(type(count) is int and count >= 0 for count in itertools.chain(shape, *spans))
        is_inside = all(
            span.start + span.stride * (span.count - 1) + span.length <= size < _MOST
            and (span.length or span.count <= 1)  # `num_stored` does not limit the count of empty pieces
            for span in spans
        )
        has_all = sum(span.length * span.count for span in spans) == num_stored
        is_row = not is_by_rank or num_stored == math.prod(shape[1:])
        if are_counts and is_inside and has_all and is_row:
            return spans, tuple(shape), bool(is_by_rank)
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"{where}: the file is damaged. The metadata of the shard (position, shape or size) is wrong. Use "
        "another checkpoint."
    )


def _are_complete(spans: list[Span], size: int) -> bool:
    """Returns whether the spans together contain each of the positions 0 to size - 1 exactly once."""
    spans = [span for span in spans if span.length]
    starts = [span.start + span.stride * np.arange(span.count) for span in spans]
    starts = np.concatenate([*starts, [size]])  # each piece must end at the start of another, or at `size`
    lengths = np.repeat([span.length for span in spans], [span.count for span in spans])
    ends = np.append(starts[:-1] + lengths, 0)
    return np.array_equal(np.sort(starts), np.sort(ends))


_Index = slice | Tensor


def _common(stored: Spans, target: Spans) -> tuple[int, _Index, _Index] | None:
    """Finds the elements of a full tensor that two shards have in common. Returns None if there are none.

    Returns (unit, index into the stored shard, index into the target shard). If each shard is reshaped to
    [n, unit], the indices select the rows that both shards contain, in the same order. A row is `unit`
    consecutive elements of the flattened full tensor.

    stored, target: Positions of the elements of the two shards in the flattened full tensor.
    """
    if not stored or not target:
        return None
    if stored == target:
        return 1, slice(None), slice(None)
    if all(len(spans) == 1 == spans[0].count for spans in (stored, target)):  # contiguous
        starts = [span.start for (span,) in (stored, target)]
        begin, end = max(starts), min(span.start + span.length for (span,) in (stored, target))
        return (1, *(slice(begin - start, end - start) for start in starts)) if begin < end else None
    unit = math.gcd(*(size for span in stored + target for size in (span.start, span.length, span.stride)))
    numbers = [np.concatenate([_units_of(span, unit) for span in spans]) for spans in (stored, target)]
    _, source, destination = np.intersect1d(*numbers, assume_unique=True, return_indices=True)
    return (unit, torch.from_numpy(source), torch.from_numpy(destination)) if len(source) else None


def _units_of(span: Span, unit: int) -> np.ndarray:
    # The result g stands for the positions g * unit to (g + 1) * unit - 1.
    first = (span.start + span.stride * np.arange(span.count)) // unit
    return (first[:, None] + np.arange(span.length // unit)).reshape(-1)
