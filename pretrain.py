"""Trains a model: the story of a run, from the command line to the last checkpoint.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

The same from Python, in processes of its own:

    import pretrain
    result = pretrain.run(["experiment=demo"], processes=2)
    result.metrics["all"]["exact_accuracy"], result.folder

Started again with the same run_name, a run goes on from its newest checkpoint.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH

import parallel.environment  # noqa: F401 - first: it sets variables that OpenMP reads when torch loads

from checkpointing.files import read_rows
from config.schema import PretrainConfig
from evaluation.results import metrics_by_set
from parallel import log
from parallel.child import run_child
from parallel.errors import abort_all, collective_errors, memory_errors
from parallel.launch import Run, check_folder_is_shared, launch
from parallel.process_group import is_main
from parallel.signals import Interruption, end_torchrun
from training.checkpoints import CheckpointManager
from training.data import RunData, Schedule, open_data
from training.evaluation import evaluate
from training.monitor import Monitor
from training.run_folder import compose_run, open_run_folder, write_status
from training.state import TrainState, build_first_state, memory_advice
from training.step import train_step


def main() -> None:
    """Launches this process as one rank of a run, and trains."""
    with launch(PretrainConfig, compose_run) as run:
        with memory_errors(memory_advice(run.config), folder=Path(run.config.checkpoint_path)):
            status = train(run)
    sys.exit(status)


def train(run: Run[PretrainConfig]) -> int:
    """Trains to the end, or until asked to stop. Every rank calls it; returns its exit status."""
    config = run.config

    # Data: which examples make which step. State of step 0: drawn from the seed; each rank keeps its part.
    data = open_data(config)
    metadata = data.dataset.metadata
    schedule = Schedule(config, data.plan)
    state = build_first_state(config, metadata, device=run.device, total_steps=schedule.total_steps)

    # Resume from the newest checkpoint, if there is one. is_logged: whether the log has the row of its step.
    checkpoints = open_checkpoints(config, data)
    with run.watchdog.paused():  # init_from may have to be downloaded
        is_logged = checkpoints.resume(state, total_steps=schedule.total_steps)

    # End here if the last step of this start (at most `max_steps`) is done and its row is logged. A run that
    # was killed in its last evaluation lacks the row, and goes on below.
    if state.step >= schedule.last_step and is_logged:
        write_end(config, schedule, state.step)
        log.info(f"nothing to do: {schedule.describe(state.step)}")
        return 0

    is_stopped = run_steps(run, state, data, schedule, checkpoints, is_logged=is_logged)

    if checkpoints.last_save_failed:
        abort_all(f"the last checkpoint could not be saved: {config.checkpoint_path} lacks the newest steps")
    stopped = f"stopped: the same command goes on from here, with run_name={config.run_name};"
    outcome = stopped if is_stopped else "done:"
    log.info(f"{outcome} {schedule.describe(state.step)}")
    return end_torchrun() if is_stopped else 0


def run_steps(
    run: Run[PretrainConfig],
    state: TrainState,
    data: RunData,
    schedule: Schedule,
    checkpoints: CheckpointManager,
    *,
    is_logged: bool,
) -> bool:
    """Runs the steps, with what is due between them; returns whether a signal has stopped the run.

    is_logged: whether the row of `state.step` is logged already.
    """
    config = run.config
    with (
        data.read_train_batches(first_step=state.step, ranks=state.ranks, device=run.device) as batches,
        checkpoints,
        Monitor(run, state, data, schedule, checkpoints, is_logged=is_logged) as monitor,
        Interruption() as interruption,
    ):
        # Evaluate one batch of each set, so that a broken evaluation fails before training.
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                checkpoints.check_metric(evaluate(config, state, data, only_first_batches=True))

        while True:
            # Save before the evaluation, so that a failure there loses nothing. `save` skips the step that it
            # saved or resumed last: here and at the end it may be called again.
            if schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Log a row: metric sums of all ranks, divided once, and the evaluation if one is due. Only
            # `monitor.log` resets the sums: a run that stops before it saves them, and the next start logs
            # the row.
            if monitor.is_row_due(state.step) and not interruption.is_agreed():
                row = monitor.reduce(state)
                if schedule.is_evaluation(state.step):
                    with monitor.paused():
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        break  # asked to stop meanwhile: the next start evaluates, and logs the row
                    row |= results
                    monitor.show_puzzles(state)
                monitor.log(state, row)

            if interruption.is_agreed() or state.step >= schedule.last_step:
                break

            # Step. The wish of any rank to stop travels with the gradients, so that a signal stops all ranks
            # after this step or the next; with local_steps it travels with the next synchronisation.
            with monitor.reading():
                set_name, batch = next(batches)
            synced = train_step(
                state,
                batch.to(run.device),
                config=config,
                rates=schedule.learning_rates(state.step + 1),
                clock=monitor.clock,
                reasoning_at=lambda step: schedule.reasoning(step, state.model.reasoning),
                is_asked_to_stop=interruption.is_requested,
            )
            interruption.record_requests(synced.stop_requests)
            monitor.step_done(state.step, synced, set_name=set_name)

            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    state.check_replicas()

        # End: save, wait for the save, write status and report. The status needs to know whether the save has
        # failed, so that the checkpoints are closed before it, not at the end of the block.
        is_stopped = interruption.is_agreed()
        with monitor.paused():  # the last checkpoint may have much to write, W&B much to send
            checkpoints.save(state)
            checkpoints.close()
            if not checkpoints.last_save_failed:
                write_end(config, schedule, state.step, lacks_row=monitor.is_row_due(state.step))
            if config.report and not is_stopped:
                report(Path(config.checkpoint_path))
            monitor.close()
    return is_stopped


def open_checkpoints(config: PretrainConfig, data: RunData) -> CheckpointManager:
    """Opens the run folder: rank 0 makes and locks it, and every rank has its log there."""
    with collective_errors():
        if config.report:
            from report.page import check_packages

            check_packages()
        folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)
    info = data.info().to_json()
    return CheckpointManager(folder, config=config, fingerprint=data.fingerprint, dataset_info=info)


def write_end(config: PretrainConfig, schedule: Schedule, step: int, *, lacks_row: bool = False) -> None:
    """Writes the file `status` of the run folder, from rank 0: the run has finished, or stopped before."""
    if is_main():
        ending = "finished" if step >= schedule.total_steps else "max_steps"
        is_stopped = step < schedule.last_step or lacks_row
        write_status(Path(config.checkpoint_path), "stopped" if is_stopped else ending, step=step)


def report(folder: Path) -> None:
    """Writes the report of a run on rank 0. A failure is a warning, and ends nothing."""
    if is_main():
        from report.page import write_report

        try:
            log.info(f"wrote {write_report(folder, warn=log.warning)}")
        except Exception as error:  # whatever it is, the training is done
            log.warning(f"there is no report: {error}")


class Trained(NamedTuple):
    """What a run has left: its folder, the metrics of the last evaluation by set, and all rows of its log."""

    folder: Path
    metrics: dict[str, dict[str, float]]
    rows: list[dict[str, Any]]


def run(overrides: Sequence[str], *, processes: int = 1) -> Trained:
    """Trains in other processes as a command line would, and shows their progress; goes on with its run_name.

    overrides: the words of the command line. Ctrl-C asks the run to stop; the run saves, and then
    KeyboardInterrupt is raised here. ValueError, one line, where the run fails.
    """
    quiet = io.StringIO()  # the run says it again
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        config = compose_run(overrides)
    if config is None:
        raise ValueError(f"{' '.join(overrides)} only asks to be shown something: drop it")
    run_child("pretrain.py", [*overrides, f"run_name={config.run_name}"], processes=processes)
    rows = [row for row, _ in read_rows(Path(config.checkpoint_path))]
    metrics = [found for row in rows if (found := metrics_by_set(row))]
    return Trained(Path(config.checkpoint_path), metrics[-1] if metrics else {}, rows)


if __name__ == "__main__":
    main()
