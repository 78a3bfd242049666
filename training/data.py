"""The data of a run: opens the datasets of the config, and plans the examples of every training step."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from checkpointing.files import STATE_FILE, checkpoints_in, follow_step_link, read_state
from config.schema import PretrainConfig, StageConfig
from dataset.description import DatasetInfo, read_info, with_candidates
from dataset.equal import Trained, hash_training, join_repeats, trained_in_folders
from dataset.files import MANIFEST, load_metadata
from dataset.loader import Batch, PuzzleDataset, read_batches
from dataset.metadata import Dataset
from dataset.mixture import check_same_tokens, check_set_names, fingerprint_of, open_datasets
from dataset.plan import Stage, TrainPlan, held_out_groups
from distributed import log
from distributed.collectives import Ranks, broadcast_object
from distributed.errors import collective_errors
from distributed.launch import check_same_files
from distributed.world import is_main, local_rank
from evaluation.evaluators import Evaluators
from evaluation.known import check_same_rows, has_rows_to_match
from evaluation.leaks import Leaks
from runtime.reading import read_bytes
from training.schedule import Schedule

_FEW_PUZZLES = 30  # with fewer held-out puzzles there is a warning


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run. All attributes except `hashes` are equal on all ranks.

    Attributes:
        dataset: All training folders as one dataset.
        plan: Which examples each training step uses.
        schedule: After which steps an evaluation, a checkpoint or a log row is due.
        validation: {training set: indices of the held-out originals, integers [n]}. Their variants are also
            held out, but not evaluated. {} without `validation_fraction`.
        joins_repeats: Whether equal puzzles are held out together. False if an earlier version of this code
            started the run.
        fingerprint: Hash of the content of all training folders.
        test_fingerprint: Hash of the content of the test splits in these folders.
        infos: {training folder: its description}, such as the kind of puzzle.
        tests: {folder name: dataset} of `test_data_path`.
        evaluators: Evaluators of `dataset`, then of each of `tests`. Call `fresh_copy` for each evaluation.
        manifests: {data folder: content of its manifest file} at the start, to detect a rebuild.
        hashes: {index of a training folder: hashes of the examples that are trained on}. {} except on rank 0.
        leaks: `leaks.found` contains, for each evaluated set, such as "eval/all", the puzzles that are also
            trained on. At first, only the training puzzles of this run are known. pretrain.py later adds
            those of the checkpoint that the run starts from.
    """

    dataset: Dataset
    plan: TrainPlan
    schedule: Schedule
    validation: dict[str, np.ndarray]
    joins_repeats: bool
    fingerprint: str
    test_fingerprint: str
    infos: dict[Path, DatasetInfo]
    tests: dict[str, Dataset]
    evaluators: list[Evaluators]
    manifests: dict[Path, bytes]
    hashes: dict[int, np.ndarray]
    leaks: Leaks

    def trained_on(self, step: int) -> Trained:
        """Returns hashes of all examples that training may have used in its first `step` steps.

        The examples are those of all dataset folders in use up to this step, without held-out puzzles. Only
        rank 0 may call it.
        """
        begun = {folder for stage, steps in self.plan.num_steps(step) if steps for folder in stage.folders}
        return Trained.of([self.hashes[folder] for folder in sorted(begun & self.hashes.keys())])

    def warn_if_rebuilt(self) -> None:
        """Warns on rank 0 if a dataset folder was rebuilt since this process opened it."""
        if is_main() and _read_manifests(self.manifests) != self.manifests:
            names = ", ".join(map(str, self.manifests))
            log.warning(
                f"dataset was rebuilt during the run: {names}. The run keeps using the files it opened at "
                "the start."
            )

    def info(self) -> DatasetInfo:
        """Returns a common description of all training datasets, with their kind of puzzle."""
        return read_info(self.dataset.folders, self.dataset.metadata)

    def read_train_batches(
        self, *, first_step: int, ranks: Ranks, device: torch.device, num_answers: int = 1, seed: int = 0
    ) -> AbstractContextManager[Iterator[tuple[str, Batch]]]:
        """Returns a context manager that yields an iterator of (name of the training set, batch).

        Each batch is this rank's part of one training step. A thread reads batches ahead.

        first_step: Number of training steps already done. With 0, the first batch is that of step 1.
        ranks: Process group that divides the global batch.
        device: If it is a CUDA device, the batches are in pinned memory, but not on the device.
        num_answers: If greater than 1, a batch also has up to this number of right answers of each example.
            Otherwise it has one right answer of each example, the label.
        seed: If an example has more than `num_answers` right answers, the seed selects some of them.
        """
        dataset = PuzzleDataset(
            self.dataset,
            "train",
            self.plan,
            rank=ranks.index,
            world_size=ranks.size,
            first_step=first_step,
            num_answers=num_answers,
            seed=seed,
        )
        return read_batches(dataset, device=device)


