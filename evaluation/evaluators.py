"""Extra metrics of an evaluation, such as the fraction of Sudoku answers that obey the rules.

Every rank has one evaluator for each requested kind of puzzle and each dataset folder of this kind.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.files import load_metadata, read_builder, splits_with_several_solutions
from dataset.kinds.evaluator import Answers, Evaluator
from dataset.kinds.kind import Rules, find_kind, kind_names
from dataset.metadata import Dataset, Metadata
from distributed import log
from distributed.collectives import Ranks, gather_objects
from distributed.errors import collective_errors
from distributed.world import is_main
from evaluation.selection import Settings
from runtime.plugins import plugin_of


def build_evaluator(name: str, *, folder: Path, metadata: Metadata) -> Evaluator:
    """Builds the evaluator of a kind of puzzle, such as "sudoku", for a dataset folder.

    Raises ValueError if the kind does not exist, or if the folder contains another kind of puzzle.

    metadata: Metadata of the test split in `folder`.
    """
    if name not in (kinds := kind_names()):
        known = f"Choose from {', '.join(kinds)}. For a kind of yours, add plugins=[FILE]."
        raise ValueError(f"evaluators: {name!r} is not a kind of puzzle. {known}")
    kind, builder = find_kind(name), (read_builder(folder) or {}).get("name", name)
    mismatch = kind.mismatch_of(metadata)
    # A 4x4 maze has the sizes of a 4x4 Sudoku. A plugin may have another evaluator for a kind of ours.
    if not mismatch and builder in kinds and builder != name and plugin_of("KIND", kind) is None:
        mismatch = f"builder is {builder}"
    if mismatch:
        raise ValueError(
            f"{folder} is not a dataset of kind {name}: its {mismatch}. Choose the evaluator of its puzzles."
        )
    return kind.evaluator(folder, metadata)


class Evaluators:
    """Computes the extra metrics of an evaluation.

    Every rank creates an object, calls `add` for the answers that it computed, and calls `gather_metrics`.

    names: Kinds of puzzles, such as ["sudoku"]. If None, the kinds of those folders of `data` in which some
    test puzzle has several right answers. A folder whose builder has no kind is then left out.
    data: Dataset to evaluate. It may consist of several folders with different kinds of puzzles.

    Attributes:
        kinds: (index of the dataset folder, kind) of each evaluator. They depend on the manifests.

    Raises ValueError if no folder contains puzzles of a given kind. The error may occur on some ranks only,
    so create the object in a `with collective_errors()` block.
    """

    def __init__(self, names: Sequence[str] | None, data: Dataset):
        self._data = data
        self._of_folder: dict[Path, list[Evaluator]] = {folder: [] for folder in data.folders}
        self.kinds: list[tuple[int, str]] = []
        # {kind: first folder with test puzzles that have several right answers}
        several: dict[str, Path] = {}
        builders = {folder: (read_builder(folder) or {}).get("name") for folder in data.folders}
        for folder, builder in builders.items():
            if builder is not None and "test" in splits_with_several_solutions(folder):
                several.setdefault(builder, folder)
        # A builder of the user may have no kind of puzzle.
        used = [kind for kind in several if kind in kind_names()] if names is None else names
        for kind, folder in several.items() if is_main() else ():
            if kind not in used:
                text = f"test puzzles of {folder} have several solutions, so valid answers count as wrong"
                log.info(f"{text}. Add {kind} to evaluators.")
        for name in used:
            failures = []
            # By default, equal sizes do not give puzzles of another builder this kind.
            chosen = [folder for folder in builders if names is not None or builders[folder] in (None, name)]
            for folder in chosen:
                try:
                    metadata = load_metadata(folder, "test")  # of this folder, not of the mixture
                    self._of_folder[folder].append(build_evaluator(name, folder=folder, metadata=metadata))
                    self.kinds.append((data.folders.index(folder), name))
                except ValueError as error:
                    failures.append(error)
            if len(failures) == len(chosen):
                raise failures[0]

    def fresh_copy(self, *, only_answered: bool = False) -> "Evaluators":
        """Returns an independent copy, for another evaluation of the same data.

        Call it before the first `add`. Otherwise, the copy contains the answers that were added before.

        only_answered: If True, the metrics of the copy include only the examples that `add` receives. If
        False, the copy treats other test examples as the original does. By default, the evaluator of ARC
        counts them as wrong, and the other evaluators leave them out.
        """
        copied = copy.copy(self)
        copied._of_folder = copy.deepcopy(self._of_folder)
        for evaluator in sum(copied._of_folder.values(), []) if only_answered else ():
            evaluator.only_answered = True
        return copied

    def __bool__(self) -> bool:
        return any(self._of_folder.values())

    def add(self, set_name: str, answers: Answers, *, samples: Answers | None = None) -> None:
        """Adds the answers that this rank computed for one batch.

        set_name: Name of the test set.
        answers: The selected answer to each puzzle.
        samples: All answers to each puzzle, if the model answered each puzzle several times. Evaluators with
        `samples_vote` get `samples` instead of `answers`. Example: an ARC task counts as solved if its most
        frequent answers contain the right one.
        """
        folder, name_in_folder, first_identifier = self._data.origin(set_name)
        for evaluator in self._of_folder[folder]:
            chosen = samples if samples is not None and evaluator.samples_vote else answers
            numbered = chosen._replace(puzzle_identifiers=chosen.puzzle_identifiers - first_identifier)
            evaluator.add(name_in_folder, numbered)

    def needs_all_samples(self, set_name: str) -> bool:
        return any(each.samples_vote for each in self._of_folder[self._data.origin(set_name).folder])

    def rules_of(self, set_name: str) -> Rules | None:
        """Returns a function that checks answers by the rules of the puzzle, such as Sudoku.

        The function takes `inputs` and `preds`, tokens [n, seq_len]. It returns whether each answer is valid,
        bool [n]. If no evaluator of the test set checks answers by rules, `rules_of` returns None.
        """
        evaluators = self._of_folder[self._data.origin(set_name).folder]
        nothing = np.zeros((0, self._data.metadata.seq_len), np.int32)
        found = (each.are_valid for each in evaluators if each.are_valid(nothing, nothing) is not None)
        return next(found, None)

    def check(self, settings: Settings | None) -> None:
        """Raises ValueError if an evaluator cannot do what the settings ask for.

        Example: select=rules, but the puzzles of a test set have no rules. settings: If None, does nothing.
        """
        for name in self._data.splits["test"].sets if settings is not None else ():
            if settings.retry_samples is not None and self.needs_all_samples(name):
                raise ValueError(
                    f"retry_samples={settings.retry_samples}: an evaluator of set {name!r} needs the same "
                    "number of samples of every puzzle. Remove retry_samples, or set evaluators=[]."
                )
            if "rules" in settings.selects and self.rules_of(name) is None:
                raise ValueError(
                    f"select=rules: no evaluator can check the answers of set {name!r}. Add one with "
                    "rules, such as evaluators=[sudoku], or choose another select."
                )

    def gather_metrics(self, ranks: Ranks | None = None) -> dict[str, dict[str, float]]:
        """Computes the metrics of all evaluators from the answers on all ranks. All ranks call it.

        Returns {test set: {metric: value}} on the first rank of `ranks`, for example {"all":
        {"sudoku/valid_accuracy": 0.9}}. Returns {} on the other ranks. If the computation of the metrics
        fails, all ranks exit.

        ranks: Group of ranks that divided the puzzles among themselves. If None, all ranks.
        """
        metrics: dict[str, dict[str, float]] = {}
        for folder, evaluators in self._of_folder.items():
            for evaluator in evaluators:
                partials = gather_objects(evaluator.partial(), ranks)
                with collective_errors():
                    if partials is not None:
                        for name_in_folder, values in evaluator.metrics(partials).items():
                            set_name = self._data.test_set(folder, name_in_folder)
                            metrics.setdefault(set_name, {}).update(values)
        return metrics

    def write(self, folder: Path) -> None:
        """Writes the files of the evaluators into a folder, such as the ARC submission.

        Call it on rank 0 after `gather_metrics`. If the dataset consists of several folders, the files of
        each dataset folder are in a subfolder with its name. A symbolic link has the name of its target.
        """
        for data_folder, evaluators in self._of_folder.items():
            for evaluator in evaluators:
                name = data_folder.resolve().name if len(self._of_folder) > 1 else ""
                evaluator.write(folder / name)
