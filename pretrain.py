"""Trains a model. `train` prepares a run, and `run_steps` has the loop over its training steps.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

From Python, in new processes:

    import pretrain
    result = pretrain.run(["experiment=demo"], processes=2)
    result.metrics["all"]["exact_accuracy"], result.folder

A launch is one start of pretrain.py, on one or many processes. A run may need several launches: with the same
run_name, a launch continues from the newest checkpoint of the run.

Every process is one rank, and runs this file. training/step.py contains the training step, and lists its
modes.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # With PYTHONSAFEPATH, Python does not add this folder.

import runtime.environment  # noqa: F401 - Sets variables that OpenMP reads when torch is imported.

from config.schema import PretrainConfig
from distributed import log
from distributed.child import run_child
from distributed.errors import abort_all, collective_errors, memory_errors
from distributed.launch import Program, launch
from distributed.signals import Interruption, end_torchrun
from evaluation.compilation import compiler_cache_errors
from training.checkpoints import CheckpointManager, open_checkpoints
from training.data import RunData, open_data
from training.evaluation import evaluate, read_results
from training.monitor import Monitor
from training.run_config import compose_run
from training.run_folder import write_status
from training.state import TrainState, build_first_state, memory_advice
from training.step import train_step


def main() -> None:
    """Trains with the config on the command line. Every process of a run calls it, as one rank."""
    with launch(PretrainConfig, compose_run) as program:
        # The two contexts below turn a lack of memory, or a damaged cache of the compiler, into a message of
        # one line. If a GPU lacks memory, `memory_errors` also writes a snapshot of its memory to `folder`.
        advice = memory_advice(program.config, program.device)
        folder = Path(program.config.checkpoint_path)
        with memory_errors(advice, folder=folder), compiler_cache_errors():
            exit_status = train(program)
    sys.exit(exit_status)


def train(program: Program[PretrainConfig]) -> int:
    """Trains until the last step, or until a signal such as Ctrl-C stops the run. All ranks call it.

    Returns the exit status of this process.

    program: Config of the run, device of this rank, and watchdog.
    """
    config, folder = program.config, Path(program.config.checkpoint_path)
    if config.report:
        from report.page import check_packages

        with collective_errors():  # an error on one rank ends all ranks
            check_packages()  # before the training, because the report is written after it

    # Open the datasets. The schedule says after which steps a log row, an evaluation or a checkpoint is due.
    data = open_data(config)
    metadata, schedule = data.dataset.metadata, data.schedule
    # Build the state of step 0 from the seed: weights, optimizer state, moving averages of the weights
    # (EMA), and the carry. A slot is one position of the global batch. The carry contains a puzzle and a
    # latent state for each slot of this rank. With pipeline or tensor parallelism, each rank holds only its
    # part of the weights. With a sharded optimizer, each rank holds only its part of the optimizer state.
    state = build_first_state(config, metadata, device=program.device, total_steps=schedule.total_steps)

    # Lock the run folder. Load the checkpoint that the key `resume` selects, by default the newest one. If
    # the run has no checkpoint, load the weights that `init_from` names, if it is set.
    checkpoints = open_checkpoints(config, data)
    with program.watchdog.paused():  # The watchdog ends a run that hangs. A download for `init_from` is slow.
        # `is_logged` is False if the row of the loaded step is missing in metrics.jsonl. Step 0 needs no row.
        is_logged = checkpoints.resume(state, total_steps=schedule.total_steps)
    # Find leaks: test puzzles on which this run trains, or on which the loaded weights were trained.
    # `trained_on` returns all puzzles that the model will have seen at the end of the run. The text `model`
    # is part of the warning.
    training_puzzles = checkpoints.trained_on(schedule.total_steps)
    data.leaks.broadcast_find(training_puzzles, model="the checkpoint that this run started from")

    # If the row of the loaded step is missing, `run_steps` makes it first. Example: The run was killed while
    # it evaluated. If the row exists, there is nothing to do in two cases:
    # - The loaded step is the last step of this launch: `max_steps`, or the last step of the run.
    # - The evaluation of the loaded step ended the run: the last `stop_patience` evaluations had no new best.
    is_evaluated = is_logged and schedule.is_evaluation(state.step)
    ends_early = is_evaluated and checkpoints.best.ends_early(config.stop_patience)
    is_last = is_logged and state.step >= schedule.end_step
    if ends_early or is_last:
        status = "finished" if ends_early else schedule.status(state.step)
        write_status(folder, status, step=state.step)
        log.info(f"nothing to do: {schedule.describe(state.step)}")
        return 0

    is_stopped = run_steps(program, state, data, checkpoints, is_logged=is_logged)

    if checkpoints.last_save_failed:  # equal on all ranks, because rank 0 has broadcast it
        abort_all(f"the last checkpoint was not saved: {config.checkpoint_path} lacks the newest steps")
    reached = schedule.describe(state.step)
    if not is_stopped:
        log.info(f"done: {reached}")
        return 0
    log.info(f"stopped: {reached}. To continue, run the same command with run_name={config.run_name}.")
    # A signal stopped the run. `end_torchrun` usually returns exit status 0. On several nodes, it first ends
    # torchrun on all of them. If torchrun is elastic (--nnodes MIN:MAX), it returns a status with which
    # torchrun starts the processes again on the nodes that are left.
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

    Between steps, logs metrics, evaluates and saves checkpoints, as the schedule decides. If local_steps is
    above 1, each rank trains by itself, and the ranks merge their weights every `local_steps` steps. Log
    rows, evaluations and checkpoints that are due between two merges wait for the next merge.

    program: Config, device and watchdog. state: State of the run, changed in place. data: Training and test
    data. checkpoints: Saves the checkpoints. is_logged: False if the row of step `state.step` is missing
    in metrics.jsonl. True at step 0, which needs no row.

    Returns whether a signal such as Ctrl-C stopped the run.
    """
    config, schedule, folder = program.config, data.schedule, Path(program.config.checkpoint_path)
    # - batches: Iterator over the batches of this rank, from the step after `state.step`.
    # - checkpoints: Saves checkpoints in a thread.
    # - monitor: Measures and logs the steps. `monitor.paused()` stops its clock and the watchdog for a while.
    # - interruption: Turns a signal such as Ctrl-C into a request to stop. If one rank has a request,
    #   `is_agreed()` becomes True on all ranks, after the same step. After a signal, a rank that
    #   does not finish its step within a time limit exits without saving. While the watchdog is paused, the
    #   limit starts only at a second signal.
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
        # Evaluate one batch of each test set, so that an error in the evaluation appears before the training.
        # `check` warns if the results lack the metric that the key `keep_best` names.
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                results = evaluate(config, state, data, only_first_batches=True)
                checkpoints.best.check(results)

        ends_early = False
        while True:
            # Save a checkpoint if one is due. training/checkpoints.py describes how it gets to the disk. Save
            # before evaluating, so that a failed evaluation loses no training.
            if schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Log a row of metrics.jsonl. It contains the training metrics since the previous row, over all
            # ranks. If an evaluation is due, it also contains the results. After a signal, the row is left to
            # the next launch, so that the run ends soon.
            if monitor.is_row_due(state.step) and not interruption.is_agreed():
                row = monitor.reduce(state)
                has_evaluation = schedule.is_evaluation(state.step)
                if has_evaluation:
                    with monitor.paused("evaluating"):
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        # A signal interrupted the evaluation, so this row is not logged. The sums of the
                        # training metrics are kept, and are in the checkpoint. The next launch evaluates
                        # again, and logs this row from these sums.
                        break
                    row |= results
                    monitor.show_puzzles(state)
                monitor.log(state, row)
                if has_evaluation:
                    ends_early = checkpoints.best.ends_early(config.stop_patience)

            # Stop if the evaluation ends the run (`stop_patience`), after a signal, or at the last step.
            if ends_early or interruption.is_agreed() or state.step >= schedule.end_step:
                break

            # Read this rank's part of the next global batch: one puzzle for each slot. A slot that is still
            # thinking ignores the puzzle that the batch has for it. A dataset may have several training
            # sets. A batch contains puzzles of one of them, `set_name`. With a curriculum, the datasets
            # depend on the number of the step.
            with monitor.reading():
                set_name, batch = next(batches)

            # Run one training step. It adds 1 to `state.step`. The schedule gives the learning rates of the
            # step. `reasoning` has its number of cycles (how often a thinking step runs the blocks) and its
            # noise. A curriculum may change the number of cycles.
            next_step = state.step + 1
            result = train_step(
                state,
                batch.to(program.device),
                config=config,
                rates=schedule.learning_rates(next_step),
                clock=monitor.clock,
                reasoning=schedule.reasoning(next_step, state.model.reasoning),
                is_asked_to_stop=interruption.is_requested,
            )
            # A signal may reach only one rank, but all ranks must stop after the same step. So each rank
            # sends a stop request, 0 or 1, in the training step. `result.stop_requests` is their sum over
            # ranks, or None if the step sent nothing (local_steps > 1, between merges). If the sum is
            # positive, `is_agreed()` becomes True. On CUDA, it becomes True one step later, because the host
            # would have to wait for the GPU now.
            interruption.record_requests(result.stop_requests)
            monitor.step_done(state.step, result, set_name=set_name)

            # At some steps, check that all copies of a tensor, such as a weight, are equal on all ranks. If
            # they differ, the run ends.
            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    state.check_replicas()

        # End the launch. `save` does nothing if the step is already saved. `close` waits until the
        # checkpoint is written. If it could not be written, the status file keeps its old status. The
        # checkpoints and the monitor are closed here, and not by the end of the `with` block, because the
        # watchdog must be paused while they wait.
        is_stopped = interruption.is_agreed()
        with monitor.paused():  # writing the checkpoint and sending data to W&B may take long
            checkpoints.save(state)
            checkpoints.close()
            if not checkpoints.last_save_failed:
                # If a signal came before the row of this step was logged, the row is missing. The status is
                # then "stopped", also at the last step.
                lacks_row = monitor.is_row_due(state.step)
                status = "finished" if ends_early else schedule.status(state.step, lacks_row=lacks_row)
                write_status(folder, status, step=state.step)
            if config.report and not is_stopped:
                from report.page import report_run

                report_run(folder)
            monitor.close()
    return is_stopped