def open_data(config: PretrainConfig) -> RunData:
    """Opens and checks the datasets of a run. All ranks call it. An error on one rank ends all ranks.

    Rank 0 checks every token. If the machines of the run have different data, all ranks end with a message.
    """
    fingerprint = test_fingerprint = compared = ""
    trained, leaks, held_out = {}, Leaks(config.leaks), None
    with collective_errors():
        folders = [Path(path) for path in config.data_paths]
        manifests = _read_manifests([*folders, *map(Path, config.test_data_path or [])])
        dataset = open_datasets(folders, read_everything=is_main())
        if config.arch.finds_candidates:
            dataset = with_candidates(dataset)
        if is_main():
            hashes = hash_training(dataset)
            held_out = hold_out(config, dataset, hashes)
    held_out, joins_repeats = broadcast_object(held_out)
    with collective_errors():
        plan = build_plan(config, dataset, held_out)
        tests = open_tests(config, dataset)
        infos = {folder: read_info([folder], load_metadata(folder, "test")) for folder in folders}
        evaluators = [Evaluators(config.evaluators, opened) for opened in (dataset, *tests.values())]
        if is_main():
            _add_evaluated(leaks, dataset, tests, held_out, hashes)
            trained = trained_in_folders(dataset, hashes, held_out)
        if local_rank() == 0:
            fingerprint = fingerprint_of(dataset.folders)
            test_fingerprint = fingerprint_of(dataset.folders, ("test",))
            # The metadata and the evaluators depend on the manifests, but a fingerprint does not.
            others = [fingerprint_of(opened.folders, ("test",)) for opened in tests.values()]
            kinds = [each.kinds for each in evaluators]
            compared = repr((fingerprint, others, dataset.metadata, kinds))
        if _read_manifests(manifests) != manifests:
            names = ", ".join(map(str, manifests))
            raise ValueError(
                f"dataset was rebuilt while it was being opened: {names}. Run the command again."
            )
    check_same_files(compared, what="data", names=[*config.data_paths, *(config.test_data_path or [])])
    leaks.broadcast_find(Trained.of([*trained.values()]), model="this run")
    sets = dataset.splits["train"].sets
    validation = {name: sets[name].group_indices[:-1][groups] for name, groups in held_out.items()}
    return RunData(
        dataset=dataset,
        plan=plan,
        schedule=Schedule(config, plan),
        validation=validation,
        joins_repeats=joins_repeats,
        fingerprint=broadcast_object(fingerprint),
        test_fingerprint=broadcast_object(test_fingerprint),
        infos=infos,
        tests=tests,
        evaluators=evaluators,
        manifests=manifests,
        hashes=trained,
        leaks=leaks,
    )


def _add_evaluated(
    leaks: Leaks,
    dataset: Dataset,
    tests: Mapping[str, Dataset],
    held_out: Mapping[str, np.ndarray],
    hashes: Mapping[str, np.ndarray],
) -> None:
    for prefix, data in (("eval/", dataset), *((f"test/{folder}.", data) for folder, data in tests.items())):
        for name, test_set in data.splits["test"].sets.items():
            leaks.add(f"{prefix}{name}", test_set, "test", data.folders)
    for name, groups in held_out.items():
        training_set, chosen = dataset.splits["train"].sets[name], {"hashes": hashes[name], "groups": groups}
        leaks.add(f"validation/{name}", training_set, "train", dataset.folders, **chosen)


def open_tests(config: PretrainConfig, trained: Dataset) -> dict[str, Dataset]:
    """Opens the datasets of the config key `test_data_path`. Returns {folder name: dataset}.

    Raises ValueError if two folders or two test sets have the same name, or if the model cannot read a
    dataset. The dataset must have the tokens and sizes of `trained`. With puzzle embeddings, each test puzzle
    must be in `trained`, with the same puzzle identifier. If the puzzles have no names, only the number of
    identifiers is checked.

    trained: Dataset that the model trains on.
    """
    tests = {}
    for path in map(Path, config.test_data_path or []):
        data, name = open_datasets([path], splits=("test",), read_everything=is_main()), path.resolve().name
        check_same_tokens(trained, data)
        needed, rows = (opened.metadata.num_puzzle_identifiers for opened in (data, trained))
        if config.arch.has_puzzle_embeddings and needed > rows:
            raise ValueError(f"test_data_path: {path} has puzzles without a trained embedding. Remove it.")
        if has_rows_to_match(config.arch, data) and is_main():
            check_same_rows(trained, data)
        if tests.setdefault(name, data) is not data:
            raise ValueError(f"test_data_path: two folders have the name {name}. Rename one.")
    check_set_names(tests)
    return tests


