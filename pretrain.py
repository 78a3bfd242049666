"""Trains a model. `train` and `run_steps` show a run from the command line to the last checkpoint.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

From Python, in new processes:

    import pretrain
    result = pretrain.run(["experiment=demo"], processes=2)
    result.metrics["all"]["exact_accuracy"], result.folder

If a run is launched again with the same run_name, it continues from its newest checkpoint.

training/step.py contains the training step, with a table of its modes.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # this folder; with PYTHONSAFEPATH, Python omits it

import runtime.environment  # noqa: F401 - before torch, because OpenMP reads these variables on loading

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
    """Runs this process as one rank of a run. `launch` reads the command line and connects the ranks."""
    with launch(PretrainConfig, compose_run) as program:
        advice = memory_advice(program.config, program.device)
        folder = Path(program.config.checkpoint_path)
        with memory_errors(advice, folder=folder), compiler_cache_errors():
            exit_status = train(program)
    sys.exit(exit_status)


def train(program: Program[PretrainConfig]) -> int:
    """Trains until the last step, or until a signal stops the run. All ranks call it.

    Returns the exit status of this process.
    """
    config, folder = program.config, Path(program.config.checkpoint_path)
    if config.report:
        from report.page import check_packages

        with collective_errors():
            check_packages()

    # Open the datasets. The schedule says which work is due after which step: a log row, an evaluation, a
    # checkpoint, or a comparison of replicas.
    data = open_data(config)
    metadata, schedule = data.dataset.metadata, data.schedule
    # Build the state of step 0 from the seed: weights, optimizer state, averages (EMA), and the carry. A slot
    # is one position of the global batch. The carry holds the puzzle and the latent state of each slot of
    # this rank. With a mesh or a sharded optimizer, each rank holds only its part of the weights or of their
    # optimizer state.
    state = build_first_state(config, metadata, device=program.device, total_steps=schedule.total_steps)

    # Lock the run folder. Load the checkpoint that the key `resume` selects (by default the newest one), or
    # the weights that `init_from` names. `is_logged` is True at step 0, or if metrics.jsonl contains a row of
    # the loaded step.
    checkpoints = open_checkpoints(
        config,
        fingerprint=data.fingerprint,
        test_fingerprint=data.test_fingerprint,
        dataset_info=data.info().to_json(),
        trained_on=data.trained_on,
        dataset=data.dataset,
    )
    with program.watchdog.paused():  # a download for `init_from` may take long
        is_logged = checkpoints.resume(state, total_steps=schedule.total_steps)
    # Find the test puzzles on which the loaded weights or this run are trained.
    trained = checkpoints.trained_on(schedule.total_steps)
    data.leaks.broadcast_find(trained, model="the checkpoint that this run started from")

    # Return if there is nothing to do: `stop_patience` ends the run at this step, or the last step of this
    # launch (`max_steps`, or the last step of the run) is done and logged. If the row of the last step is
    # missing, because the run was killed during its last evaluation, do not return: `run_steps` evaluates and
    # logs the row without training.
    ends_early = (
        is_logged and schedule.is_evaluation(state.step) and checkpoints.best.ends_early(config.stop_patience)
    )
    if ends_early or (state.step >= schedule.end_step and is_logged):
        write_status(folder, "finished" if ends_early else schedule.status(state.step), step=state.step)
        log.info(f"nothing to do: {schedule.describe(state.step)}")
        return 0

    is_stopped = run_steps(program, state, data, checkpoints, is_logged=is_logged)

    if checkpoints.last_save_failed:  # `checkpoints.close` in `run_steps` has broadcast it from rank 0
        abort_all(f"the last checkpoint was not saved: {config.checkpoint_path} lacks the newest steps")
    reached = schedule.describe(state.step)
    if not is_stopped:
        log.info(f"done: {reached}")
        return 0
    log.info(f"stopped: {reached}. To continue, run the same command with run_name={config.run_name}.")
    # After a signal, `end_torchrun` stops torchrun on every node, and returns 0. It does not stop an elastic
    # torchrun (--nnodes MIN:MAX). There it returns a status with which torchrun starts the processes again,
    # on the machines that remain.
    return end_torchrun()


def run_steps(
    program: Program[PretrainConfig],
    state: TrainState,
    data: RunData,
    checkpoints: CheckpointManager,
    *,
    is_logged: bool,
) -> bool:
    """Runs the training steps, and between steps the work that is due. All ranks call it.

    With `local_steps`, each rank trains separately, and the ranks merge their weights every few steps. The
    weights of the ranks are equal only after a merge. Work that falls due between two merges is done after
    the next merge.

    is_logged: Whether metrics.jsonl already contains the row of `state.step`. True at step 0.

    Returns whether a signal stopped the run.
    """
    config, schedule, folder = program.config, data.schedule, Path(program.config.checkpoint_path)
    with (
        data.read_train_batches(first_step=state.step, ranks=state.ranks, device=program.device) as batches,
        checkpoints,
        Monitor(program, state, data, checkpoints, is_logged=is_logged) as monitor,
        Interruption(program.watchdog.is_paused) as interruption,
    ):
        # Evaluate one batch of each set, so that an error in the evaluation appears before the training.
        # `check` warns if the evaluation lacks the metric `keep_best`.
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                checkpoints.best.check(evaluate(config, state, data, only_first_batches=True))

        ends_early = False
        while True:
            # Save a checkpoint if one is due. training/checkpoints.py describes how it gets to the disk.
            # Save before evaluating, so that a failed evaluation loses no training.
            if schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Log a row of metrics.jsonl: the training metrics since the last row, summed over all ranks, and
            # the evaluation if one is due. If a signal interrupts the evaluation, this row is not logged. The
            # next launch evaluates again, and logs the row. It finds the metric sums in the checkpoint,
            # because only `monitor.log` resets them.
            if monitor.is_row_due(state.step) and not interruption.is_agreed():
                row = monitor.reduce(state)
                if schedule.is_evaluation(state.step):
                    with monitor.paused("evaluating"):
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        break
                    row |= results
                    monitor.show_puzzles(state)
                monitor.log(state, row)
                if schedule.is_evaluation(state.step):
                    ends_early = checkpoints.best.ends_early(config.stop_patience)

            # Stop after an evaluation that ends the run (`stop_patience`), a signal, or the last step.
            if ends_early or interruption.is_agreed() or state.step >= schedule.end_step:
                break

            # Read this rank's part of the next global batch: one puzzle for each slot. Slots that have not
            # halted ignore theirs. All puzzles of a batch are from one training set. With a curriculum, the
            # step decides which data are read.
            with monitor.reading():
                set_name, batch = next(batches)

            # Run one training step. It adds 1 to `state.step`. `rates` are the learning rates of the step.
            # `reasoning` contains the number of cycles, and a curriculum may change it between steps.
            #
            # A signal may reach only one rank, but all ranks must stop after the same step. So each rank
            # sends a stop request (0 or 1) together with its gradients, and all ranks stop if the sum over
            # ranks, `result.stop_requests`, is positive. `record_requests` reads this sum. On CUDA, it reads
            # the sum of the step before, so that the host does not wait for the device. With `local_steps`,
            # requests are sent at a merge. After other steps, the sum is None.
            result = train_step(
                state,
                batch.to(program.device),
                config=config,
                rates=schedule.learning_rates(state.step + 1),
                clock=monitor.clock,
                reasoning=schedule.reasoning(state.step + 1, state.model.reasoning),
                is_asked_to_stop=interruption.is_requested,
            )
            interruption.record_requests(result.stop_requests)
            monitor.step_done(state.step, result, set_name=set_name)

            # Compare the tensors that should be equal on several ranks, and end the run if they differ.
            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    state.check_replicas()

        # End the run: save the last step and wait until it is written. Then rank 0 writes the status and the
        # report. After a failed save, the old status stays. `checkpoints` and `monitor` are closed here,
        # because the watchdog must be paused meanwhile. The `with` block closes them after an error.
        is_stopped = interruption.is_agreed()
        with monitor.paused():  # writing the checkpoint and sending data to W&B may take long
            checkpoints.save(state)
            checkpoints.close()
            if not checkpoints.last_save_failed:
                # The row of this step is missing if a signal has interrupted its evaluation.
                status = schedule.status(state.step, lacks_row=monitor.is_row_due(state.step))
                write_status(folder, "finished" if ends_early else status, step=state.step)
            if config.report and not is_stopped:
                from report.page import report_run

                report_run(folder)
            monitor.close()
    return is_stopped


class Trained(NamedTuple):
    """The result of `run`.

    Attributes:
        folder: Run folder.
        metrics: Metrics of the last evaluation, as {set: {metric: value}}.
        rows: All rows of metrics.jsonl.
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
    quiet = io.StringIO()  # discard the warnings, because the new processes print them again
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        config = compose_run(overrides, processes=processes)
    if config is None:
        raise ValueError(f"{' '.join(overrides)} prints help instead of training. Remove --help or --cfg.")
    run_child("pretrain.py", [*overrides, f"run_name={config.run_name}"], processes=processes)
    rows, metrics = read_results(Path(config.checkpoint_path))
    return Trained(Path(config.checkpoint_path), metrics, rows)


if __name__ == "__main__":
    main()
