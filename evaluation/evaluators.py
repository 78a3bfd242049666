"""The evaluators of an evaluation: on every rank, one for each requested kind and dataset folder."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.format import Dataset, Metadata, load_metadata, read_builder, splits_with_several_solutions
from dataset.kinds.kind import Answers, Evaluator, Rules, find_kind, kind_names
from distributed import log
from distributed.collectives import Ranks, gather_objects
from distributed.errors import collective_errors
from distributed.process_group import is_main


def build_evaluator(name: str, *, folder: Path, metadata: Metadata) -> Evaluator:
    """Builds the evaluator of the kind `name` for the test split of the dataset in `folder`.

    Raises ValueError with one line if the kind does not exist, or if the dataset has another kind.
    """
    if name not in (kinds := kind_names()):
        raise ValueError(f"evaluators: {name!r} is not a kind of puzzle. Choose from {', '.join(kinds)}.")
    kind = find_kind(name)
    if mismatch := kind.mismatch_of(metadata):
        raise ValueError(
            f"{folder} is not a dataset of kind {name}: its {mismatch}. Choose the evaluator of its puzzles."
        )
    return kind.build_evaluator(folder, metadata)


class Evaluators:
    """The evaluators of all test sets. Every rank builds its evaluators, and adds the answers of its slots.

    names: Kinds of puzzles. If None, the kinds of the folders in which the builder found test puzzles with
    several solutions: there, an answer may be valid and differ from the label. Raises ValueError if one of
    them fits no folder. Other ranks may not raise it, so call it in a block of `collective_errors`.
    """

    def __init__(self, names: Sequence[str] | None, data: Dataset):
        self._data = data
        self._of_folder: dict[Path, list[Evaluator]] = {folder: [] for folder in data.folders}
        several = [folder for folder in data.folders if "test" in splits_with_several_solutions(folder)]
        kinds = dict.fromkeys(builder["name"] for folder in several if (builder := read_builder(folder)))
        for kind in kinds if names is not None and is_main() else ():
            if kind not in names:
                text = f"test puzzles of {several[0]} have several solutions, so valid answers count as wrong"
                log.info(f"{text}. Add {kind} to evaluators.")
        for name in kinds if names is None else names:
            failures = []
            for folder, evaluators in self._of_folder.items():
                try:
                    metadata = load_metadata(folder, "test")  # of this folder, not of the mixture
                    evaluators.append(build_evaluator(name, folder=folder, metadata=metadata))
                except ValueError as error:
                    failures.append(error)
            if len(failures) == len(self._of_folder):
                raise failures[0]

    def anew(self, *, only_answered: bool = False) -> "Evaluators":
        """Returns empty evaluators of the same folders, for another evaluation. Call it before `add`.

        only_answered: Whether only examples that are added count. If False, each evaluator decides.
        """
        new = copy.copy(self)
        new._of_folder = copy.deepcopy(self._of_folder)
        for each in sum(new._of_folder.values(), []) if only_answered else ():
            each.only_answered = True
        return new

    def __bool__(self) -> bool:
        return any(self._of_folder.values())

    def add(self, set_name: str, answers: Answers, *, samples: Answers | None = None) -> None:
        """Adds this rank's answers to one batch. Does not communicate.

        samples: If a puzzle has several samples, the answers of all samples, for evaluators that count votes.
        """
        folder, own_name, first_identifier = self._data.origin(set_name)
        for evaluator in self._of_folder[folder]:
            chosen = samples if samples is not None and evaluator.samples_vote else answers
            own = chosen._replace(puzzle_identifiers=chosen.puzzle_identifiers - first_identifier)
            evaluator.add(own_name, own)

    def rules_of(self, set_name: str) -> Rules | None:
        """Returns the rules of a set's puzzles. Returns None if no evaluator has rules.

        Rules are a function that maps inputs and preds, tokens [n, seq_len], to whether the answers are
        valid, bool [n].
        """
        evaluators = self._of_folder[self._data.origin(set_name).folder]
        nothing = np.zeros((0, self._data.metadata.seq_len), np.int32)
        return next(
            (each.are_valid for each in evaluators if each.are_valid(nothing, nothing) is not None), None
        )

    def check_rules(self, selects: Sequence[str]) -> None:
        """Raises ValueError if `selects` contains "rules", and a set has no rules."""
        for name in self._data.splits["test"].sets if "rules" in selects else ():
            if self.rules_of(name) is None:
                raise ValueError(
                    f"select=rules: no evaluator can check the answers of set {name!r}. Add one with "
                    "rules, such as evaluators=[sudoku], or choose another select."
                )

    def gather_metrics(self, ranks: Ranks | None = None) -> dict[str, dict[str, float]]:
        """Returns {set: {"<kind>/<metric>": value}} over all ranks on rank 0, {} on other ranks.

        All ranks call it. An error on one rank ends all ranks. ranks: Ranks that divide the puzzles among
        themselves. If None, all ranks.
        """
        metrics: dict[str, dict[str, float]] = {}
        for folder, evaluators in self._of_folder.items():
            for evaluator in evaluators:
                partials = gather_objects(evaluator.partial(), ranks)
                with collective_errors():
                    if partials is not None:
                        for own_name, values in evaluator.metrics(partials).items():
                            set_name = self._data.test_set(folder, own_name)
                            metrics.setdefault(set_name, {}).update(values)
        return metrics

    def write(self, folder: Path) -> None:
        """Writes the evaluators' files. Only rank 0 calls it, after `gather_metrics`.

        If there are several dataset folders, each has a subfolder of its name.
        """
        for data_folder, evaluators in self._of_folder.items():
            for evaluator in evaluators:
                evaluator.write(folder / data_folder.name if len(self._of_folder) > 1 else folder)
