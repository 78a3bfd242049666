"""Reads the search space of search.py: keys with several values, in Hydra's sweep grammar.

    lr=1e-4,1e-3                 arch.L_cycles=range(1,4)              one of several values
    optimizer=choice(muon,adamw)
    lr=interval(1e-4,1e-2)       lr=tag(log,interval(1e-4,1e-2))       a number in an interval
    epochs=int(interval(10,40))  epochs=tag(log,int(interval(10,400))) an integer

As in Python, a range excludes its end. An interval of integers also excludes its end.
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

from config.compose import compose_overrides, compose_values, parse_overrides, split_command_line
from config.files import FOLDER, flatten, load_arch_defaults, load_defaults
from config.programs import SearchConfig
from config.schema import PretrainConfig
from runtime.writing import to_yaml
from training.run_config import name_arch

_GIVEN_BY_SEARCH = {
    "checkpoint_path": "trial n runs in <folder>/trial_<n>. Set folder=PATH.",
    "run_name": "runs are named after their trials. Set study=NAME.",
    "resume": "trials resume from their own checkpoints. Remove it.",
}
_MAX_TRIES = 16  # maximum number of combinations tried to find a valid one with a given value


@dataclasses.dataclass(frozen=True)
class Space:
    """The hyper-parameters of a search, and their possible values."""

    parameters: dict[str, BaseDistribution]  # {key of the config: its possible values}
    fixed: tuple[str, ...]  # the other arguments of pretrain.py, equal in every trial

    def draw(self, trial: Trial) -> None:
        """Lets Optuna choose a value for each hyper-parameter of a trial.

        The trial stores the values. A hyper-parameter that already has a value keeps it.
        """
        for key, distribution in self.parameters.items():
            if isinstance(distribution, CategoricalDistribution):
                trial.suggest_categorical(key, distribution.choices)
                continue
            is_integer = isinstance(distribution, IntDistribution)
            suggest = trial.suggest_int if is_integer else trial.suggest_float
            suggest(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)

    def combinations(self) -> list[dict[str, Any]]:
        """Returns all combinations of values, each as {hyper-parameter: value}.

        Raises ValueError if a hyper-parameter has a continuous interval or a logarithmic scale, because these
        have no list of values.
        """
        values = [_grid_values(key, distribution) for key, distribution in self.parameters.items()]
        return [dict(zip(self.parameters, chosen, strict=True)) for chosen in itertools.product(*values)]

    def written(self, values: dict[str, Any]) -> dict[str, str]:
        """Converts the values of a trial to texts for a command line: {hyper-parameter: text}.

        If even one hyper-parameter of the space has no value, returns {}. Raises ValueError if a value is not
        in the search space.
        """
        if self.parameters.keys() - values.keys():
            return {}
        return {key: _written(key, each, values[key]) for key, each in self.parameters.items()}

    def overrides(self, values: dict[str, str]) -> list[str]:
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items())]

    def describe(self) -> dict[str, str]:
        return {key: str(distribution) for key, distribution in self.parameters.items()}

    def check(self) -> PretrainConfig:
        """Checks that pretrain.py accepts every value of each hyper-parameter.

        Of a range of numbers, only the lowest and the highest value are checked. Each value is tried together
        with up to 16 combinations of values of the other hyper-parameters. If all of these are invalid,
        raises ValueError. Returns the config of a training with one of the possible values of each
        hyper-parameter.
        """
        extremes = {}
        for key, distribution in self.parameters.items():
            is_list = isinstance(distribution, CategoricalDistribution)
            values = distribution.choices if is_list else (distribution.low, distribution.high)
            extremes[key] = [_written(key, distribution, value) for value in values]
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


def _grid_values(key: str, distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    if distribution.step is None or distribution.log:
        example = f"{key}={distribution.low:g},{distribution.high:g}"
        raise ValueError(
            f"config: sampler=grid needs a list of values for {key}. Set {example}, for example."
        )
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    # Example of a rounding error: 0.1 + 2 * 0.1 is greater than 0.3.
    values = (distribution.low + index * distribution.step for index in range(count))
    return [min(value, distribution.high) for value in values]


def _written(key: str, distribution: BaseDistribution, value: Any) -> str:
    if isinstance(distribution, CategoricalDistribution):
        is_of_space = value in distribution.choices
    else:
        is_of_space = isinstance(value, (int, float)) and distribution.low <= value <= distribution.high
    if not is_of_space:
        raise ValueError(f"{key}={value!r} is not in the search space")
    if isinstance(value, float) and distribution.step:  # 0.3, not 0.1 + 0.1 + 0.1
        return f"{value:.12g}"
    return value if isinstance(value, str) else repr(value)


def compose_search() -> tuple[SearchConfig, Space, PretrainConfig] | None:
    """Reads the command line of search.py.

    Returns (config of the search, search space, config of a training with one of the possible values of each
    hyper-parameter). Returns None after --help and --cfg job, because they only print. Raises ValueError if
    the config is wrong.
    """
    command_line = split_command_line(SearchConfig)
    if command_line is None:
        return None
    config, argv = command_line
    swept = [argument for argument in argv if _has_several_values(argument)]
    space = read_space([*name_arch([argument for argument in argv if argument not in swept]), *swept])
    run = space.check()
    if run.keep_best is None:
        raise ValueError("config: keep_best=null: no metric selects the best trial. Set keep_best=<metric>.")
    if config.seeds > 1 and "seed" in space.describe():
        raise ValueError(f"config: seed has several values already. Remove them, or seeds={config.seeds}.")
    if config.sampler == "grid":
        space.combinations()
    return config, space, run


def read_space(argv: Sequence[str]) -> Space:
    """Reads the search space from command-line arguments, such as lr=1e-4,1e-3.

    Raises ValueError if no key has several values.
    """
    parameters, fixed = {}, [argument for argument in argv if _is_option(argument)]
    overrides = _overrides_in(argv)
    for override in overrides:
        key = override.get_key_element()
        if key in _GIVEN_BY_SEARCH:
            raise ValueError(f"config: search.py sets {key} itself: {_GIVEN_BY_SEARCH[key]}")
        if override.is_sweep_override():
            if [other.get_key_element() for other in overrides].count(key) > 1:
                raise ValueError(f"config: {key} has several values, and is set twice. Remove one of them.")
            parameters[key] = _distribution(override)
        else:
            fixed.append(override.input_line)
    if not parameters:
        raise ValueError(
            "config: no key has several values. Set one, such as 'lr=tag(log,interval(1e-4,1e-2))' or "
            "optimizer=choice(adam_atan2,muon)."
        )
    return Space(parameters, tuple(fixed))


def _is_option(argument: str) -> bool:
    return argument.startswith("--")  # --config-dir=FOLDER


def _overrides_in(arguments: Sequence[str]) -> list[Override]:
    return parse_overrides(PretrainConfig, [argument for argument in arguments if not _is_option(argument)])


def _has_several_values(argument: str) -> bool:
    return any(override.is_sweep_override() for override in _overrides_in([argument]))


def _distribution(override: Override) -> BaseDistribution:
    sweep, argument = override.value(), override.input_line
    tags = set(getattr(sweep, "tags", ()))
    if unknown := tags - (set() if isinstance(sweep, ChoiceSweep) else {"log"}):
        raise ValueError(
            f"config: {argument} has the tag {min(unknown)!r}. Use only log, and only for numbers."
        )
    if isinstance(sweep, ChoiceSweep):
        # Hydra escapes spaces. `compose_overrides` quotes texts instead.
        texts = (text.replace("\\ ", " ") for text in override.sweep_string_iterator())
        return CategoricalDistribution(tuple(dict.fromkeys(texts)))
    if isinstance(sweep, RangeSweep):
        low, high, step = _ends(sweep, argument)
    elif isinstance(sweep, IntervalSweep):
        is_integer = isinstance(sweep.end, int)
        low, high, step = sweep.start, sweep.end - is_integer, 1 if is_integer else None
    else:
        raise ValueError(f"config: {argument} is not a choice, range or interval. Use one of them.")
    try:
        kind = IntDistribution if isinstance(low, int) else FloatDistribution
        return kind(low, high, step=step, log="log" in tags)
    except ValueError as error:  # low > high, or a log scale from 0
        raise ValueError(f"config: {argument}: {error}") from None


def _ends(sweep: RangeSweep, argument: str) -> tuple[float, float, float]:
    """Returns (lowest value, highest value, step) of a range, such as (1, 3, 1) for range(1,4).

    Raises ValueError if the range is empty.
    """
    start, stop, step = (Decimal(str(number)) for number in (sweep.start, sweep.stop, sweep.step))
    count = math.ceil((stop - start) / step) if step else 0  # with floats, rounding could add a value
    if count < 1:
        raise ValueError(f"config: {argument} has no values. Change its ends.")
    number = int if all(isinstance(term, int) for term in (sweep.start, sweep.step)) else float
    low, high = sorted(number(start + index * step) for index in (0, count - 1))
    return low, high, abs(sweep.step)


def experiment_yaml(overrides: Sequence[str], comment: str) -> str:
    """Returns the text of a YAML file that sets the given keys.

    `pretrain.py experiment=NAME` can read the file. `comment` becomes a YAML comment at its top.

    overrides: Arguments key=value. Options such as --config-dir are left out.
    """
    values, experiments, groups = OmegaConf.create(), [], {}
    found = [(each.get_key_element().lstrip("+"), each.value()) for each in _overrides_in(overrides)]
    if {"arch", "experiment"} <= dict(found).keys():
        # The experiment may be for another model, which ignores some of its values. So write all values.
        composed = compose_values(PretrainConfig, overrides)
        arch = composed["arch"]["name"]
        usual = flatten(load_defaults("pretrain") | {"arch": load_arch_defaults(arch)})
        changed = [item for item in flatten(composed).items() if item[1] != usual.get(item[0], ...)]
        found = [("arch", arch), *changed]
    for key, value in found:
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
    return head + "\n".join(to_yaml(section) for section in sections if section)
