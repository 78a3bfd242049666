"""Runs the trials of search.py, reports their evaluations to Optuna, and shows progress."""

from __future__ import annotations

import asyncio
import math
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
_MAX_FAILED = 3  # stop the search if this many trials fail before one succeeds
_BAR = "{desc}|{bar}| {n:.1f}/{total} trials [{elapsed}, {remaining} left{postfix}]"


def run_trials(
    study: Study, config: SearchConfig, run: PretrainConfig, *, on_end: Callable[[], None]
) -> bool:
    """Runs the trials of a search that have not ended, `config.parallel` at a time.

    A trial is one combination of hyper-parameters, trained once for each seed. Returns True if a signal such
    as Ctrl-C stopped the search. Raises ValueError if three trials fail before any trial is complete or
    pruned.

    run: Config of a training with one of the possible values of each hyper-parameter.
    on_end: Function that is called after each trial.
    """
    # Not threads: starting processes from them is unsafe.
    return asyncio.run(_run_trials(study, config, run, on_end))


async def _run_trials(
    study: Study, config: SearchConfig, run: PretrainConfig, on_end: Callable[[], None]
) -> bool:
    is_asked, waiting, num_failed = asyncio.Event(), study.unfinished(), 0
    running: dict[int, Trial] = {}  # {slot: its current trial}
    for signal_number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signal_number, is_asked.set)

    def watch(trial: Trial) -> None:
        if is_asked.is_set() and not trial.is_stopped:
            log.info(f"trial {trial.number}: saving and stopping")
            trial.is_stopped = True
        if study.report(trial.drawn, trial.values()):
            trial.is_pruned = trial.is_stopped = True

    async def run_in(slot: int) -> None:
        nonlocal num_failed
        while not is_asked.is_set() and (waiting or study.num_left()):
            # First the trials that an earlier start of the search has not finished.
            number = waiting.pop(0) if waiting else None
            if (trial := _begin(study, config, run, slot=slot, number=number)) is None:
                on_end()
                await asyncio.sleep(0)  # let the event loop handle signals
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
                    f"the first {num_failed} trials failed, so the search stops. Fix the error above, then "
                    "run the same command to continue."
                )

    bar = {"bar_format": _BAR, "desc": "search", "unit": "trials", "smoothing": 0}  # 0: mean speed
    with Progress(total=study.num_trials, initial=study.num_ended(), **bar) as shown:
        all_slots = asyncio.gather(*map(run_in, range(config.parallel)))
        while not all_slots.done():
            await asyncio.sleep(_SHOW_SECONDS)
            count = study.num_evaluations or math.inf
            shares = sum(min(len(trial.values()) / count, 1) for trial in running.values())
            if (best := study.best()) is not None:
                shown.set_postfix_str(f"best {best.value:.4g}", refresh=False)
            shown.update(study.num_ended() + shares - shown.n)
        await all_slots
    return is_asked.is_set()


def _begin(
    study: Study, config: SearchConfig, run: PretrainConfig, *, slot: int, number: int | None
) -> Trial | None:
    drawn, values = study.begin(number)
    log.info(f"trial {drawn.number}: {format_values(values)}")
    if (earlier := study.find_complete(values)) is not None:
        study.optuna.tell(drawn, earlier.value)
        value = f"{study.selection.metric} {earlier.value:.4g}"
        log.info(
            f"trial {drawn.number}: {value} (not run, because trial {earlier.number} has the same values)"
        )
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
    max_steps = run.max_steps
    if (text := values.get("max_steps")) is not None:
        max_steps = None if text.lower() == "null" else int(float(text))
    return Trial(drawn, commands, study.selection, max_steps=max_steps, cores=cores)


def _conclude(study: Study, trial: Trial) -> None:
    values = trial.values()
    study.report(trial.drawn, values)
    if trial.is_complete:  # also if it was pruned after its last evaluation
        score = trial.score()
        study.optuna.tell(trial.number, score)
        is_best = ", the best so far" if study.best().number == trial.number else ""
        log.info(f"trial {trial.number}: {study.selection.metric} {score:.4g}{is_best}")
    elif trial.is_pruned:  # otherwise the next launch of the search continues it
        study.optuna.tell(trial.number, state=TrialState.PRUNED)
        log.info(f"trial {trial.number}: pruned at evaluation {len(values)}, {values[-1]:.4g}")


def launch_command(config: SearchConfig, *, slot: int) -> list[str]:
    """Returns the command before the word "pretrain.py", such as ["torchrun", "--nproc-per-node=2"].

    slot: Number that replaces {slot} in `launch`, for example to select a GPU. Trials that run at the same
    time have different numbers, from 0 to parallel - 1.
    """
    if config.launch is None:
        return [sys.executable]
    try:
        argv = [argument.replace("{slot}", str(slot)) for argument in shlex.split(config.launch)]
    except ValueError as error:
        raise ValueError(f"config: launch={config.launch!r} cannot be read ({error}).") from None
    if not argv or shutil.which(argv[0]) is None:
        program = "".join(argv[:1])
        raise ValueError(f"config: launch={config.launch!r}: no program {program!r} on PATH. Install it.")
    return argv


def format_values(values: Mapping[str, str]) -> str:
    """Returns the hyper-parameters of a trial as text for the console, such as "lr=0.000123 epochs=20"."""
    return " ".join(f"{key}={short_value(value)}" for key, value in values.items())


def short_value(value: str) -> str:
    """Returns a value for the console, such as "0.000123" for "0.00012345".

    A number of more than 6 characters is rounded to 3 significant digits. Other texts are not changed.
    """
    try:
        return value if len(value) <= 6 else f"{float(value):.3g}"
    except ValueError:
        return value
