"""Files of tensors, of which some are spread over ranks: each rank writes its own slices, any number reads.

<name>.safetensors holds what is whole, <name>_<r>_of_<w>.safetensors the slices of rank r of w, and says in
its metadata where in the whole these belong. A world of one writes everything whole. A reader does not see
how many have written: it gets the tensors joined, or fills with them the slices that it keeps itself.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel.process_group import is_main, rank, world_size
from parallel.shards import Slice, tensor_of

_PLACES = "places"  # in the metadata, as JSON: {name: [start, stop, step, shape of the whole]}


def files_of(name: str, tensors: Mapping[str, Tensor | Slice]) -> dict[str, dict[str, Tensor | Slice]]:
    """Returns what this rank writes, by file: rank 0 the file `name` of what is whole, each rank its slices.

    Nothing is communicated. All ranks give slices of the same names, which make up each whole, every element
    once; a slice may be empty.
    """
    whole = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    slices = {key: each for key, each in tensors.items() if isinstance(each, Slice)}
    files: dict[str, dict[str, Tensor | Slice]] = {}
    if whole and is_main():
        files[name] = whole
    if slices:
        files[_slice_file(name, rank(), world_size())] = slices
    return files


def save_tensors(tensors: Mapping[str, Tensor | Slice], path: Path) -> None:
    """Writes a file of `files_of`."""
    slices = {key: each for key, each in tensors.items() if isinstance(each, Slice)}
    places = {key: [place.start, place.stop, place.step, shape] for key, (_, place, shape) in slices.items()}
    plain = {key: tensor_of(each) for key, each in tensors.items()}
    save_file(plain, path, metadata={_PLACES: json.dumps(places)} if places else None)


def find_files(folder: Path, name: str) -> list[Path]:
    """Finds what of the file `name` there is: that of what is whole, and those of slices.

    ValueError, one line, where some ranks' slices are there and others' are not.
    """
    matches = [match for path in folder.iterdir() if (match := _slice_pattern(name).fullmatch(path.name))]
    sizes = {int(match[2]) for match in matches}
    slices = [folder / _slice_file(name, number, size) for size in sizes for number in range(size)]
    for path in slices:
        if not path.is_file():
            raise ValueError(f"{path} is missing: each process saved its own slices, and all are needed")
    return [path for path in (folder / name,) if path.is_file()] + slices


def load_joined(folder: Path, name: str) -> dict[str, Tensor]:
    """Loads every tensor of the file `name` whole, however many ranks wrote it.

    ValueError, one line, where slices are missing; OSError or SafetensorError where a file cannot be read.
    """
    values: dict[str, Tensor] = {}
    for stored in _stored(folder, name):
        if stored.place is None:
            values[stored.key] = stored.read()
            continue
        if stored.key not in values:
            values[stored.key] = stored.read().new_empty(stored.shape)
        stored.copy_into_(values[stored.key])
    return values


def load_into_(targets: Mapping[str, Tensor | Slice], folder: Path, name: str) -> None:
    """Overwrites the targets with what the file `name` has of them, however many ranks wrote it.

    A rank reads what holds something for it. ValueError, one line, where names, shapes or dtypes differ, or
    slices are missing.
    """
    absent = dict(targets)
    for stored in _stored(folder, name):
        if stored.key not in targets:
            raise does_not_fit(folder, stored.key, there=stored.shape, here=None)
        stored.copy_into_(targets[stored.key])
        absent.pop(stored.key, None)
    for key, target in absent.items():
        raise does_not_fit(folder, key, there=None, here=tuple(tensor_of(target).shape))


def does_not_fit(folder: Path, key: str, *, there: object, here: object) -> ValueError:
    return ValueError(
        f"{folder} does not fit this run ({key} is {there} there and {here} here): give the arch, optimizer "
        "and global_batch_size that it was trained with"
    )


class _Stored(NamedTuple):
    """A tensor in an open file. place: of the whole of `shape`, as in `Slice`; None: it is the whole."""

    key: str
    place: range | None
    shape: tuple[int, ...]
    file: safe_open
    folder: Path

    def read(self) -> Tensor:
        return self.file.get_tensor(self.key)

    def copy_into_(self, target: Tensor | Slice) -> None:
        """Copies what both have of the whole."""
        to, kept, shape = target if isinstance(target, Slice) else (target, None, tuple(target.shape))
        if shape != self.shape:
            raise does_not_fit(self.folder, self.key, there=self.shape, here=shape)
        row = () if kept is None else tuple(to.shape[1:])
        if self.place is not None:
            row = tuple(self.file.get_slice(self.key).get_shape()[1:])
        num_rows = math.prod(shape) // math.prod(row)
        ours, theirs = (range(num_rows) if place is None else place for place in (kept, self.place))
        common = _common(ours, theirs)
        if common:
            values = self.read()
            if values.dtype != to.dtype:
                raise does_not_fit(self.folder, self.key, there=values.dtype, here=to.dtype)
            values = values.view(-1, *row)[_index_of(common, theirs)]
            to.detach().view(-1, *row)[_index_of(common, ours)].copy_(values)


def _stored(folder: Path, name: str) -> Iterator[_Stored]:
    for path in find_files(folder, name) or [folder / name]:
        with safe_open(path, framework="pt") as file:
            places = json.loads((file.metadata() or {}).get(_PLACES, "{}"))
            for key in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                *place, shape = places.get(key, [file.get_slice(key).get_shape()])
                yield _Stored(key, range(*place) if place else None, tuple(shape), file, folder)


def _common(ours: range, theirs: range) -> range:
    """Finds the numbers that are in both; all of a range's steps are above 0."""
    later = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    step = math.lcm(ours.step, theirs.step)
    first = next((number for number in later[:step] if number in ours and number in theirs), later.stop)
    return range(first, later.stop, step)


def _index_of(part: range, whole: range) -> slice:
    """Returns where in a tensor of `whole` the numbers `part` are."""
    step = part.step // whole.step
    first = (part.start - whole.start) // whole.step
    return slice(first, first + step * (len(part) - 1) + 1, step)


def _slice_file(name: str, number: int, size: int) -> str:
    return f"{Path(name).stem}_{number}_of_{size}.safetensors"


def _slice_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(Path(name).stem)}_(\d+)_of_(\d+)\.safetensors")