def _read_manifests(folders: Iterable[Path]) -> dict[Path, bytes]:
    # A file that cannot be read has the content b"".
    found = {}
    for folder in folders:
        try:
            found[folder] = read_bytes(folder / MANIFEST)
        except ValueError:
            found[folder] = b""
    return found


def hold_out(
    config: PretrainConfig, data: Dataset, hashes: Mapping[str, np.ndarray] | None = None
) -> tuple[dict[str, np.ndarray], bool]:
    """Selects the training puzzles that are held out for validation.

    Returns ({training set: mask of the held-out groups, bool [num_groups]}, whether equal puzzles are held
    out together). A group is a puzzle with all its variants. Without the config key `validation_fraction`,
    the dict is {}.

    Equal puzzles are held out together, so that no held-out puzzle is trained on. If an earlier version of
    this code started the run, the run keeps the masks of that version. That version did not compare puzzles,
    so the second value is False.

    Raises ValueError if no puzzle is selected, or if some puzzle embeddings would not be trained.

    hashes: {training set: hashes of its examples}. If None, they are computed.
    """
    if not config.validation_fraction:
        return {}, True
    sets, options = data.splits["train"].sets, {"seed": config.seed, "fraction": config.validation_fraction}
    chosen = {name: held_out_groups(training_set, **options) for name, training_set in sets.items()}
    joined = join_repeats(data, hash_training(data) if hashes is None else hashes, chosen)
    if joins_repeats := _joins_repeats(config):
        chosen = joined
    elif num_other := sum(int((joined[name] != chosen[name]).sum()) for name in sets):
        log.warning(
            "validation_fraction: some held-out puzzles are equal to training puzzles, because an earlier "
            f"version started this run ({num_other} puzzles would now be split differently). The run keeps "
            "its split, so its validation accuracy is too high. Start a new run to avoid this."
        )
    for name, groups in chosen.items():
        training_set = sets[name]
        is_held_out = groups.repeat(np.diff(training_set.group_indices))
        held_out, trained = (training_set.puzzle_identifiers[side] for side in (is_held_out, ~is_held_out))
        if config.arch.has_puzzle_embeddings and not np.isin(held_out, trained).all():
            raise ValueError(
                f"validation_fraction: puzzles of set {name!r} have their own embeddings, and the embeddings "
                "of held-out puzzles would not be trained. Remove validation_fraction. The test split then "
                "selects the best checkpoint."
            )
    if not any(groups.any() for groups in chosen.values()):
        total = sum(map(len, chosen.values()))
        raise ValueError(
            f"validation_fraction={config.validation_fraction} selects none of {total} training puzzles. "
            "Increase it."
        )
    num_puzzles = sum(int(groups.sum()) for groups in chosen.values())
    if num_puzzles < _FEW_PUZZLES and is_main():
        log.warning(
            f"validation_fraction={config.validation_fraction} holds out only {num_puzzles} puzzles. The "
            "choice of the best checkpoint is mostly chance."
        )
    return chosen, joins_repeats


def _joins_repeats(config: PretrainConfig) -> bool:
    # The value is True for a new run. A run that continues has the value in the checkpoint's state.json.
    for location in filter(None, (config.checkpoint_path, config.resume)):
        folder = follow_step_link(Path(location))
        for path in [*reversed(checkpoints_in(folder)), folder]:
            with contextlib.suppress(ValueError):  # a damaged checkpoint: `resume` takes an earlier one
                if (path / STATE_FILE).exists():
                    return read_state(path).get("joins_repeats") is True
    return True


def build_plan(
    config: PretrainConfig, data: Dataset, held_out: dict[str, np.ndarray] | None = None
) -> TrainPlan:
    """Plans which examples each training step uses.

    Raises ValueError if the puzzles between two evaluations do not fill one batch, or if all puzzles of a
    stage of the curriculum are held out.

    data: Dataset of all `config.data_paths`. held_out: {training set: mask of the groups that must not be
    trained on, bool [num_groups]}. A group is a puzzle with its variants. If None, all are trained on.
    """
    folder_index = {path: position for position, path in enumerate(config.data_paths)}
    before = [stage for stage in config.curriculum if stage.share is None]
    stages = [
        Stage(
            folders=tuple(folder_index[path] for path in stage.data_path or config.data_path),
            epochs=stage.epochs,
            eval_interval=stage.eval_interval or stage.epochs,
            cycles=stage.cycles,
        )
        for stage in [*before, StageConfig(epochs=config.epochs, eval_interval=config.eval_interval)]
    ]
    parts = [
        (stage.share, dataclasses.replace(stages[-1], cycles=stage.cycles))
        for stage in config.curriculum[len(before) :]
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
