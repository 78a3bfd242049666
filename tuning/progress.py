"""What a person sees of a search while it runs: a bar over the trials, with the best and the time left."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from config.schema import SearchConfig
from tuning.study import Study

_FORMAT = "{desc}|{bar}| {n:.1f}/{total} trials [{elapsed}, {remaining} left{postfix}]"


class Progress:
    """A bar, of which a running trial fills the share that it has done of its evaluations."""

    def __init__(self, study: Study, config: SearchConfig):
        self._study = study
        tqdm.monitor_interval = 0  # no thread of its own, beside which processes could not be started safely
        self._bar = tqdm(
            total=config.trials,
            initial=self._num_finished(),
            bar_format=_FORMAT,
            mininterval=0.2 if sys.stderr.isatty() else 60.0,  # a log file needs no moving bar
            dynamic_ncols=True,
            smoothing=0,  # the time left by the mean of all trials
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, values: Sequence[Sequence[float]]) -> None:
        """Shows how far the search is, by the evaluations of each running trial."""
        shares = sum(min(len(each) / self._study.num_evaluations, 1) for each in values)
        if (best := self._study.best()) is not None:
            self._bar.set_postfix_str(f"best {best.value:.4g}", refresh=False)
        self._bar.update(self._num_finished() + shares - self._bar.n)

    def _num_finished(self) -> int:
        return len(self._study.trials) - len(self._study.unfinished())


def shown(values: Mapping[str, str]) -> str:
    """Writes parameters for a person, long numbers shortened."""
    return " ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: str) -> str:
    try:
        return value if len(value) <= 6 else f"{float(value):.3g}"
    except ValueError:
        return value
