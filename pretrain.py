"""Trains a model: the whole course of a run, from the command line to the last checkpoint.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

From Python, in new processes:

    import pretrain
    result = pretrain.run(["experiment=demo"], processes=2)
    result.metrics["all"]["exact_accuracy"], result.folder

A run that is started again with the same run_name continues from its newest checkpoint.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # with PYTHONSAFEPATH set, Python leaves this folder out

import runtime.environment  # noqa: F401 - before torch: sets variables that OpenMP reads on loading

from config.schema import PretrainConfig
from distributed import log
from distributed.child import run_child
from distributed.errors import abort_all, collective_errors, memory_errors
from distributed.launch import Program, launch
from distributed.signals import Interruption, end_torchrun
from training.checkpoints import CheckpointManager, open_checkpoints
from training.data import RunData, open_data
from training.evaluation import evaluate, read_results
from training.monitor import Monitor
from training.run_config import compose_run
from training.run_folder import write_status
from training.state import TrainState, build_first_state, memory_advice
from training.step import train_step


def main() -> None:
    """Launches this process as one rank of a run, and trains."""
    with launch(PretrainConfig, compose_run) as program:
        advice = memory_advice(program.config, program.device)
        with memory_errors(advice, folder=Path(program.config.checkpoint_path)):
            exit_status = train(program)
    sys.exit(exit_status)


def train(program: Program[PretrainConfig]) -> int:
    """Trains to the last step, or until a signal asks to stop; returns the exit status. All ranks call it."""
    config, folder = program.config, Path(program.config.checkpoint_path)
    if config.report:
        from report.page import check_packages

        with collective_errors():
            check_packages()

    # Open the data, and the schedule: what is due after which step. Build the state of step 0 from the seed;
    # with sharded tensors or pipeline stages, each rank builds only its part.
    data = open_data(config)
    metadata, schedule = data.dataset.metadata, data.schedule
    state = build_first_state(config, metadata, device=program.device, total_steps=schedule.total_steps)

    # Resume from the newest checkpoint, if there is one. is_logged: whether the log has a row of its step.
    described = {"fingerprint": data.fingerprint, "dataset_info": data.info().to_json()}
    checkpoints = open_checkpoints(config, **described)
    with program.watchdog.paused():  # init_from may have to be downloaded
        is_logged = checkpoints.resume(state, total_steps=schedule.total_steps)

    # End here if this start has nothing left to do: its last step (`max_steps`, or the run's last) is done
    # and logged. A run that was killed in the evaluation after that step lacks the row: `run_steps` logs it.
    if state.step >= schedule.end_step and is_logged:
        write_status(folder, schedule.status(state.step), step=state.step)
        log.info(f"nothing to do: {schedule.describe(state.step)}")
        return 0

    is_stopped = run_steps(program, state, data, checkpoints, is_logged=is_logged)

    if checkpoints.last_save_failed:  # the same on all ranks, since `close`
        abort_all(f"the last checkpoint could not be saved: {config.checkpoint_path} lacks the newest steps")
    stopped = f"stopped: the same command goes on from here, with run_name={config.run_name};"
    outcome = stopped if is_stopped else "done:"
    log.info(f"{outcome} {schedule.describe(state.step)}")
    # After a stop by a signal, `end_torchrun` also ends a plain torchrun. An elastic one goes on with the
    # machines that are left, which the exit status asks for.
    return end_torchrun() if is_stopped else 0


def run_steps(
    program: Program[PretrainConfig],
    state: TrainState,
    data: RunData,
    checkpoints: CheckpointManager,
    *,
    is_logged: bool,
) -> bool:
    """Runs the steps, and what is due between steps; returns whether a signal has stopped the run.

    All ranks call it. is_logged: whether the log already has the row of `state.step`.
    """
    config, schedule, folder = program.config, data.schedule, Path(program.config.checkpoint_path)
    with (
        data.read_train_batches(first_step=state.step, ranks=state.ranks, device=program.device) as batches,
        checkpoints,
        Monitor(program, state, data, checkpoints, is_logged=is_logged) as monitor,
        Interruption(program.watchdog.is_paused) as interruption,
    ):
        # Evaluate one batch of each set, so that a broken evaluation fails before training.
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                checkpoints.best.check(evaluate(config, state, data, only_first_batches=True))

        while True:
            # Save before the evaluation, so that a failed evaluation loses nothing. Here and at the end,
            # `save` does nothing for a step that is saved already, or that was resumed.
            if schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Log a row: the metrics since the last row, over all ranks, and an evaluation if one is due.
            # `log` resets the metric sums, `reduce` does not: where a signal stops the run between the two,
            # the checkpoint saved below still has the sums, and the next start logs the row.
            if monitor.is_row_due(state.step) and not interruption.is_agreed():
                row = monitor.reduce(state)
                if schedule.is_evaluation(state.step):
                    with monitor.paused():
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        break  # a signal asked to stop: the next start evaluates, and logs the row
                    row |= results
                    monitor.show_puzzles(state)
                monitor.log(state, row)

            if interruption.is_agreed() or state.step >= schedule.end_step:
                break

            # Step. Each rank sends along with its gradients whether a signal has asked it to stop, so that
            # all ranks stop after the same step. With local_steps this is sent at the next synchronisation.
            with monitor.reading():
                set_name, batch = next(batches)
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

            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    state.check_replicas()

        # End: save, wait for the save, then write status and report, on rank 0. Checkpoints are closed before
        # the status is written: after a failed save the old status stays. `with` closes again: no effect.
        is_stopped = interruption.is_agreed()
        with monitor.paused():  # the last checkpoint may have much to write, W&B much to send
            checkpoints.save(state)
            checkpoints.close()
            if not checkpoints.last_save_failed:
                status = schedule.status(state.step, lacks_row=monitor.is_row_due(state.step))
                write_status(folder, status, step=state.step)
            if config.report and not is_stopped:
                from report.page import report_run

                report_run(folder)
            monitor.close()
    return is_stopped


class Trained(NamedTuple):
    """The results of a run: its folder, metrics[set][name] of the last evaluation, all rows of the log."""

    folder: Path
    metrics: dict[str, dict[str, float]]
    rows: list[dict[str, Any]]


def run(overrides: Sequence[str], *, processes: int = 1) -> Trained:
    """Trains in new processes, as `pretrain.py` with these command-line words does, and prints their output.

    overrides: key=value each; the run_name of an existing run continues that run. Ctrl-C asks the run to
    stop; the run saves, and then KeyboardInterrupt is raised here. Raises ValueError where the run fails.
    """
    quiet = io.StringIO()  # the child process prints the same warnings
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        config = compose_run(overrides, processes=processes)
    if config is None:
        raise ValueError(f"{' '.join(overrides)} only asks to be shown something: drop it")
    run_child("pretrain.py", [*overrides, f"run_name={config.run_name}"], processes=processes)
    rows, metrics = read_results(Path(config.checkpoint_path))
    return Trained(Path(config.checkpoint_path), metrics, rows)


if __name__ == "__main__":
    main()