class Trained(NamedTuple):
    """The result of `run`.

    Attributes:
        folder: Run folder.
        metrics: Metrics of the last evaluation, as {test set: {metric: value}}.
        rows: All rows of metrics.jsonl, the log of the run. Each is {"step": step, metric: value, ...}.
    """

    folder: Path
    metrics: dict[str, dict[str, float]]
    rows: list[dict[str, Any]]


def run(overrides: Sequence[str], *, processes: int = 1) -> Trained:
    """Trains in new processes, like `pretrain.py` from the command line, and prints their output.

    Ctrl-C stops the run: the run saves a checkpoint, then this function raises KeyboardInterrupt.

    Args:
        overrides: Command-line arguments of pretrain.py, such as "lr=1e-3". With the run_name of an existing
            run, that run continues.
        processes: Number of processes.

    Returns:
        The run folder, the metrics of the last evaluation, and all rows of metrics.jsonl.

    Raises:
        ValueError: If the config is wrong, or the run fails.
    """
    # Discard all output of this call, because the new processes print it again.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        config = compose_run(overrides, processes=processes)
    if config is None:
        raise ValueError(f"{' '.join(overrides)} prints help instead of training. Remove --help or --cfg.")
    run_child("pretrain.py", [*overrides, f"run_name={config.run_name}"], processes=processes)
    rows, metrics = read_results(Path(config.checkpoint_path))
    return Trained(Path(config.checkpoint_path), metrics, rows)


if __name__ == "__main__":
    main()
