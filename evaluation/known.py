"""Selects the test puzzles for which a model has trained puzzle embeddings.

Rank 0 compares the names of the puzzles in the training data with the names of the puzzles in the dataset. In
ARC, rank 0 also compares hashes of the tasks. The other ranks get the result from rank 0.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from checkpointing.finding import Checkpoint
from config.architecture import Architecture
from dataset.identities import Match, identities_of, read_identities
from dataset.metadata import Dataset
from dataset.mixture import fingerprint_of
from distributed import log
from distributed.world import is_main


def has_rows_to_match(arch: Architecture, data: Dataset) -> bool:
    # Each folder has its own identifiers. So several folders have several, also without named tasks.
    return arch.has_puzzle_embeddings and data.metadata.num_puzzle_identifiers > 1


def find_match(checkpoint: Checkpoint, data: Dataset) -> Match | None:
    """Finds the model's embedding for each puzzle of a dataset.

    A model may have learned one embedding vector for each puzzle of its training data. In the dataset, the
    same puzzles may have other puzzle identifiers. So puzzles are compared by name and, in ARC, by
    content. `Match.rows` contains, for each puzzle identifier, the row of the model's embedding table, or -1.

    Returns None in these cases:

    - The model has no puzzle embeddings.
    - The dataset has only one puzzle identifier, and the model was trained on one folder.
    - Every puzzle identifier is equal to its row, as in the dataset of the training.
    - The names of the puzzles are unknown. The caller then uses the puzzle identifier as the row.

    In the last case, logs a warning that the results may be wrong. There is no warning if the dataset is that
    of the training. There is also none if the two datasets have different numbers of puzzle identifiers,
    because `load_trained_model` then raises an error.

    Raises ValueError if a file is damaged.
    """
    if not checkpoint.arch.has_puzzle_embeddings:
        return None
    path = checkpoint.identities_file
    model = path and read_identities(path)
    if not has_rows_to_match(checkpoint.arch, data) and (model is None or len(model.folders) == 1):
        return None
    current = identities_of(data)
    if model is not None and current is not None:
        if model.equals(current):
            return None
        match = model.match(current)
        # The folders of the training may have other names now.
        if match is not None and ((match.rows >= 0).all() or not is_trained_on(checkpoint, data.folders)):
            return match
    trained, num = (checkpoint.dataset_info or {}).get("metadata"), data.metadata.num_puzzle_identifiers
    has_other_size = isinstance(trained, dict) and trained.get("num_puzzle_identifiers", num) != num
    if not has_other_size and not is_trained_on(checkpoint, data.folders):
        names = ", ".join(map(str, data.folders))
        where = checkpoint if model is None else names
        log.warning(
            f"{where} does not name its puzzle identifiers. Puzzle embeddings are matched by number. Results "
            f"are wrong unless {names} has the tasks of the training in the same order."
        )
    return None


def check_same_rows(trained: Dataset, data: Dataset) -> None:
    """Raises ValueError if a test puzzle is missing in the training data, or has another identifier there.

    The puzzle identifier is the row of the learned embedding, so the model would use a wrong embedding. Does
    nothing if one of the datasets does not store the names of its puzzles.

    trained: Dataset that the model is trained on.
    data: Dataset that contains the test puzzles (config key `test_data_path`).
    """
    known, current = identities_of(trained), identities_of(data)
    if known is None or current is None or known.equals(current) or (match := known.match(current)) is None:
        return
    sets = data.splits["test"].sets.values()
    used = np.unique(np.concatenate([test_set.puzzle_identifiers for test_set in sets]))
    if num_others := int((match.rows[used] != used).sum()):
        path = data.folders[0]
        raise ValueError(
            f"test_data_path: {num_others} of {len(used)} puzzle identifiers of {path} belong to other "
            f"puzzles in the training data. Remove test_data_path, and pass data_path={path} to evaluate.py."
        )


def is_trained_on(checkpoint: Checkpoint, folders: Sequence[Path]) -> bool:
    """Returns whether dataset folders contain exactly the data that a checkpoint was trained on.

    Returns False if the checkpoint has no hash of its data, or if a folder has no training split.
    """
    try:
        return checkpoint.fingerprint is not None and checkpoint.fingerprint == fingerprint_of(folders)
    except (ValueError, OSError):  # no training split
        return False


def known_puzzles(
    data: Dataset, match: Match | None, *, model: str
) -> tuple[Dataset, dict[str, np.ndarray] | None, dict[str, dict[str, int]]]:
    """Selects the test puzzles that a model has puzzle embeddings for ("known" puzzles).

    Returns a tuple of three parts:

    - the dataset, without the test sets that contain no known puzzle
    - {test set: indices of the known puzzles, int64 [n], ascending}, or None if all puzzles are known
    - {test set: {metric: number}}. Example: "identifiers_missing" is the number of puzzle identifiers without
      an embedding

    Rank 0 logs the numbers. Raises ValueError if no puzzle is known.

    match: The row of the model's embedding table for each puzzle identifier, from `find_match`. If None, the
    result is (data, None, {}).
    model: Name of the model for messages.
    """
    if match is None:
        return data, None, {}
    split, puzzles, metrics, lines = data.splits["test"], {}, {}, []
    for name, test_set in split.sets.items():
        is_known = match.rows[test_set.puzzle_identifiers] >= 0
        used = np.unique(test_set.puzzle_identifiers)
        common, other = int((match.rows[used] >= 0).sum()), int(match.is_other[used].sum())
        counts = {"common": common, "missing": len(used) - common - other}
        counts |= {"additional": match.num_additional, "other_task": other}
        lines.append(
            f"set {name}: {common} with an embedding, {counts['missing']} without, {other} with the name of "
            f"another task, {match.num_additional} embeddings for other identifiers"
        )
        if common:
            puzzles[name] = np.flatnonzero(is_known)
            metrics[name] = {f"identifiers_{kind}": count for kind, count in counts.items()}
    text, folders = "; ".join(lines), ", ".join(map(str, data.folders))
    if not puzzles:
        raise ValueError(
            f"{model} has no embedding for any test puzzle of {folders} ({text}). Set data_path to a dataset "
            "with tasks that it was trained on."
        )
    has_all = all((match.rows[test_set.puzzle_identifiers] >= 0).all() for test_set in split.sets.values())
    if is_main():
        only = "" if has_all else " Only identifiers with an embedding are evaluated."
        log.info(f"{folders}: puzzle identifiers with an embedding in {model}: {text}.{only}")
    test = dataclasses.replace(split, sets={name: split.sets[name] for name in puzzles})
    data = dataclasses.replace(data, splits={**data.splits, "test": test})
    return data, None if has_all else puzzles, metrics
