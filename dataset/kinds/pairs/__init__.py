"""Pairs of grids or texts, of any task and with symbols of their own: what people bring."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.evaluator import Answers
from dataset.fields import field_augmentation
from dataset.format import IDENTIFIERS, IGNORE_LABEL_ID, Metadata
from dataset.kinds import Kind


class PairsEvaluator:
    """An evaluator that counts the right answers of each task: `pairs/<task>/exact_accuracy`, where there are
    several. A row without a counted cell counts nowhere.
    """

    samples_vote = False

    def __init__(self, folder: Path, metadata: Metadata):
        """Raises ValueError where the names of the tasks are missing."""
        path, num = folder / IDENTIFIERS, metadata.num_puzzle_identifiers
        try:
            self._names = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}); build the dataset again") from None
        if not isinstance(self._names, list) or len(self._names) != num:
            raise ValueError(f"{path} does not name the {num} identifiers; build the dataset again")
        self._counted: dict[str, Counter] = {}  # of each set: rows, by task and by whether they are right

    def add(self, set_name: str, answers: Answers) -> None:
        counts = answers.labels != IGNORE_LABEL_ID
        is_right = ((answers.preds == answers.labels) | ~counts).all(axis=1)
        real = counts.any(axis=1)
        rows = zip(answers.puzzle_identifiers[real].tolist(), is_right[real].tolist(), strict=True)
        self._counted.setdefault(set_name, Counter()).update(rows)

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> None:
        """Returns None: there are no rules."""

    def partial(self) -> dict[str, Counter]:
        return self._counted

    def metrics(self, partials: Sequence[dict[str, Counter]]) -> dict[str, dict[str, float]]:
        total: dict[str, Counter] = {}
        for part in partials:
            for set_name, counted in part.items():
                total.setdefault(set_name, Counter()).update(counted)
        return {name: self._shares(counted) for name, counted in total.items() if counted.total()}

    def _shares(self, counted: Counter) -> dict[str, float]:
        num_right = sum(num for (_, is_right), num in counted.items() if is_right)
        shares = {"pairs/exact_accuracy": num_right / counted.total(), "pairs/count": counted.total()}
        for task in sorted({task for task, _ in counted}) if len(self._names) > 1 else ():
            right, wrong = counted[task, True], counted[task, False]
            shares[f"pairs/{self._names[task]}/exact_accuracy"] = right / (right + wrong)
        return shares

    def write(self, folder: Path) -> None:
        """Writes nothing: the metrics say it all."""


KIND = Kind(
    name="pairs",
    builder="dataset.build_pairs",
    misfit=lambda _metadata: None,
    build_evaluator=PairsEvaluator,
    augmentations={"pairs": field_augmentation(has_translations=False)},
    names_symbols=True,
)
