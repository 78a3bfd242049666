"""Searches hyper-parameters: runs pretrain.py many times, with values that Optuna samples.

    python search.py study=NAME trials=40 [launch='torchrun --nproc-per-node 2'] experiment=demo \
        'lr=tag(log,interval(1e-4,1e-2))' 'arch.L_cycles=range(1,4)' 'optimizer=choice(adam_atan2,muon)'

The same command continues an interrupted search. Unfinished trials resume from their checkpoints.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # Python omits it if PYTHONSAFEPATH is set

import runtime.environment  # noqa: F401

from config.compose import chosen_experiment
from config.messages import check_data_folders
from config.programs import SearchConfig
from config.schema import PretrainConfig
from distributed import log
from distributed.errors import EXIT_FAILURE, local_errors
from runtime.writing import write_text

try:
    from optuna.trial import TrialState

    from report.compare import write_comparison
    from report.page import check_packages
    from report.study import write_page
    from report.table import write_table
    from tuning.loop import launch_command, run_trials
    from tuning.space import Space, compose_search, experiment_yaml
    from tuning.study import Study, folder_of, open_folder, storage_of
except ModuleNotFoundError as error:
    raise SystemExit(f"error: search.py needs {error.name}: pip install {error.name}") from None

PAGE_FILE = "study.html"


def main() -> None:
    with local_errors():
        composed = compose_search()
        if composed is not None:
            check_packages()
            search(*composed)


def search(config: SearchConfig, space: Space, run: PretrainConfig) -> None:
    """Runs the trials of a hyper-parameter search that have not ended yet.

    Then prints the best trial. A grid search prints a table of the complete trials instead.

    A trial is one combination of hyper-parameters, trained once for each seed. If no trial is complete, and
    no signal stopped the search, exits with status 1.

    space: Searched config keys with their possible values. run: Config of the trainings. The search replaces
    the values of the searched keys.
    """
    launch_command(config, slot=0)
    folder = open_folder(config)
    study = Study(storage_of(config), config, space, run)
    if not study.trials and (trials := sorted(folder.glob("trial_*"))):
        storage = storage_of(config)
        raise ValueError(f"{trials[0]} exists, but {storage} contains no trial. Choose another folder.")
    check_data_folders(run.data_paths, experiment=chosen_experiment())
    check_data_folders(run.test_data_path or [], experiment=None, key="test_data_path")
    introduce(study, config)
    is_stopped = run_trials(study, config, run, on_end=lambda: write_page(study, folder / PAGE_FILE))
    conclude(study, config, is_stopped=is_stopped)


def introduce(study: Study, config: SearchConfig) -> None:
    selection = study.selection
    best = "lowest" if selection.lowest_is_best else "highest"
    at_a_time = f", {config.parallel} at a time" if config.parallel > 1 else ""
    seeds = f", the mean of {config.seeds} seeds" if config.seeds > 1 else ""
    log.info(
        f"study {config.study} in {folder_of(config)}: {study.num_trials} trials{at_a_time}; "
        f"{best} {selection.metric} of the {selection.selected_by} puzzles{seeds}"
    )
    if numbers := study.unfinished():
        log.info(f"resuming trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    if selection.selected_by == "test":
        log.warning(
            "the best trial is selected on the test split, so its score is optimistic. Set "
            "validation_fraction=0.1, or report how it was selected."
        )


def conclude(study: Study, config: SearchConfig, *, is_stopped: bool) -> None:
    """Prints how many trials of the search are complete, and writes the result files.

    A grid search writes tables of all complete trials (`write_grid`). Any other search writes best.yaml, with
    the values of the searched config keys in the best trial. If no trial is complete, writes no file. If also
    no signal stopped the search, exits with status 1.
    """
    folder, best = folder_of(config), study.best()
    outcome, hint = ("stopped", " To continue, run the same command.") if is_stopped else ("done", "")
    counts = f"{study.describe_counts()} of {study.num_trials} trials"
    log.info(f"{outcome}: {counts}; page: {folder / PAGE_FILE}.{hint}")
    if config.sampler == "grid" and best is not None:
        write_grid(study, folder)
    elif best is not None:
        text = experiment_yaml(study.space.overrides(study.parameters(best)), study.describe_best())
        write_text(folder / "best.yaml", text)
        name = f"config/experiment/{config.study}.yaml"
        log.info(f"best: trial {best.number}. Copy {folder / 'best.yaml'} to {name} to use it:\n")
        log.info(text)
    elif not is_stopped:
        others = "choose another study, or increase trials to continue"
        more = "run the same command again" if config.sampler == "grid" else others
        problem = f"no trial of study {config.study} is complete"
        log.error(f"{problem}. Read the files output.log in {folder}. Then {more}.")
        raise SystemExit(EXIT_FAILURE)


def write_grid(study: Study, folder: Path) -> None:
    """Writes tables that compare the trainings of all complete trials: table.md, table.tex and table.csv.

    Also prints the table. With at least two trainings, also writes a web page, comparison.html.
    """
    runs = [folder / f"trial_{trial.number}" for trial in study.trials if trial.state == TrialState.COMPLETE]
    runs = [run for trial_folder in runs for run in (sorted(trial_folder.glob("seed_*")) or [trial_folder])]
    for name in ("table.md", "table.tex", "table.csv"):
        write_table(runs, folder / name)
    written = "table.md, .tex, .csv"
    if len(runs) > 1:
        write_comparison(runs, output=folder / "comparison.html", warn=log.warning)
        written += " and comparison.html"
    log.info(f"{(folder / 'table.md').read_text(encoding='utf-8')}\n{written} are in {folder}")


if __name__ == "__main__":
    main()
