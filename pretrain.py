"""Trains a model. `train` prepares a run, and `run_steps` contains the training loop.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

From Python, in new processes:

    import pretrain
    result = pretrain.run(["experiment=demo"], processes=2)
    result.metrics["all"]["exact_accuracy"], result.folder

`result.metrics` is {name of a test set: its metrics}. Most datasets have one test set, named "all". The test
sets are those of `data_path` (and of the stages of a `curriculum`).

A launch is one start of pretrain.py, on one or many processes. A run may need several launches. With the same
run folder (such as the same run_name), a launch continues from the newest undamaged checkpoint of the run.
With resume=never, a launch ends with an error if the run already has a checkpoint.

Every process of a launch is one rank, and calls `main`. training/step.py contains the training step.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # Python does this itself, except with PYTHONSAFEPATH.

import runtime.environment  # noqa: F401 - Sets variables that OpenMP reads when torch is imported.

from config.schema import PretrainConfig
from distributed import log
from distributed.child import run_child
from distributed.errors import abort_all, collective_errors, memory_errors
from distributed.launch import Program, launch
from distributed.signals import Interruption, end_torchrun
from evaluation.compilation import compiler_cache_errors
from training.checkpoints import CheckpointManager
from training.data import RunData, open_data
from training.evaluation import evaluate, read_results
from training.monitor import Monitor
from training.run_config import compose_run, words_to_resume
from training.run_folder import open_run_folder, write_status
from training.state import TrainState, build_first_state, memory_advice
from training.step import train_step


def main() -> None:
    """Trains with the config on the command line. Every process of a launch calls it, as one rank."""
    with launch(PretrainConfig, compose_run) as program:
        # Out-of-memory errors, and errors of the compiler's cache, become a message of one line.
        advice = memory_advice(program.config, program.device)
        folder = Path(program.config.checkpoint_path)
        with memory_errors(advice, folder=folder), compiler_cache_errors():
            exit_status = train(program)
    sys.exit(exit_status)


def train(program: Program[PretrainConfig]) -> int:
    """Trains until the run or this launch ends, or until a signal stops it. All ranks call it.

    Returns the exit status of this process.
    """
    config, folder = program.config, Path(program.config.checkpoint_path)
    if config.report:
        from report.page import check_packages, report_run

        with collective_errors():  # an error on one rank ends all ranks
            check_packages()  # now, so that the run does not fail at its end

    # Open the datasets. The schedule says after which steps a log row, an evaluation or a checkpoint is due,
    # and which settings each step has, such as the learning rate. The run ends at step `total_steps` at the
    # latest, and this launch at step `end_step` (config key `max_steps`).
    data = open_data(config)
    metadata, schedule = data.dataset.metadata, data.schedule
    # Build the state of step 0: weights, optimizer state, and slots (positions of the batch) without puzzles.
    state = build_first_state(config, metadata, device=program.device, total_steps=schedule.total_steps)

    open_run_folder(config)
    checkpoints = CheckpointManager.of_run(config, data)
    # Load the first of these that applies:
    # 1. the newest undamaged checkpoint of the run,
    # 2. the checkpoint that the config key `resume` names,
    # 3. the weights that the config key `init_from` names.
    # Loading may take long, so pause the watchdog. It ends a run of several ranks if a step takes too long.
    with program.watchdog.paused():
        # `is_logged`: metrics.jsonl contains the row of the loaded step. It does not if, for example, the
        # last launch stopped between saving the checkpoint and logging the row. Then `run_steps` logs it.
        is_logged = checkpoints.resume(state, total_steps=schedule.total_steps)
    # Compare the test puzzles with the training puzzles of this run, and of the checkpoint that it starts
    # from. If puzzles are equal, log a warning, or end the run with an error (config key `leaks`). Without a
    # checkpoint, this repeats the comparison in `open_data`.
    training_puzzles = checkpoints.trained_at(schedule.total_steps)
    data.leaks.broadcast_find(training_puzzles, model="the checkpoint that this run started from")

    # If the row is logged and no step is left to run, write the status and end.
    if is_logged:
        # Whether `stop_patience` has ended the run. That is possible only after an evaluation.
        ends_early = schedule.is_evaluation(state.step) and checkpoints.best.ends_early(config.stop_patience)
        if ends_early or state.step >= schedule.end_step:
            status = "finished" if ends_early else schedule.status(state.step)
            write_status(folder, status, step=state.step)
            log.info(f"nothing to do: {schedule.describe(state.step)}")
            if config.report:  # the run may have been finished before this key was set
                with program.watchdog.paused():
                    report_run(folder, program.device)
            return 0

    is_stopped = run_steps(program, state, data, checkpoints, is_logged=is_logged)

    # If the last save failed, all ranks know it, and `run_steps` has written the status "failed".
    if checkpoints.last_save_failed:
        abort_all(f"the last checkpoint was not saved: {config.checkpoint_path} lacks the newest steps")
    reached = schedule.describe(state.step)
    if not is_stopped:
        log.info(f"done: {reached}")
        return 0
    log.info(f"stopped: {reached}. To continue, run the same command with {words_to_resume(config)}.")
    # A signal may have reached only one of several machines, so end torchrun on all of them. With torchrun
    # --nnodes MIN:MAX, do not end it. The exit status makes it restart the processes on the other machines.
    return end_torchrun()


def run_steps(
    program: Program[PretrainConfig],
    state: TrainState,
    data: RunData,
    checkpoints: CheckpointManager,
    *,
    is_logged: bool,
) -> bool:
    """Runs the training steps. All ranks call it.

    Between steps, logs metrics, evaluates and saves checkpoints.

    A log row may be delayed. If a signal stops a launch before it logs the row of a step, the next launch
    logs the row first.

    Returns whether a signal such as Ctrl-C stopped the run.

    is_logged: Whether metrics.jsonl contains the row of the current step. If False, this function first logs
    the row, if the step has one (`Schedule.has_row`).
    """
    config, schedule, folder = program.config, data.schedule, Path(program.config.checkpoint_path)
    # - batches: Iterator of pairs (name of a training set, one new puzzle for each slot of this rank). With
    #   LDT, a puzzle may have several right answers, up to `num_answers`.
    # - checkpoints: Saves checkpoints, by default in the background. If the `with` block ends with an error,
    #   waits at most 60 s for the checkpoint that is being saved.
    # - monitor: Measures and logs the steps. `monitor.paused()` is for work other than training steps. It
    #   stops the clock of the steps and pauses the watchdog.
    #   The monitor also ends the run with an error if a loss or gradient norm was not finite. It checks this
    #   in `paused` and `reduce`, and on a CPU also in `step_done`.
    # - interruption: Catches signals such as Ctrl-C. `is_requested()`: this rank has received a signal.
    #   `is_agreed()`: all ranks know that some rank has received one. `is_agreed()` becomes True after the
    #   same step on all ranks, so that they stop together.
    with (
        data.read_train_batches(
            first_step=state.step,
            ranks=state.ranks,
            device=program.device,
            num_answers=state.model.network.num_answers,
            seed=config.seed,
        ) as batches,
        checkpoints,
        Monitor(program, state, data, checkpoints, is_logged=is_logged) as monitor,
        Interruption(program.watchdog.is_paused) as interruption,
    ):
        # Evaluate one batch of each set, so that an error in the evaluation appears before the training.
        # `check` warns if the results lack the metric that selects the best checkpoint (`keep_best`).
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                results = evaluate(config, state, data, only_first_batches=True)
                checkpoints.best.check(results)

        # Each pass of the loop first does what is due after the current step: save a checkpoint, evaluate,
        # log a row. Then it runs the next training step.
        ends_early = False
        while True:
            # The checkpoint is saved first, so that it exists if the evaluation fails.
            if schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Log a row. It contains the training metrics of all ranks since the previous row (`reduce`). If
            # an evaluation is due, it also contains the results. After a signal, leave the row to the next
            # launch, so that this launch ends soon.
            if monitor.is_row_due(state.step) and not interruption.is_agreed():
                row = monitor.reduce(state)
                has_evaluation = schedule.is_evaluation(state.step)
                if has_evaluation:
                    with monitor.paused("evaluating"):
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        # A signal interrupted the evaluation. The next launch evaluates again, and logs the
                        # row. The checkpoint of this step contains the metric sums for it, because only
                        # `monitor.log` resets them.
                        break
                    row |= results
                    monitor.show_puzzles(state)
                monitor.log(state, row)
                if has_evaluation:  # `log` has recorded the results
                    ends_early = checkpoints.best.ends_early(config.stop_patience)

            # Stop if the evaluation ends the run (`stop_patience`), after a signal, or at the last step.
            if ends_early or interruption.is_agreed() or state.step >= schedule.end_step:
                break

            # `set_name` is the name of the training set that contains the puzzles.
            with monitor.reading():
                set_name, new_puzzles = next(batches)

            next_step = state.step + 1
            result = train_step(  # increases state.step
                state,
                new_puzzles.to(program.device),
                config=config,
                rates=schedule.learning_rates(next_step),
                clock=monitor.clock,
                reasoning=schedule.reasoning(next_step, state.model.reasoning),
                is_asked_to_stop=interruption.is_requested,
            )
            # A signal may reach only one rank, but all ranks must stop after the same step. `train_step`
            # returns the sum of their stop requests. (With local_steps > 1, the sum is None in a step without
            # a merge.) If the sum is positive, `is_agreed()` becomes True on all ranks. On CUDA, it becomes
            # True one sum later, so that the CPU does not wait for the GPU.
            interruption.record_requests(result.stop_requests)
            monitor.step_done(state.step, result, set_name=set_name)

            # End the run with an error if ranks have different copies of a tensor, such as a weight.
            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    state.check_replicas()

        is_stopped = interruption.is_agreed()
        with monitor.paused():  # writing the checkpoint and sending data to W&B may take long
            checkpoints.save(state)  # does nothing if this step was saved before
            checkpoints.close()  # waits until the files are written
            # After a signal, the row of the last step may be missing. Then the status is "stopped", and the
            # next launch logs the row.
            lacks_row = monitor.is_row_due(state.step)
            status = "finished" if ends_early else schedule.status(state.step, lacks_row=lacks_row)
            write_status(folder, "failed" if checkpoints.last_save_failed else status, step=state.step)
            if config.report and not is_stopped:
                from report.page import report_run

                report_run(folder, program.device)
            monitor.close()
    return is_stopped


class RunResult(NamedTuple):
    """The result of `run`.

    Attributes:
        folder: Run folder.
        metrics: Metrics of the last evaluation, {test set: {metric: value}}, for the test sets of the
            training folders. `rows` contains all metrics, such as those of `test_data_path`.
        rows: All rows of metrics.jsonl, the log of the run. Each is {"step": step, metric: value, ...}.
    """

    folder: Path
    metrics: dict[str, dict[str, float]]
    rows: list[dict[str, Any]]


def run(overrides: Sequence[str], *, processes: int = 1) -> RunResult:
    """Trains in new processes, like `pretrain.py` from the command line, and prints their output.

    On Ctrl-C, the run saves a checkpoint if the training steps have begun, and stops. This function then
    raises KeyboardInterrupt.

    Args:
        overrides: Command-line arguments of pretrain.py, such as "lr=1e-3". To continue a run, pass its
            run_name.
        processes: Number of processes.

    Returns:
        The run folder, the metrics of the last evaluation, and all rows of metrics.jsonl.

    Raises:
        ValueError: If the config is wrong, or if the new processes end with an error.
    """
    # Discard what `compose_run` prints, because the new processes print it again.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        config = compose_run(overrides, processes=processes)
    if config is None:
        raise ValueError(f"{' '.join(overrides)} prints help instead of training. Remove --help or --cfg.")
    # `compose_run` has chosen a run_name if `overrides` has none.
    run_child("pretrain.py", [*overrides, f"run_name={config.run_name}"], processes=processes)
    rows, metrics = read_results(Path(config.checkpoint_path))
    return RunResult(Path(config.checkpoint_path), metrics, rows)


if __name__ == "__main__":
    main()
