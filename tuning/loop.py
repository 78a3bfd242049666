"""The loop of a search: begins trials, reports their evaluations to the study, and shows how far it is."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from optuna.trial import TrialState

from config.schema import PretrainConfig, SearchConfig
from config.texts import quoted
from parallel import log
from parallel.launch import REPOSITORY
from parallel.progress import Progress
from parallel.signals import stop_signals
from tuning.study import Study, folder_of
from tuning.trial import Trial, share_of_cores

_POLL_SECONDS = 0.2
_MAX_FAILED = 3  # trials before any has not: then it is not their parameters
_BAR = "{desc}|{bar}| {n:.1f}/{total} trials [{elapsed}, {remaining} left{postfix}]"


def run_trials(
    study: Study, config: SearchConfig, run: PretrainConfig, *, on_end: Callable[[], None]
) -> bool:
    """Runs the trials that are left, `parallel` at a time; returns whether a signal asked to stop.

    run: the config of one combination of the space. on_end: called after each trial. ValueError where the
    first trials all failed.
    """
    waiting, num_failed = study.unfinished(), 0
    running: dict[int, Trial] = {}  # by slot
    with _noted_signals() as requests, _progress_bar(study, config) as bar:
        try:
            while True:
                for slot in range(config.parallel):
                    while slot not in running and not requests and (waiting or study.num_left()):
                        number = waiting.pop(0) if waiting else None
                        begun = _begin(study, config, run, slot=slot, number=number)
                        running |= {slot: begun} if begun else {}
                if not running:
                    return bool(requests)
                time.sleep(_POLL_SECONDS)

                for slot, each in list(running.items()):
                    if requests and not each.is_stopped:
                        log.info(f"trial {each.number}: saves and ends")
                        each.stop()
                    if not _report(study, each):
                        del running[slot]
                        on_end()
                        num_failed += study.trials[each.number].state == TrialState.FAIL
                if num_failed >= _MAX_FAILED and not study.count(TrialState.COMPLETE, TrialState.PRUNED):
                    raise ValueError(
                        f"the first {num_failed} trials failed, as all others would: once it is mended, the "
                        "same command goes on"
                    )
                _show(bar, study, running.values())
        finally:
            for each in running.values():
                each.stop()


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yields the list of the signals that came; without a thread, beside which no process starts safely."""
    requests: list[int] = []
    before = {each: signal.signal(each, lambda number, _: requests.append(number)) for each in stop_signals()}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(
    study: Study, config: SearchConfig, run: PretrainConfig, *, slot: int, number: int | None
) -> Trial | None:
    """Begins a new trial, or goes on with the unfinished one of that number.

    Returns None where an earlier trial had the same parameters: its value is reported for this one.
    """
    drawn, values = study.begin(number)
    log.info(f"trial {drawn.number}: {format_values(values)}")
    if (earlier := study.find_complete(values)) is not None:
        study.optuna.tell(drawn, earlier.value)
        value = f"{study.selection.metric} {earlier.value:.4g}"
        log.info(f"trial {drawn.number}: {value}, as trial {earlier.number}")
        return None
    commands, folder = {}, folder_of(config) / f"trial_{drawn.number}"
    for seed in range(run.seed, run.seed + config.seeds):
        of_run = folder / f"seed_{seed}" if config.seeds > 1 else folder
        name = f"{config.study}_trial_{drawn.number}" + (f"_seed_{seed}" if config.seeds > 1 else "")
        commands[of_run] = [
            *launch_command(config, slot=slot),
            str(REPOSITORY / "pretrain.py"),
            *study.space.overrides(values),
            f"checkpoint_path={quoted(str(of_run))}",
            f"run_name={name}",
            *([f"seed={seed}"] if config.seeds > 1 else []),
        ]
    cores = share_of_cores(slot, config.parallel)
    return Trial(drawn, commands, study.selection, max_steps=run.max_steps, cores=cores)


def _report(study: Study, each: Trial) -> bool:
    """Reports the evaluations or the end of a trial to the study; returns whether the trial goes on."""
    name = f"trial {each.number}"
    try:
        goes_on, values = each.poll(), each.values()
        if study.report(each.drawn, values) and goes_on and not each.is_pruned:
            log.info(f"{name}: pruned at evaluation {len(values)}, {values[-1]:.4g}")
            each.is_pruned = True
            each.stop()
        if goes_on:
            return True
        if each.is_pruned:
            study.optuna.tell(each.number, state=TrialState.PRUNED)
        elif each.is_complete:  # else it is the search that stops: the next start goes on with it
            score = each.score()
            study.optuna.tell(each.number, score)
            is_best = study.best().number == each.number
            log.info(f"{name}: {study.selection.metric} {score:.4g}{', the best so far' if is_best else ''}")
    except ValueError as error:
        study.optuna.tell(each.number, state=TrialState.FAIL)
        log.warning(f"{name} failed: {error}")
    return False


def launch_command(config: SearchConfig, *, slot: int) -> list[str]:
    """Returns what comes before pretrain.py on a command line. ValueError where there is no such program."""
    if config.launch is None:
        return [sys.executable]
    try:
        argv = [word.replace("{slot}", str(slot)) for word in shlex.split(config.launch)]
    except ValueError as error:
        raise ValueError(f"config: launch={config.launch!r} cannot be read ({error})") from None
    if not argv or shutil.which(argv[0]) is None:
        program = "".join(argv[:1])
        raise ValueError(f"config: launch={config.launch!r}: there is no program {program!r} on PATH")
    return argv


def format_values(values: Mapping[str, str]) -> str:
    """Writes parameters for a person, long numbers shortened."""

    def short(value: str) -> str:
        try:
            return value if len(value) <= 6 else f"{float(value):.3g}"
        except ValueError:
            return value

    return " ".join(f"{key}={short(value)}" for key, value in values.items())


def _progress_bar(study: Study, config: SearchConfig) -> Progress:
    """Makes a bar over the trials; the time left is by the mean of all of them."""
    options = {"bar_format": _BAR, "smoothing": 0}
    return Progress(desc="search", total=config.trials, initial=_num_ended(study), unit="trial", **options)


def _show(bar: Progress, study: Study, running: Iterable[Trial]) -> None:
    """Fills the bar by ended trials and the evaluations of running ones; shows the best value."""
    shares = sum(min(len(each.values()) / study.num_evaluations, 1) for each in running)
    if (best := study.best()) is not None:
        bar.set_postfix_str(f"best {best.value:.4g}", refresh=False)
    bar.update(_num_ended(study) + shares - bar.n)


def _num_ended(study: Study) -> int:
    return len(study.trials) - len(study.unfinished())
