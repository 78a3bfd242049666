"""Pairs of grids or texts, of any task and with symbols of their own: what people bring."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dataset.format import IDENTIFIERS, IGNORE_LABEL_ID, Metadata
from dataset.kinds.kind import Answers, Kind

TASKS_FILE = "tasks.json"


class PairsEvaluator:
    """An evaluator that counts the right answers, and those of each task where there are several. A row
    without a counted cell counts nowhere.
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
        # Of each set: the number of rows by (identifier, whether they are right), here and of all ranks.
        self._counted: dict[str, Counter] = {}
        self._total: dict[str, Counter] = {}

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
        self._total = {}
        for part in partials:
            for set_name, counted in part.items():
                self._total.setdefault(set_name, Counter()).update(counted)
        return {
            name: {f"pairs/{share}": value for share, value in _shares(counted).items()}
            for name, counted in self._total.items()
            if counted
        }

    def write(self, folder: Path) -> None:
        """Writes `tasks.json`, {set: {task: {"exact_accuracy": share, "count": rows}}}, for several tasks."""
        if len(self._names) == 1:
            return
        tasks = {}
        for set_name, counted in self._total.items():
            identifiers = sorted({identifier for identifier, _ in counted})
            rows = {
                number: {key: counted[key] for key in counted if key[0] == number} for number in identifiers
            }
            tasks[set_name] = {self._names[number]: _shares(own) for number, own in rows.items()}
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{TASKS_FILE}.tmp"
        unfinished.write_text(json.dumps(tasks, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(folder / TASKS_FILE)


def _shares(counted: Mapping[tuple[int, bool], int]) -> dict[str, float]:
    """Computes the share of right rows, and their number."""
    count = sum(counted.values())
    return {
        "exact_accuracy": sum(num for (_, right), num in counted.items() if right) / count,
        "count": count,
    }


KIND = Kind(
    name="pairs",
    mismatch=lambda _metadata: None,
    build_evaluator=PairsEvaluator,
    augmentation="pairs",
    names_symbols=True,
)
