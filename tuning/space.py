"""The search space of search.py: keys with several values on the command line, in Hydra's sweep grammar.

    lr=1e-4,1e-3                 arch.L_cycles=range(1,4)              one of a few values
    optimizer=choice(muon,adamw)
    lr=interval(1e-4,1e-2)       lr=tag(log,interval(1e-4,1e-2))       a number between two
    epochs=int(interval(10,40))  epochs=tag(log,int(interval(10,400))) a whole number

As in Python the end of a range is excluded; so is the end of an interval of whole numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from config.compose import compose_overrides, parse_overrides, split_command_line
from config.files import FOLDER
from config.programs import SearchConfig
from config.schema import PretrainConfig
from runtime.writing import to_yaml
from training.run_config import name_arch

_GIVEN_BY_SEARCH = {
    "checkpoint_path": "trial n runs in <folder>/trial_<n>: give folder=PATH",
    "run_name": "a run has the name of its trial: give study=NAME",
    "resume": "trials go on from their own checkpoints: drop it",
}
_MAX_TRIES = 16  # combinations tried, to find a valid one with a given value


@dataclasses.dataclass(frozen=True)
class Space:
    """The search space. parameters: {key: Optuna's distribution}, the keys that are searched.

    fixed: the other words of pretrain.py, equal in every trial.
    """

    parameters: dict[str, BaseDistribution]
    fixed: tuple[str, ...]

    def draw(self, trial: Trial) -> None:
        """Lets Optuna draw each parameter; a parameter that the trial already has keeps its value."""
        for key, of in self.parameters.items():
            if isinstance(of, CategoricalDistribution):
                trial.suggest_categorical(key, of.choices)
            else:
                suggest = trial.suggest_int if isinstance(of, IntDistribution) else trial.suggest_float
                suggest(key, of.low, of.high, step=of.step, log=of.log)

    def combinations(self) -> list[dict[str, Any]]:
        """Returns all combinations of values, for sampler=grid. ValueError for a continuous parameter."""
        values = {key: _grid_values(key, of) for key, of in self.parameters.items()}
        return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]

    def written(self, values: dict[str, Any]) -> dict[str, str]:
        """Returns values as texts for a command line; {} if one is missing. ValueError: not in the space."""
        if self.parameters.keys() - values.keys():
            return {}
        return {key: _written(key, of, values[key]) for key, of in self.parameters.items()}

    def overrides(self, values: dict[str, str]) -> list[str]:
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items())]

    def describe(self) -> dict[str, str]:
        return {key: str(of) for key, of in self.parameters.items()}

    def check(self) -> PretrainConfig:
        """Returns the config of one combination. ValueError if a value, or a range's end, fits into none."""
        extremes = {}
        for key, of in self.parameters.items():
            values = of.choices if isinstance(of, CategoricalDistribution) else (of.low, of.high)
            extremes[key] = [_written(key, of, value) for value in values]
        for key, values in extremes.items():
            for value in values:
                config = self._compose_any(extremes | {key: [value]})
        return config

    def _compose_any(self, values: dict[str, list[str]]) -> PretrainConfig:
        mistake = None
        for combination in itertools.islice(itertools.product(*values.values()), _MAX_TRIES):
            try:
                chosen = dict(zip(values, combination, strict=True))
                return compose_overrides(PretrainConfig, self.overrides(chosen))
            except ValueError as error:
                mistake = mistake or error
        raise mistake


def _grid_values(key: str, of: BaseDistribution) -> Sequence[Any]:
    if isinstance(of, CategoricalDistribution):
        return of.choices
    if of.step is None or of.log:
        raise ValueError(f"config: sampler=grid needs values of {key}, such as {key}={of.low:g},{of.high:g}")
    return [of.low + index * of.step for index in range(round((of.high - of.low) / of.step) + 1)]


def _written(key: str, of: BaseDistribution, value: Any) -> str:
    if isinstance(of, CategoricalDistribution):
        is_of_space = value in of.choices
    else:
        is_of_space = isinstance(value, (int, float)) and of.low <= value <= of.high
    if not is_of_space:
        raise ValueError(f"{key}={value!r} is not of the space")
    if isinstance(value, float) and of.step:  # 0.3, not 0.1 + 0.1 + 0.1
        return f"{value:.12g}"
    return value if isinstance(value, str) else repr(value)


def compose_search() -> tuple[SearchConfig, Space, PretrainConfig] | None:
    """Returns the config of search.py, the space, and the config of a trial, from the command line.

    The config of a trial has arbitrary values for the searched keys. Returns None after --help and --cfg job,
    which only print. Raises ValueError, one line, for a mistake.
    """
    asked = split_command_line(SearchConfig)
    if asked is None:
        return None
    config, argv = asked
    swept = [word for word in argv if _has_several_values(word)]
    space = read_space([*name_arch([word for word in argv if word not in swept]), *swept])
    run = space.check()
    if run.keep_best is None:
        raise ValueError("config: keep_best=null leaves nothing to choose the best trial by: name a metric")
    if config.seeds > 1 and "seed" in space.describe():
        raise ValueError(f"config: seed has several values already: drop them, or seeds={config.seeds}")
    if config.sampler == "grid":
        space.combinations()
    return config, space, run


def read_space(argv: Sequence[str]) -> Space:
    """Reads the space from a command line's words. ValueError where no key has several values."""
    parameters, fixed = {}, [word for word in argv if _is_option(word)]
    overrides = _overrides_in(argv)
    for override in overrides:
        key = override.get_key_element()
        if key in _GIVEN_BY_SEARCH:
            raise ValueError(f"config: {key} is search.py's own: {_GIVEN_BY_SEARCH[key]}")
        if override.is_sweep_override():
            if [each.get_key_element() for each in overrides].count(key) > 1:
                raise ValueError(f"config: {key} has several values, and is given twice")
            parameters[key] = _distribution(override)
        else:
            fixed.append(override.input_line)
    if not parameters:
        raise ValueError(
            "config: there is nothing to search: give a key several values, such as "
            "'lr=tag(log,interval(1e-4,1e-2))' or optimizer=choice(adam_atan2,muon)"
        )
    return Space(parameters, tuple(fixed))


def _is_option(word: str) -> bool:
    return word.startswith("--")  # --config-dir=FOLDER


def _overrides_in(words: Sequence[str]) -> list[Override]:
    return parse_overrides(PretrainConfig, [word for word in words if not _is_option(word)])


def _has_several_values(word: str) -> bool:
    return any(override.is_sweep_override() for override in _overrides_in([word]))


def _distribution(override: Override) -> BaseDistribution:
    sweep, word = override.value(), override.input_line
    tags = set(getattr(sweep, "tags", ()))
    if unknown := tags - (set() if isinstance(sweep, ChoiceSweep) else {"log"}):
        raise ValueError(f"config: {word} has the tag {min(unknown)!r}; there is log, of numbers")
    if isinstance(sweep, ChoiceSweep):
        return CategoricalDistribution(tuple(dict.fromkeys(override.sweep_string_iterator())))
    if isinstance(sweep, RangeSweep):
        low, high, step = _ends(sweep, word)
    elif isinstance(sweep, IntervalSweep):
        is_whole = isinstance(sweep.end, int)
        low, high, step = sweep.start, sweep.end - is_whole, 1 if is_whole else None
    else:
        raise ValueError(f"config: {word} is no choice, range or interval")
    try:
        kind = IntDistribution if isinstance(low, int) else FloatDistribution
        return kind(low, high, step=step, log="log" in tags)
    except ValueError as error:  # low > high, or a log scale from 0
        raise ValueError(f"config: {word}: {error}") from None


def _ends(sweep: RangeSweep, word: str) -> tuple[float, float, float]:
    """Returns (lowest value, highest value, step) of a range. ValueError, with `word`, if it is empty."""
    start, stop, step = (Decimal(str(number)) for number in (sweep.start, sweep.stop, sweep.step))
    count = math.ceil((stop - start) / step) if step else 0  # Decimal: floats could count one too many
    if count < 1:
        raise ValueError(f"config: {word} has no values")
    number = int if all(isinstance(each, int) for each in (sweep.start, sweep.step)) else float
    low, high = sorted(number(start + index * step) for index in (0, count - 1))
    return low, high, abs(sweep.step)


def experiment_yaml(overrides: Sequence[str], comment: str) -> str:
    """Returns key=value words as text of a file for config/experiment, which begins with `comment`.

    Leaves out options such as --config-dir.
    """
    values, experiments, groups = OmegaConf.create(), [], {}
    for override in _overrides_in(overrides):
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
    return head + "\n".join(to_yaml(each) for each in sections if each)
