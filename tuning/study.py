"""Stores all trials of a search with Optuna in SQLite, so that an interrupted search can continue."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from config.files import format_of
from config.programs import SearchConfig
from config.schema import PretrainConfig
from training.best import Selection
from training.run_config import FORMAT_KEY, describe_changes, find_format, with_format
from training.run_folder import lock_folder
from tuning.space import Space

_CONFIG, _SEARCH = "config", "search"
_OF_LENGTH = {"epochs", "eval_interval", "train_steps", "eval_steps", "max_steps", "curriculum"}


class Study:
    """All trials of a hyper-parameter search. Optuna stores them in a SQLite file.

    A trial is one combination of hyper-parameters, with its evaluations. Raises ValueError if the file cannot
    be read, or if the stored search of this name has other settings.

    run: Config of one possible training of the search, from `Space.check`. Its other keys are compared with
    those of the stored search.
    """

    def __init__(self, path: Path, config: SearchConfig, space: Space, run: PretrainConfig):
        self.name, self.space, self._config, self._run = config.study, space, config, run
        # Number of evaluations of a complete trial, over all its seeds. None: unknown, or different for each.
        count = None if _OF_LENGTH & space.parameters.keys() else _count_evaluations(run)
        self.num_evaluations = None if count is None else config.seeds * count
        self.selection = Selection(run.keep_best, has_validation=run.validation_fraction > 0)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with _readable(path):
            if path.exists() and not path.is_file():
                raise OSError("it is not a regular file")
            path.parent.mkdir(parents=True, exist_ok=True)
            storage = RDBStorage(f"sqlite:///{path.resolve()}")
            self.optuna = optuna.create_study(
                storage=storage,
                study_name=config.study,
                direction="minimize" if self.selection.lowest_is_best else "maximize",
                pruner=self._pruner(),
                load_if_exists=True,
            )
            self.optuna.get_trials()
            known = self.optuna.user_attrs
        self._storage = storage
        self._judged: set[int] = set()  # numbers of the trials that `report` has judged in this process
        self._forward_dtype = self._claim(path, run, known)
        self.num_trials, self._missing = config.trials, []  # combinations of the grid that have no trial yet
        if config.sampler == "grid":
            tried = [_values(trial) for trial in self.trials if trial.state != TrialState.FAIL]
            self._missing = [values for values in space.combinations() if values not in tried]
            self.num_trials = len(self.trials) + len(self._missing)
        is_open = run.arch.forward_dtype == "auto" and FORMAT_KEY not in space.parameters
        self._format_words = [f"{FORMAT_KEY}={self._forward_dtype}"] if is_open else []

    def _claim(self, path: Path, run: PretrainConfig, known: dict[str, Any]) -> str:
        now: dict[str, Any] = {
            "metric": self.selection.metric,
            "chosen by": self.selection.selected_by,
            "seeds": self._config.seeds,
            "sampler": self._config.sampler,
            "max_steps": run.max_steps,
            "folder": os.path.abspath(folder_of(self._config)),
            **self.space.describe(),
        }
        where = f"study {self._config.study} in {path}"
        if (self.trials and _CONFIG not in known) or not isinstance(known.get(_CONFIG, {}), dict):
            raise ValueError(f"{where} was not created by search.py. Choose another study.")
        before = known.get(_SEARCH, now)
        before = before if isinstance(before, dict) else {}
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        changes = ", ".join(f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys)
        if not changes and _CONFIG in known:
            changes = describe_changes(known[_CONFIG], run, also=_keys_of_other_data(known[_CONFIG], run))
        if changes:
            raise ValueError(f"{where} is another search ({changes}). Choose another study and folder.")
        if _CONFIG in known:  # the dtype with which the search started
            return format_of(known[_CONFIG])
        forward_dtype = find_format(run).name
        self.optuna.set_user_attr(_SEARCH, now)
        self.optuna.set_user_attr(_CONFIG, with_format(run, forward_dtype).model_dump())
        return forward_dtype

    def overrides(self, values: dict[str, str]) -> list[str]:
        return [*self.space.overrides(values), *self._format_words]

    @property
    def trials(self) -> list[FrozenTrial]:
        return self.optuna.get_trials(deepcopy=False)

    def count(self, *states: TrialState) -> int:
        return sum(trial.state in states for trial in self.trials)

    def unfinished(self) -> list[int]:
        return [trial.number for trial in self.trials if not trial.state.is_finished()]

    def num_ended(self) -> int:
        return len(self.trials) - len(self.unfinished())

    def num_left(self) -> int:
        return max(self.num_trials - len(self.trials), 0)

    def begin(self, number: int | None = None) -> tuple[Trial, dict[str, str]]:
        """Starts a new trial, or continues the unfinished trial `number`.

        Returns (Optuna's trial, {hyper-parameter: its value as text for a command line}).
        """
        trial_number = len(self.trials) if number is None else number
        seed = int(np.random.SeedSequence([self._config.sampler_seed, trial_number]).generate_state(1)[0])
        self.optuna.sampler = optuna.samplers.TPESampler(
            n_startup_trials=self._config.startup_trials, seed=seed
        )
        if self._missing and number is None:
            self.optuna.enqueue_trial(self._missing.pop(0))
        if number is None or self.trials[number].state == TrialState.WAITING:  # killed before `ask`
            trial = self.optuna.ask()
        else:
            study_id = self._storage.get_study_id_from_name(self._config.study)
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
            trial = Trial(self.optuna, trial_id)
        self.space.draw(trial)
        return trial, self.parameters(self.trials[trial.number])

    def report(self, trial: Trial, values: list[float]) -> bool:
        """Stores new evaluations of a trial. Returns whether to stop it early.

        Optuna decides this by a comparison with the evaluations of other trials.

        values: Values of the metric at all evaluations of the trial so far, in order. Those that are already
        stored are skipped.
        """
        known = self.trials[trial.number].intermediate_values
        new = [number for number in range(1, len(values) + 1) if number not in known]
        for number in new:
            trial.report(values[number - 1], number)
        # The search may have been killed before it could prune a trial, so each process decides again.
        is_new = bool(new) or trial.number not in self._judged
        if not (values and is_new):
            return False
        self._judged.add(trial.number)
        is_last = self.num_evaluations is not None and len(values) >= self.num_evaluations
        return not is_last and trial.should_prune()

    def best(self) -> FrozenTrial | None:
        """Returns the complete trial with the best score, the earliest of equal ones. None if there is none.

        The score is the metric of the search, as a mean over seeds (`tuning.trial.Trial.score`).
        """
        choose = min if self.selection.lowest_is_best else max
        return choose(self._complete(), key=lambda trial: trial.value, default=None)

    def _complete(self) -> list[FrozenTrial]:
        return [trial for trial in self.trials if trial.state == TrialState.COMPLETE]

    def describe_counts(self) -> str:
        """Returns a text such as "7 complete, 3 pruned, 1 failed"."""
        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        return ", ".join(f"{self.count(state)} {name}" for name, state in states.items())

    def describe_best(self) -> str:
        """Returns a comment about the best trial, for the start of best.yaml."""
        config, selection, best = self._config, self.selection, self.best()
        finished = self.count(TrialState.COMPLETE, TrialState.PRUNED)
        seeds = f", mean of {config.seeds} seeds" if config.seeds > 1 else ""
        caution = "" if selection.selected_by == "validation" else " that selected it (optimistic)"
        options = "".join(f"{argument} " for argument in self.space.fixed if argument.startswith("--"))
        return (
            f"The best of {finished} trials of a search (trial {best.number} of the study {config.study}).\n"
            f"Command:   {config.launch or 'python'} pretrain.py {options}experiment={config.study}\n"
            f"Measured:  {selection.metric} {best.value:.4g} on the {selection.selected_by} "
            f"puzzles{caution}{seeds}, in {self._forward_dtype}{self._of_final_training()}"
        )

    def _of_final_training(self) -> str:
        # Keys that suit the trials, and that best.yaml keeps.
        lines = []
        if (fraction := self._run.validation_fraction) > 0:
            lines.append(f"validation_fraction={fraction:g} holds puzzles out. To train on all, set it to 0.")
        if not self._run.checkpoint_every_eval:
            lines.append("checkpoint_every_eval=false may lose the best checkpoint. To keep it, set true.")
        return "".join(f"\nFinal run: {line}" for line in lines)

    def find_complete(self, values: dict[str, str]) -> FrozenTrial | None:
        return next((trial for trial in self._complete() if self.parameters(trial) == values), None)

    def parameters(self, trial: FrozenTrial) -> dict[str, str]:
        """Returns the hyper-parameters of a trial as {name: value as text for a command line}.

        If even one hyper-parameter of the search has no value yet, returns {}. Raises ValueError if a value
        is not in the search space.
        """
        try:
            return self.space.written(trial.params)
        except ValueError as error:
            raise ValueError(
                f"trial {trial.number} of study {self.name}: {error}. Choose another study."
            ) from None

    def _pruner(self) -> optuna.pruners.BasePruner:
        if self._config.sampler == "grid":
            return optuna.pruners.NopPruner()
        if self._config.pruner == "median":
            return optuna.pruners.MedianPruner(n_startup_trials=self._config.startup_trials)
        if self._config.pruner == "hyperband":
            # auto: the number of evaluations of the trials that are complete
            return optuna.pruners.HyperbandPruner(max_resource=self.num_evaluations or "auto")
        return optuna.pruners.NopPruner()


def _values(trial: FrozenTrial) -> dict[str, Any]:
    # If the search was killed, a trial of a grid may not have drawn all values yet.
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _keys_of_other_data(before: dict[str, Any], now: PretrainConfig) -> list[str]:
    # The scores of trials on different data must not be compared. A folder that no longer exists was moved.
    keys = []
    for key in ("data_path", "test_data_path"):
        values = (before.get(key), getattr(now, key))
        old, new = ([os.path.realpath(str(path)) for path in paths or ()] for paths in values)
        if old != new and (not old or any(map(os.path.exists, old))):
            keys.append(key)
    return keys


def _count_evaluations(run: PretrainConfig) -> int | None:
    if run.max_steps and (run.train_steps is None or any(stage.epochs for stage in run.curriculum)):
        return None  # the dataset decides how many steps an epoch has
    stages = [(stage.epochs, stage.eval_interval) for stage in run.curriculum if stage.epochs]
    steps = min(run.train_steps or 0, run.max_steps or math.inf), run.eval_steps
    stages.append(steps if run.train_steps else (run.epochs, run.eval_interval))
    return sum(-(-length // (interval or length)) for length, interval in stages)


def folder_of(config: SearchConfig) -> Path:
    return Path(config.folder) if config.folder else Path("search") / config.study


def open_folder(config: SearchConfig) -> Path:
    """Creates the folder of a search if needed, locks it, and returns its path.

    The folder stays locked until this process ends. Raises ValueError if the folder cannot be created, or if
    another process has locked it.
    """
    folder = folder_of(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder, other="folder")
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}). Choose another folder.") from None
    return folder


def storage_of(config: SearchConfig) -> Path:
    if config.storage and "://" in config.storage:
        raise ValueError(f"config: storage={config.storage} is a URL. Set the path of a SQLite file.")
    return Path(config.storage) if config.storage else folder_of(config) / "study.db"


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Optuna raises many types of errors for a file that it did not write
        reason = (str(getattr(error, "orig", None) or error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not a storage of studies ({reason}). Choose another storage.") from None
