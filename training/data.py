"""The data of a run, from its config: datasets, and which examples make which step."""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from config.reading import read_bytes
from config.schema import PretrainConfig, StageConfig
from dataset.description import DatasetInfo, read_info, with_candidates
from dataset.format import MANIFEST, Dataset, load_metadata
from dataset.loader import Batch, PuzzleDataset, read_batches
from dataset.mixture import check_same_tokens, fingerprint_of, open_datasets
from dataset.plan import Stage, TrainPlan, held_out_groups
from evaluation.evaluators import Evaluators
from parallel import log
from parallel.collectives import Ranks, broadcast_object
from parallel.errors import collective_errors
from parallel.launch import check_same_data
from parallel.process_group import is_main, local_rank
from training.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, the same on all ranks.

    plan: the examples of every step. schedule: what is due after which. validation: for each training set the
    puzzles that are held out, int64 [n], the first of each group, which is the unaugmented one; empty without
    `validation_fraction`. fingerprint: of the datasets' content. tests: other test puzzles, by the name of
    their folder. evaluators: of `dataset` and of the tests, to be taken `anew`. manifests: of all folders, as
    text, which another follows where they are built anew; what was opened stays as it was.
    """

    dataset: Dataset
    plan: TrainPlan
    schedule: Schedule
    validation: dict[str, np.ndarray]
    fingerprint: str
    tests: dict[str, Dataset]
    evaluators: list[Evaluators]
    manifests: dict[Path, bytes]

    def warn_if_built_anew(self) -> None:
        """Warns on rank 0 where a folder is no longer what this start has opened."""
        if is_main() and _read_manifests(self.manifests) != self.manifests:
            names = ", ".join(map(str, self.manifests))
            log.warning(f"{names}: built anew since the run began, which goes on with what it has opened")

    def info(self) -> DatasetInfo:
        """Describes all folders together, as a checkpoint keeps it."""
        return read_info(self.dataset.folders, self.dataset.metadata)

    def info_of(self, folder: Path) -> DatasetInfo:
        """Describes one folder."""
        return read_info([folder], load_metadata(folder, "test"))

    def read_train_batches(
        self, *, first_step: int, ranks: Ranks, device: torch.device
    ) -> AbstractContextManager[Iterator[tuple[str, Batch]]]:
        """Reads this rank's share of every batch after `first_step`, with its set, ahead of the steps."""
        share = {"rank": ranks.index, "world_size": ranks.size}
        dataset = PuzzleDataset(self.dataset, "train", self.plan, first_step=first_step, **share)
        return read_batches(dataset, device=device)


def open_data(config: PretrainConfig) -> RunData:
    """Opens and checks the data; rank 0 reads every token. All ranks call it; where one fails, all end.

    The first rank of each node takes a fingerprint, so that all nodes have the same data: from the builder's
    manifest where that has one.
    """
    fingerprint = ""
    with collective_errors():
        folders = [Path(path) for path in config.data_paths]
        manifests = _read_manifests([*folders, *map(Path, config.test_data_path or [])])
        dataset = open_datasets(folders, read_everything=is_main())
        if config.arch.finds_candidates:
            dataset = with_candidates(dataset)
        held_out = hold_out(config, dataset)
        plan = build_plan(config, dataset, held_out)
        tests = open_tests(config, dataset)
        votes = {"arc": {"extra_votes": [Path(each) for each in config.arc_votes]}}
        evaluators = [Evaluators(config.evaluators, dataset, options=votes)]
        evaluators += [Evaluators(config.evaluators, each) for each in tests.values()]
        if local_rank() == 0:
            fingerprint = fingerprint_of(dataset.folders)
        if _read_manifests(manifests) != manifests:
            raise ValueError(f"{', '.join(map(str, manifests))}: built anew at this moment; start again")
    check_same_data(fingerprint, names=config.data_paths)
    sets = dataset.splits["train"].sets
    validation = {name: sets[name].group_indices[:-1][groups] for name, groups in held_out.items()}
    return RunData(
        dataset=dataset,
        plan=plan,
        schedule=Schedule(config, plan),
        validation=validation,
        fingerprint=broadcast_object(fingerprint),
        tests=tests,
        evaluators=evaluators,
        manifests=manifests,
    )


