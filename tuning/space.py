"""The space of a search: keys with several values on the command line, in Hydra's sweep grammar.

    lr=1e-4,1e-3                 arch.L_cycles=range(1,4)              one of a few values
    optimizer=choice(muon,adamw)
    lr=interval(1e-4,1e-2)       lr=tag(log,interval(1e-4,1e-2))       a number between two
    epochs=int(interval(10,40))  epochs=tag(log,int(interval(10,400))) a whole number

As everywhere in Hydra the end of a range, or of whole numbers, does not belong to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import yaml
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf
from optuna.trial import Trial

from config.compose import compose_overrides, parse_overrides, split_command_line
from config.files import FOLDER
from config.schema import PretrainConfig, SearchConfig

_GIVEN_BY_SEARCH = {
    "checkpoint_path": "trial n runs in <folder>/trial_<n>: give folder=PATH",
    "run_name": "a run has the name of its trial: give study=NAME",
    "resume": "trials go on from their own checkpoints: drop it",
}
_MAX_TRIES = 16  # combinations, to find one that has a given value and can be run


@dataclasses.dataclass(frozen=True)
class Choice:
    """A parameter that has one of a few values, each as it is written on a command line."""

    key: str
    values: tuple[str, ...]

    def draw(self, trial: Trial) -> str:
        return trial.suggest_categorical(self.key, self.values)

    @property
    def extremes(self) -> tuple[str, ...]:
        """The values with which every mistake in it shows."""
        return self.values

    def __str__(self) -> str:
        return f"choice({','.join(self.values)})"


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A parameter that has a number from `low` to `high`, both included; whole numbers if these are.

    step: the distance of two values; None: 1 for whole numbers, else any. is_log: drawn by their logarithm.
    """

    key: str
    low: float
    high: float
    step: float | None = None
    is_log: bool = False

    def draw(self, trial: Trial) -> str:
        options: dict[str, Any] = {} if self.step is None else {"step": self.step}
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return self._written(suggest(self.key, self.low, self.high, log=self.is_log, **options))

    @property
    def extremes(self) -> tuple[str, ...]:
        return self._written(self.low), self._written(self.high)

    def _written(self, value: float) -> str:
        return repr(value) if self.step is None else f"{value:.12g}"  # 0.3, not 0.1 + 0.1 + 0.1

    def __str__(self) -> str:
        step = "" if self.step is None else f" in steps of {self.step:g}"
        return f"{self.low:g} to {self.high:g}{step}{' (log)' if self.is_log else ''}"


@dataclasses.dataclass(frozen=True)
class Space:
    """The parameters that are searched, and the other overrides of pretrain.py, the same in every trial."""

    parameters: tuple[Choice | Numbers, ...]
    fixed: tuple[str, ...]

    def draw(self, trial: Trial) -> dict[str, str]:
        """Draws a value of every parameter; of a trial that has one already, returns that."""
        return {parameter.key: parameter.draw(trial) for parameter in self.parameters}

    def overrides(self, values: dict[str, str]) -> list[str]:
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items())]

    def describe(self) -> dict[str, str]:
        return {parameter.key: str(parameter) for parameter in self.parameters}

    def check(self) -> PretrainConfig:
        """Composes the config of a combination. ValueError for a value that no combination can have."""
        for number in range(max(len(parameter.extremes) for parameter in self.parameters)):
            values = {each.key: each.extremes[number % len(each.extremes)] for each in self.parameters}
            try:
                config = self.compose(values)
            except ValueError:  # these values, or only these together
                for parameter in self.parameters:
                    config = self._compose_with(parameter, values[parameter.key])
        return config

    def compose(self, values: dict[str, str]) -> PretrainConfig:
        return compose_overrides(PretrainConfig, self.overrides(values))

    def _compose_with(self, parameter: Choice | Numbers, value: str) -> PretrainConfig:
        mistake = None
        values = [(value,) if each is parameter else each.extremes for each in self.parameters]
        keys = [each.key for each in self.parameters]
        for combination in itertools.islice(itertools.product(*values), _MAX_TRIES):
            try:
                return self.compose(dict(zip(keys, combination, strict=True)))
            except ValueError as error:
                mistake = mistake or error
        raise mistake


def compose_search() -> tuple[SearchConfig, Space, PretrainConfig] | None:
    """Reads the command line: what is search.py's own, the space, and the config of one run of it.

    Returns None where help was asked for. ValueError, one line, for a mistake.
    """
    asked = split_command_line(SearchConfig)
    if asked is None:
        return None
    config, argv = asked
    space = read_space(argv)
    run = space.check()
    if run.keep_best is None:
        raise ValueError("config: keep_best=null leaves nothing to choose the best trial by: name a metric")
    if config.seeds > 1 and "seed" in space.describe():
        raise ValueError(f"config: seed has several values already: drop them, or seeds={config.seeds}")
    return config, space, run


