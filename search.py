"""Searches hyper-parameters: many runs of pretrain.py, their parameters drawn by Optuna.

    python search.py study=NAME trials=40 [launch='torchrun --nproc-per-node 2'] experiment=demo \
        'lr=tag(log,interval(1e-4,1e-2))' 'arch.L_cycles=range(1,4)' 'optimizer=choice(adam_atan2,muon)'

Started again with the same words, a search goes on with the same trials, each from its checkpoint.
"""

if __name__ == "__main__":
    # The door comes before the imports: --help and mistakes on the command line answer without Optuna.
    from parallel.errors import local_errors
    from tuning.space import compose_search

    with local_errors():
        asked = compose_search()
        if asked is None:  # it was for help
            raise SystemExit
        from search import search

        search(*asked)

import dataclasses
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from config.schema import PretrainConfig, SearchConfig
from parallel import log
from parallel.errors import EXIT_FAILURE
from parallel.launch import REPOSITORY
from training.run_folder import lock_folder, write_text
from tuning.space import Space, experiment_yaml, quote
from tuning.trial import Measure, Trial, share_of_cores

try:
    import optuna
    from optuna.trial import TrialState

    from report.study import write_page
    from tuning.progress import Progress, shown
    from tuning.study import Study, folder_of, storage_of
except ModuleNotFoundError as error:
    raise ValueError(f"search.py needs {error.name}: pip install optuna plotly") from None

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_SECONDS = 0.2
_MAX_FAILED = 3  # trials before any has not: then it is not their parameters
PAGE_FILE = "study.html"


def search(config: SearchConfig, space: Space, run: PretrainConfig) -> None:
    """Runs the trials that are left, and prints the best one. Exits with status 1 where none was good.

    run: the config of one combination of the space.
    """
    find_program(config)
    folder = open_folder(config)
    num_evaluations = config.seeds * count_evaluations(run)
    study = Study(storage_of(config), config, space, run, num_evaluations=num_evaluations)
    if not study.trials and (others := sorted(folder.glob("trial_*"))):
        raise ValueError(f"{others[0]} is there, but no trial in {storage_of(config)}: choose another folder")
    for path in run.data_path:
        if not Path(path, "train").is_dir():
            raise ValueError(f"config: data_path: {path} is no dataset folder: build it (README, Data)")
    introduce(study, config, run)

    is_stopped = run_trials(study, config, space, run)
    report(study, config, space, is_stopped=is_stopped)
    if not is_stopped and study.best() is None:
        log.error(
            f"no trial of study {config.study} came to its end: the files output.log in {folder} say why; "
            "then begin anew with another study=, or go on with more trials="
        )
        raise SystemExit(EXIT_FAILURE)


def find_program(config: SearchConfig) -> None:
    """Raises ValueError where the program that `launch` begins with is not there."""
    words = launch_words(config, slot=0)
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"config: launch={config.launch!r}: there is no program {''.join(words[:1])!r} on PATH"
        )


def launch_words(config: SearchConfig, *, slot: int) -> list[str]:
    if config.launch is None:
        return [sys.executable]
    try:
        return [word.replace("{slot}", str(slot)) for word in shlex.split(config.launch)]
    except ValueError as error:
        raise ValueError(f"config: launch={config.launch!r} cannot be read ({error})") from None


def open_folder(config: SearchConfig) -> Path:
    """Makes the folder of the search, which is then this process's until it ends."""
    folder = folder_of(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder, other="folder")
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}): choose another folder") from None
    return folder


def count_evaluations(run: PretrainConfig) -> int:
    """Counts the evaluations of a whole run."""
    stages = [(stage.epochs, stage.eval_interval) for stage in run.curriculum if stage.epochs]
    return sum(
        epochs // (interval or epochs) for epochs, interval in [*stages, (run.epochs, run.eval_interval)]
    )