def open_tests(config: PretrainConfig, trained: Dataset) -> dict[str, Dataset]:
    """Opens the folders of `test_data_path`. ValueError where the model of the run cannot read one."""
    tests = {}
    for path in map(Path, config.test_data_path or []):
        data, name = open_datasets([path], splits=("test",), read_everything=is_main()), path.resolve().name
        check_same_tokens(trained, data)
        needed, rows = (each.metadata.num_puzzle_identifiers for each in (data, trained))
        if config.arch.has_puzzle_embeddings and needed > rows:
            raise ValueError(f"test_data_path: {path} has puzzles without a trained embedding: leave it out")
        if tests.setdefault(name, data) is not data:
            raise ValueError(f"test_data_path: two folders have the name {name}: rename one")
    return tests


def _read_manifests(folders: Iterable[Path]) -> dict[Path, bytes]:
    """Reads the manifest of each folder; empty where that has none, or none that can be read."""
    found = {}
    for folder in folders:
        try:
            found[folder] = read_bytes(folder / MANIFEST)
        except ValueError:
            found[folder] = b""
    return found


def hold_out(config: PretrainConfig, data: Dataset) -> dict[str, np.ndarray]:
    """Chooses the groups of each training set, bool [num_groups], that `validation_fraction` holds out.

    ValueError where there are none, or where they have puzzle embeddings of their own: these would stay
    untrained, so that the answers said nothing.
    """
    if not config.validation_fraction:
        return {}
    chosen = {}
    for name, each in data.splits["train"].sets.items():
        groups = held_out_groups(each, seed=config.seed, fraction=config.validation_fraction)
        is_held_out = groups.repeat(np.diff(each.group_indices))
        held_out, trained = (each.puzzle_identifiers[side] for side in (is_held_out, ~is_held_out))
        if config.arch.has_puzzle_embeddings and not np.isin(held_out, trained).all():
            raise ValueError(
                f"validation_fraction: puzzles of the set {name!r} have embeddings of their own, which would "
                "not be trained where they are held out: leave it out, and the test split selects the best"
            )
        chosen[name] = groups
    if not any(groups.any() for groups in chosen.values()):
        total = sum(map(len, chosen.values()))
        raise ValueError(
            f"validation_fraction {config.validation_fraction} of {total} training puzzles is none: raise it"
        )
    return chosen


def build_plan(
    config: PretrainConfig, data: Dataset, held_out: dict[str, np.ndarray] | None = None
) -> TrainPlan:
    """Plans the examples of every step: of the curriculum's stages, then of the main training.

    data: the folders of `config.data_paths`. held_out: of each set, groups that are not trained on.
    ValueError where a stage is too short for one batch.
    """
    number = {path: position for position, path in enumerate(config.data_paths)}
    before = [stage for stage in config.curriculum if stage.share is None]
    stages = [
        Stage(
            folders=tuple(number[path] for path in each.data_path or config.data_path),
            epochs=each.epochs,
            eval_interval=each.eval_interval or each.epochs,
            cycles=each.cycles,
        )
        for each in [*before, StageConfig(epochs=config.epochs, eval_interval=config.eval_interval)]
    ]
    parts = [
        (each.share, dataclasses.replace(stages[-1], cycles=each.cycles))
        for each in config.curriculum[len(before) :]
    ]
    return TrainPlan(
        data.splits["train"].sets,
        stages,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        parts=parts,
        held_out=held_out,
        train_steps=config.train_steps,
        eval_steps=config.eval_steps,
    )