def read_space(argv: Sequence[str]) -> Space:
    """Reads the overrides of a search. ValueError, one line, for a mistake, and where nothing is searched."""
    parameters, fixed = [], []
    overrides = parse_overrides(PretrainConfig, argv)
    for override, word in zip(overrides, argv, strict=True):
        key = override.get_key_element()
        if key in _GIVEN_BY_SEARCH:
            raise ValueError(f"config: {key} is search.py's own: {_GIVEN_BY_SEARCH[key]}")
        if override.is_sweep_override():
            if [each.get_key_element() for each in overrides].count(key) > 1:
                raise ValueError(f"config: {key} has several values, and is given twice")
            parameters.append(_parameter(key, override))
        else:
            fixed.append(word)
    if not parameters:
        raise ValueError(
            "config: there is nothing to search: give a key several values, such as "
            "'lr=tag(log,interval(1e-4,1e-2))' or optimizer=choice(adam_atan2,muon)"
        )
    return Space(tuple(parameters), tuple(fixed))


def _parameter(key: str, override: Override) -> Choice | Numbers:
    sweep, word = override.value(), override.input_line
    if isinstance(sweep, ChoiceSweep):
        parameter = Choice(key, tuple(dict.fromkeys(override.sweep_string_iterator())))
    elif isinstance(sweep, RangeSweep):
        parameter = _of_range(key, sweep, word)
    elif isinstance(sweep, IntervalSweep):
        end = sweep.end - 1 if isinstance(sweep.end, int) else sweep.end
        parameter = Numbers(key, sweep.start, end, is_log="log" in sweep.tags)
    else:
        raise ValueError(f"config: {word} is no choice, range or interval")
    if unknown := set(getattr(sweep, "tags", ())) - ({"log"} if isinstance(parameter, Numbers) else set()):
        raise ValueError(f"config: {word} has the tag {min(unknown)!r}; there is log, of numbers")
    if isinstance(parameter, Numbers):
        _check_numbers(parameter, word)
    return parameter


def _of_range(key: str, sweep: RangeSweep, word: str) -> Numbers:
    start, stop, step = (Decimal(str(number)) for number in (sweep.start, sweep.stop, sweep.step))
    count = math.ceil((stop - start) / step) if step else 0  # exact, where floats would be one too many
    if count < 1:
        raise ValueError(f"config: {word} has no values")
    is_whole = all(isinstance(number, int) for number in (sweep.start, sweep.step))
    low, high = sorted((int if is_whole else float)(start + index * step) for index in (0, count - 1))
    distance = None if is_whole and abs(step) == 1 else abs(sweep.step)
    return Numbers(key, low, high, distance, is_log="log" in sweep.tags)


def _check_numbers(numbers: Numbers, word: str) -> None:
    if not numbers.low <= numbers.high:
        raise ValueError(f"config: {word} ends before it begins")
    if numbers.is_log and numbers.low <= 0:
        raise ValueError(f"config: {word} begins at {numbers.low:g}, which has no logarithm")
    if numbers.is_log and numbers.step is not None:
        raise ValueError(f"config: {word} has steps, which the tag log cannot have")


def experiment_yaml(overrides: Sequence[str], comment: str) -> str:
    """Writes overrides of pretrain.py as a file of config/experiment that means the same.

    comment: its first lines, which say what it is.
    """
    values, experiments, groups = OmegaConf.create(), [], {}
    for override in parse_overrides(PretrainConfig, overrides):
        key, value = override.get_key_element().lstrip("+"), override.value()
        if key == "experiment":
            experiments = [value] if value is not None else []
        elif (FOLDER / key).is_dir():
            groups[f"override /{key}"] = value
        else:
            OmegaConf.update(values, key, value, merge=True, force_add=True)
    overridden = [{key: value} for key, value in groups.items()]
    defaults = [*experiments, "_self_", *overridden] if experiments else overridden
    sections = [{"defaults": defaults}] if defaults else []
    sections.append(OmegaConf.to_container(values))
    lines = ["@package _global_", *comment.splitlines()]
    head = "".join(f"# {line}\n" for line in lines)
    return head + "\n".join(yaml.safe_dump(each, sort_keys=False) for each in sections if each)


def quote(text: str) -> str:
    """Writes any text as a value of Hydra's grammar."""
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
