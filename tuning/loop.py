"""The main loop of search.py: runs trials, reports their evaluations to Optuna, and shows progress."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping

from optuna.trial import TrialState

from config.programs import SearchConfig
from config.schema import PretrainConfig
from config.texts import quoted
from distributed import log
from distributed.launch import REPOSITORY
from distributed.progress import Progress
from distributed.signals import stop_signals
from tuning.study import Study, folder_of
from tuning.trial import Trial, share_of_cores

_SHOW_SECONDS = 0.2
_MAX_FAILED = 3  # trials before any has succeeded: then the hyper-parameters are not the cause
_BAR = "{desc}|{bar}| {n:.1f}/{total} trials [{elapsed}, {remaining} left{postfix}]"


def run_trials(
    study: Study, config: SearchConfig, run: PretrainConfig, *, on_end: Callable[[], None]
) -> bool:
    """Runs the remaining trials, `config.parallel` at a time; returns whether a signal stopped the search.

    run: the config of a trial; its searched keys have arbitrary values. on_end: called after each trial.
    Raises ValueError where the first three trials all fail. Uses asyncio: with threads, starting processes is
    unsafe.
    """
    return asyncio.run(_run_trials(study, config, run, on_end))


async def _run_trials(
    study: Study, config: SearchConfig, run: PretrainConfig, on_end: Callable[[], None]
) -> bool:
    is_asked, waiting, num_failed = asyncio.Event(), study.unfinished(), 0
    running: dict[int, Trial] = {}  # by slot
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, is_asked.set)

    def watch(trial: Trial) -> None:
        """Reports new evaluations; asks the trial to stop if it is pruned, or if the search has to end."""
        if is_asked.is_set() and not trial.is_stopped:
            log.info(f"trial {trial.number}: saves and ends")
            trial.is_stopped = True
        values = trial.values()
        if study.report(trial.drawn, values) and not trial.is_pruned:
            log.info(f"trial {trial.number}: pruned at evaluation {len(values)}, {values[-1]:.4g}")
            trial.is_pruned = trial.is_stopped = True

    async def run_in(slot: int) -> None:
        """Runs one trial after the other, first those that an earlier start of the search left unfinished."""
        nonlocal num_failed
        while not is_asked.is_set() and (waiting or study.num_left()):
            number = waiting.pop(0) if waiting else None
            if (trial := _begin(study, config, run, slot=slot, number=number)) is None:
                on_end()
                await asyncio.sleep(0)  # signals come in
                continue
            running[slot] = trial
            try:
                await trial.run(watch)
                _conclude(study, trial)
            except ValueError as error:
                study.optuna.tell(trial.number, state=TrialState.FAIL)
                log.warning(f"trial {trial.number} failed: {error}")
                num_failed += 1
            del running[slot]
            on_end()
            if num_failed >= _MAX_FAILED and not study.count(TrialState.COMPLETE, TrialState.PRUNED):
                raise ValueError(
                    f"the first {num_failed} trials failed, as all others would: once it is mended, the "
                    "same command goes on"
                )

    bar = {"bar_format": _BAR, "desc": "search", "unit": "trial", "smoothing": 0}  # 0: mean speed
    with Progress(total=study.num_trials, initial=study.num_ended(), **bar) as shown:
        all_slots = asyncio.gather(*map(run_in, range(config.parallel)))
        while not all_slots.done():
            await asyncio.sleep(_SHOW_SECONDS)
            shares = sum(min(len(each.values()) / study.num_evaluations, 1) for each in running.values())
            if (best := study.best()) is not None:
                shown.set_postfix_str(f"best {best.value:.4g}", refresh=False)
            shown.update(study.num_ended() + shares - shown.n)
        await all_slots
    return is_asked.is_set()


def _begin(
    study: Study, config: SearchConfig, run: PretrainConfig, *, slot: int, number: int | None
) -> Trial | None:
    """Prepares a new trial, or the unfinished trial `number`; returns None if there is nothing to run.

    slot: 0 ... parallel - 1, different for trials that run at the same time. Nothing is run where a complete
    trial had the same parameters: Optuna then gets that trial's value.
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
            *study.overrides(values),
            f"checkpoint_path={quoted(str(of_run))}",
            f"run_name={name}",
            *([f"seed={seed}"] if config.seeds > 1 else []),
        ]
    cores = share_of_cores(slot, config.parallel)
    return Trial(drawn, commands, study.selection, max_steps=run.max_steps, cores=cores)


def _conclude(study: Study, trial: Trial) -> None:
    """Gives Optuna the result of a trial; leaves a trial that stopped with the search unfinished."""
    study.report(trial.drawn, trial.values())
    if trial.is_pruned:
        study.optuna.tell(trial.number, state=TrialState.PRUNED)
    elif trial.is_complete:  # else the next start of the search continues it
        score = trial.score()
        study.optuna.tell(trial.number, score)
        is_best = ", the best so far" if study.best().number == trial.number else ""
        log.info(f"trial {trial.number}: {study.selection.metric} {score:.4g}{is_best}")


def launch_command(config: SearchConfig, *, slot: int) -> list[str]:
    """Returns the words before pretrain.py, such as torchrun. ValueError where no such program exists."""
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
    """Returns parameters as text for the console: key=value, long numbers shortened."""
    return " ".join(f"{key}={short_value(value)}" for key, value in values.items())


def short_value(value: str) -> str:
    """Returns a value as text; a number of more than 6 characters is rounded to 3 significant digits."""
    try:
        return value if len(value) <= 6 else f"{float(value):.3g}"
    except ValueError:
        return value