def introduce(study: Study, config: SearchConfig, run: PretrainConfig) -> None:
    """Says what is searched, what is left of it, and which puzzles choose."""
    selection = study.selection
    best = "lowest" if selection.lowest_is_best else "highest"
    at_a_time = f", {config.parallel} at a time" if config.parallel > 1 else ""
    seeds = f", the mean of {config.seeds} seeds" if config.seeds > 1 else ""
    log.info(
        f"study {config.study} in {folder_of(config)}: {config.trials} trials{at_a_time}; "
        f"{best} {selection.metric} of the {selection.selected_by} puzzles{seeds}"
    )
    if numbers := study.unfinished():
        log.info(f"going on with trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    if selection.selected_by == "test":
        log.warning(
            "the test split chooses among the trials, so that the best promises more than other puzzles will "
            "hold: give validation_fraction=0.1, or say so with the result"
        )


def run_trials(study: Study, config: SearchConfig, space: Space, run: PretrainConfig) -> bool:
    """Runs the trials that are left, `parallel` at a time; returns whether it was asked to stop."""
    waiting, num_failed = study.unfinished(), 0

    def is_left() -> bool:
        return bool(waiting) or len(study.trials) < config.trials

    running: dict[int, Running] = {}  # by slot
    with Interruption() as interruption, Progress(study, config) as progress:
        try:
            while True:
                for slot in range(config.parallel):
                    while slot not in running and not interruption.is_requested and is_left():
                        number = waiting.pop(0) if waiting else None
                        begun = begin(study, config, space, run, slot=slot, number=number)
                        running |= {slot: begun} if begun else {}
                if not running:
                    return interruption.is_requested
                time.sleep(_POLL_SECONDS)

                for slot, each in list(running.items()):
                    if interruption.is_requested and not each.trial.is_stopped:
                        log.info(f"trial {each.number}: saves and ends")
                        each.trial.stop()
                    if not follow(study, each):
                        del running[slot]
                        write_page(study, folder_of(config) / PAGE_FILE)
                        num_failed += study.trials[each.number].state == TrialState.FAIL
                if num_failed >= _MAX_FAILED and not study.count(TrialState.COMPLETE, TrialState.PRUNED):
                    raise ValueError(
                        f"the first {num_failed} trials failed, as all others would: once it is mended, the "
                        "same command goes on"
                    )
                progress.show([each.trial.values() for each in running.values()])
        finally:
            for each in running.values():
                each.trial.stop()


@dataclasses.dataclass
class Running:
    """A trial under way: as the study has it, and its processes."""

    drawn: optuna.Trial
    trial: Trial
    is_pruned: bool = False

    @property
    def number(self) -> int:
        return self.drawn.number


def begin(
    study: Study, config: SearchConfig, space: Space, run: PretrainConfig, *, slot: int, number: int | None
) -> Running | None:
    """Begins a new trial, or goes on with the unfinished one of that number.

    None where an earlier one had the same parameters: it would come to the same, and so the study is told.
    """
    drawn, values = study.begin(number)
    log.info(f"trial {drawn.number}: {shown(values)}")
    if (earlier := study.find_complete(values)) is not None:
        study.optuna.tell(drawn, earlier.value)
        log.info(
            f"trial {drawn.number}: {study.selection.metric} {earlier.value:.4g}, as trial {earlier.number}"
        )
        return None
    commands, folder = {}, folder_of(config) / f"trial_{drawn.number}"
    for seed in range(run.seed, run.seed + config.seeds):
        of_run = folder / f"seed_{seed}" if config.seeds > 1 else folder
        name = f"{config.study}_trial_{drawn.number}" + (f"_seed_{seed}" if config.seeds > 1 else "")
        commands[of_run] = [
            *launch_words(config, slot=slot),
            str(REPOSITORY / "pretrain.py"),
            *space.overrides(values),
            f"checkpoint_path={quote(str(of_run))}",
            f"run_name={name}",
            *([f"seed={seed}"] if config.seeds > 1 else []),
        ]
    measure = Measure(study.selection, run.max_steps)
    return Running(drawn, Trial(commands, measure, cores=share_of_cores(slot, config.parallel)))


def follow(study: Study, each: Running) -> bool:
    """Sees what a trial has come to, and tells the study; returns whether it goes on."""
    name = f"trial {each.number}"
    try:
        goes_on, values = each.trial.poll(), each.trial.values()
        if study.report(each.drawn, values) and goes_on and not each.is_pruned:
            log.info(f"{name}: pruned at evaluation {len(values)}, {values[-1]:.4g}")
            each.is_pruned = True
            each.trial.stop()
        if goes_on:
            return True
        if each.is_pruned:
            study.optuna.tell(each.number, state=TrialState.PRUNED)
        elif each.trial.is_complete:  # else it is the search that stops: the next start goes on with it
            score = each.trial.score()
            study.optuna.tell(each.number, score)
            is_best = study.best().number == each.number
            log.info(f"{name}: {study.selection.metric} {score:.4g}{', the best so far' if is_best else ''}")
    except ValueError as error:
        study.optuna.tell(each.number, state=TrialState.FAIL)
        log.warning(f"{name} failed: {error}")
    return False


class Interruption:
    """Context in which a signal asks for an end of the search, with its trials saved."""

    def __init__(self) -> None:
        self.is_requested = False

    def __enter__(self) -> "Interruption":
        self._handlers_before = {number: signal.signal(number, self._request) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _request(self, _number: int, _frame: object) -> None:
        self.is_requested = True


def report(study: Study, config: SearchConfig, space: Space, *, is_stopped: bool) -> None:
    """Prints how many trials came to what, and the best one, as a file of config/experiment."""
    states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
    counts = ", ".join(f"{study.count(state)} {name}" for name, state in states.items())
    outcome = "stopped: the same command goes on from here;" if is_stopped else "done:"
    log.info(f"{outcome} {counts} of {config.trials} trials; {folder_of(config) / PAGE_FILE}")
    best = study.best()
    if best is None:
        return
    text = experiment_yaml(space.overrides(study.parameters(best)), describe(study, config, best.number))
    path = folder_of(config) / "best.yaml"
    write_text(path, text)
    log.info(f"the best is trial {best.number}; {path}, for config/experiment/{config.study}.yaml:\n")
    log.info(text)


def describe(study: Study, config: SearchConfig, number: int) -> str:
    """Says in the first comment of an experiment's file where it comes from, and what was measured."""
    selection, finished = study.selection, study.count(TrialState.COMPLETE, TrialState.PRUNED)
    value, launch = study.trials[number].value, f"{config.launch or 'python'} pretrain.py"
    seeds = f", mean of {config.seeds} seeds" if config.seeds > 1 else ""
    caution = "" if selection.selected_by == "validation" else ", which chose it: others will give less"
    return (
        f"The best of {finished} trials of a search (trial {number} of the study {config.study}).\n"
        f"Command:   {launch} experiment={config.study}\n"
        f"Measured:  {selection.metric} {value:.4g} on the {selection.selected_by} puzzles{caution}{seeds}"
    )
