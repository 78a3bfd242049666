"""Counts the test puzzles of datasets that are also training puzzles, unchanged or transformed.

python -m dataset.leaks data/demo
python -m dataset.leaks data/easy data/hard
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.description import read_info
from dataset.equal import UNKNOWN, Compared, read_compared
from dataset.files import open_dataset
from dataset.metadata import Dataset
from dataset.symmetry import Symmetry, find_symmetry
from runtime.command_line import OneLineParser, add_plugin_option, one_line_errors

_MOST_CANDIDATES = 16  # training puzzles with the same hash that are searched for one test puzzle


class Leaked(NamedTuple):
    """Number of puzzles in one test set that are also training puzzles. Only originals are compared.

    Attributes:
        name: Dataset folder and name of the test set.
        exact: Number of test puzzles that are equal to a training puzzle.
        symmetric: Number of test puzzles that are equal to a training puzzle or to a transformed training
            puzzle, such as a rotated one. None if the transforms of this kind of puzzle are not known.
        at_most: Upper bound of `symmetric`. It also counts each test puzzle for which the search found no
            equal training puzzle, but stopped at a limit: 16 training puzzles with the same hash, or 20,000
            steps for one of them. None if `symmetric` is None.
    """

    name: str
    count: int  # includes ARC pairs with an unknown answer
    exact: int
    symmetric: int | None = None
    at_most: int | None = None

    def __str__(self) -> str:
        symmetric = "unknown" if self.symmetric is None else f"{self.symmetric:,}"
        more = f" (at most {self.at_most:,})" if self.at_most != self.symmetric else ""
        known = f"{self.count:,} test puzzles. In a training split: {self.exact:,}"
        return f"{self.name}: {known}. Including symmetric ones: {symmetric}{more}"


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("leaks"):
        parser = OneLineParser("dataset.leaks", description=__doc__.partition("\n")[0])
        add_plugin_option(parser)
        data = "dataset folder; with several, test puzzles of each are compared with all training puzzles"
        parser.add_argument("data", type=Path, nargs="+", metavar="DATA", help=data)
        for leaked in find_leaked(parser.parse_args(arguments).data):
            print(leaked, flush=True)


def find_leaked(folders: Sequence[Path]) -> Iterator[Leaked]:
    """Compares the test puzzles of each folder with the training puzzles of all folders.

    Yields a result for each test set. Raises ValueError if a folder is not a dataset, or if the folders have
    different kinds of puzzles. If the datasets define their own symbols, the symbols and the sizes of the
    token arrays must also be equal.
    """
    opened = [open_dataset(folder, read_everything=False) for folder in folders]
    infos = [read_info(data.folders, data.metadata) for data in opened]
    forms = [(info.kind and info.kind.name, info.vocabulary) for info in infos]
    for folder, form in zip(folders, forms, strict=True):
        if form != forms[0]:
            problem = f"{folder} and {folders[0]} have different kinds of puzzles, symbols or fields"
            raise ValueError(f"{problem}. Run the command once for each.")
    for folder, data, info in zip(folders, opened, infos, strict=True):
        for name, tested in data.splits["test"].sets.items():
            examples = [*read_compared(tested, "test", folder)]
            yield _compare(f"{folder}, set {name}", examples, opened, find_symmetry(folder, info))


def _compare(
    name: str, examples: Sequence[Compared], opened: Sequence[Dataset], symmetry: Symmetry | None
) -> Leaked:
    tokens = np.concatenate([part.tokens for part in examples])
    hashes = np.concatenate([part.hash() for part in examples])
    is_known, is_exact = hashes != UNKNOWN, np.zeros(len(hashes), bool)
    classes, candidates = np.zeros_like(hashes), {}
    if symmetry is not None:
        classes = np.concatenate([part.hash(symmetry.hash_rows) for part in examples])
        candidates = {class_hash: [] for class_hash in classes[is_known].tolist()}
    for part in _read_training(opened):
        is_exact |= is_known & np.isin(hashes, part.hash())
        if symmetry is None or part.tokens.shape[1] != tokens.shape[1]:
            continue
        class_hashes = part.hash(symmetry.hash_rows)
        for row in np.flatnonzero(np.isin(class_hashes, classes[is_known])).tolist():
            alike = candidates[int(class_hashes[row])]
            if len(alike) < _MOST_CANDIDATES:
                alike.append(part.tokens[row])
    exact = int(is_exact.sum())
    if symmetry is None:
        return Leaked(name, len(hashes), exact)
    rows = np.flatnonzero(is_known & ~is_exact).tolist()
    found = [_search(tokens[row], candidates[int(classes[row])], symmetry) for row in rows]
    symmetric = exact + found.count(True)
    return Leaked(name, len(hashes), exact, symmetric, symmetric + found.count(None))


def _read_training(opened: Sequence[Dataset]) -> Iterator[Compared]:
    for data in opened:
        for puzzles in data.splits["train"].sets.values():
            yield from read_compared(puzzles, "train", data.folders[0])


def _search(puzzle: np.ndarray, candidates: Sequence[np.ndarray], symmetry: Symmetry) -> bool | None:
    is_open = len(candidates) == _MOST_CANDIDATES  # there may be more
    for candidate in candidates:
        if found := symmetry.maps(candidate, puzzle):
            return True
        is_open |= found is None
    return None if is_open else False  # None: not decided


if __name__ == "__main__":
    main()
