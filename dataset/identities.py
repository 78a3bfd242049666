"""Identities of puzzle embeddings: which puzzle identifiers of two datasets stand for the same puzzle.

A puzzle identifier is a number. The same number stands for different puzzles in different datasets. So a run
also stores the identity of each puzzle: its name, and for an ARC task a digest (hash) of the demonstrations.
The digest is missing if the dataset has no file digests.npy. With several dataset folders, the name of the
folder is part of the identity.
"""

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.files import DIGESTS, IDENTIFIERS, load_metadata
from dataset.metadata import BLANK, Dataset
from runtime.reading import MissingFileError, parse_json, printable, read_arrays, read_bytes

_MOST_NAME_BYTES = 2**28  # size limit of all names: a million variants have long names
_MOST_BYTES = _MOST_NAME_BYTES + 2**25  # size limit of an unpacked file, with the digests
_ONLY_BLANK = json.dumps([BLANK]).encode()


class Match(NamedTuple):
    """The puzzle embeddings of a model, rows of a table, that belong to the puzzles of a dataset.

    Attributes:
        rows: Row of the table for each puzzle identifier, int64 [identifiers]. -1 if the table has no row for
            its puzzle.
        is_other: bool [identifiers]. True if the model was trained on an ARC task with the same name, but
            with other demonstrations. `rows` is then -1.
        num_rows: Number of rows of the table.
        num_additional: Number of puzzle names of the model that the dataset does not have. The name "<blank>"
            does not count.
    """

    rows: np.ndarray
    is_other: np.ndarray
    num_rows: int
    num_additional: int


@dataclasses.dataclass(frozen=True)
class Identities:
    """Says which puzzle each puzzle identifier of a dataset stands for.

    Attributes:
        folders: Names of the folders.
        names: Content of each folder's identifiers.json.
        sizes: Number of puzzle identifiers of each folder.
        digests: Hash of the ARC task of each identifier, uint64 [sum of sizes]. 0 if the task is unknown.
    """

    folders: tuple[str, ...]
    names: tuple[bytes, ...]
    sizes: tuple[int, ...]
    digests: np.ndarray

    def equals(self, other: "Identities") -> bool:
        """Returns whether every puzzle identifier stands for the same puzzle in both objects.

        The names of the folders must be equal too, unless both objects have only one folder.
        """
        same_folders = self.folders == other.folders or len(self.folders) == len(other.folders) == 1
        same_names = (self.names, self.sizes) == (other.names, other.sizes)
        return same_folders and same_names and np.array_equal(self.digests, other.digests)

    def keys(self, *, with_folders: bool) -> list[str] | None:
        """Returns the name of the puzzle of each puzzle identifier, in order.

        If even one folder does not name each of its identifiers, returns None.

        with_folders: Whether each name starts with the name of its folder, as in "arc/0a938d79".
        """
        keys = []
        for folder, text, size in zip(self.folders, self.names, self.sizes, strict=True):
            try:
                names = parse_json(text, where=IDENTIFIERS)
            except ValueError:
                return None
            if not isinstance(names, list) or len(names) != size:
                return None
            start = f"{folder}/" if with_folders else ""
            keys += [start + printable(str(name)) for name in names]
        return keys

    def match(self, data: "Identities") -> Match | None:
        """Finds the puzzle embeddings of a model that belong to the puzzles of a dataset.

        `self` describes the training data of the model, and `data` describes the dataset. Puzzles with equal
        names match, unless both have digests and the digests differ. If the model or the dataset has several
        folders, the name of the folder is part of each name. If even one puzzle identifier of the model or of
        the dataset has no name, returns None.
        """
        with_folders = len(self.folders) > 1 or len(data.folders) > 1
        known, data_keys = (identities.keys(with_folders=with_folders) for identities in (self, data))
        if known is None or data_keys is None:
            return None
        row_of = {key: row for row, key in reversed([*enumerate(known)])}  # of equal names, the first counts
        rows = np.array([row_of.get(key, -1) for key in data_keys], np.int64)
        theirs = np.where(rows >= 0, self.digests[rows], 0)
        is_other = (theirs != data.digests) & (theirs != 0) & (data.digests != 0)
        num_additional = sum(not key.endswith(BLANK) for key in row_of.keys() - set(data_keys))
        return Match(np.where(is_other, -1, rows), is_other, len(known), num_additional)

    def to_bytes(self) -> bytes:
        lengths = [len(text) for text in self.names]
        header = json.dumps([*zip(self.folders, lengths, self.sizes, strict=True)]).encode()
        texts = {"folders": header, "names": b"".join(self.names)}
        arrays = {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in {**arrays, "digests": self.digests}.items():
                member = io.BytesIO()
                np.lib.format.write_array(member, array, allow_pickle=False)
                archive.writestr(f"{name}.npy", member.getbuffer())
        return content.getvalue()


def identities_of(data: Dataset) -> Identities | None:
    """Returns which puzzle each puzzle identifier of a dataset stands for.

    Returns None if any folder has several identifiers, but no file identifiers.json with their names. Raises
    ValueError if a file digests.npy is not valid.
    """
    split = next(iter(data.splits))
    sizes = tuple(load_metadata(folder, split).num_puzzle_identifiers for folder in data.folders)
    names, digests = [], []
    for folder, size in zip(data.folders, sizes, strict=True):
        try:
            names.append(read_bytes(folder / IDENTIFIERS, most=_MOST_NAME_BYTES))
        except MissingFileError:
            if size > 1:
                return None
            names.append(_ONLY_BLANK)
        digests.append(_read_digests(folder / DIGESTS, size))
    folders = tuple(folder.resolve().name for folder in data.folders)
    return Identities(folders, tuple(names), sizes, np.concatenate(digests))


def _read_digests(path: Path, size: int) -> np.ndarray:
    try:
        content = io.BytesIO(read_bytes(path))
        digests = np.lib.format.read_array(content, allow_pickle=False)
    except MissingFileError:
        return np.zeros(size, np.uint64)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}). Build the dataset again.") from None
    if digests.dtype != np.uint64 or digests.shape != (size,):
        raise ValueError(f"{path} does not contain {size} digests. Build the dataset again.")
    return digests


def read_identities(path: Path) -> Identities | None:
    """Reads a file that contains the result of `Identities.to_bytes`.

    Returns None if the file is missing. Raises ValueError if it is damaged.
    """
    advice = "Delete it. Puzzle embeddings are then matched by number."
    try:
        header, names, digests = read_arrays(path, ("folders", "names", "digests"), most=_MOST_BYTES)
        entries = parse_json(header.tobytes(), where="folders")
        folders, lengths, sizes = zip(
            *((str(folder), int(length), int(size)) for folder, length, size in entries), strict=True
        )
        is_valid = min(*lengths, *sizes) > 0 and sum(lengths) == len(names) and names.dtype == np.uint8
        is_valid = is_valid and digests.dtype == np.uint64 and digests.shape == (sum(sizes),)
    except MissingFileError:
        return None
    except (ValueError, TypeError, OverflowError) as error:  # OverflowError: a size is infinite
        raise ValueError(f"{path} cannot be read ({error}). {advice}") from None
    if not is_valid:
        raise ValueError(f"{path} does not contain a name and a digest for each puzzle identifier. {advice}")
    ends = np.cumsum(lengths).tolist()
    texts = (names[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True))
    return Identities(folders, tuple(texts), sizes, digests)
