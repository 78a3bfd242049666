"""Trains a model: the story of a run, from the command line to the last checkpoint.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

Started again with the same run_name, a run goes on from its newest checkpoint.
"""

import functools
from pathlib import Path

from config.schema import PretrainConfig
from dataset.description import read_info
from dataset.loader import PuzzleDataset, read_batches
from optimizers.schedule import learning_rates
from parallel import log
from parallel.collectives import check_replicas
from parallel.errors import abort_all, collective_errors
from parallel.launch import Run, check_folder_is_shared, launch
from parallel.process_group import is_main
from parallel.signals import SIGNALS, Interruption, end_torchrun
from training.checkpoints import CheckpointManager
from training.data import RunData, Schedule, open_data, reasoning_at
from training.evaluation import evaluate
from training.monitor import Monitor
from training.run_folder import compose_run, open_run_folder, write_status
from training.state import TrainState, build_replicated_state
from training.step import train_step


def main() -> None:
    """Launches this process as one rank of a run, and trains."""
    with launch(PretrainConfig, compose_run) as run:
        train(run)


def train(run: Run[PretrainConfig]) -> None:
    """Trains to the end, or until asked to stop. Every rank calls it."""
    config = run.config

    # Data: which examples make which step. Model and optimizers: drawn from the seed, equal on all ranks.
    data = open_data(config)
    schedule = Schedule(config, data.plan)
    metadata, total_steps = data.dataset.metadata, schedule.total_steps
    state = build_replicated_state(config, metadata, device=run.device, total_steps=total_steps)

    # Resume from the newest checkpoint, if there is one.
    checkpoints = open_checkpoints(config, data)
    with run.watchdog.paused():  # init_from may have to be downloaded
        is_reported = checkpoints.resume(state)
    has_nothing_to_do = state.step >= schedule.last_step and is_reported
    if has_nothing_to_do:
        write_end(config, state.step, is_finished=state.step == total_steps)
        log.info(f"nothing to do: {schedule.describe(state.step)}")
        return

    is_stopping = run_steps(run, state, data, schedule, checkpoints, is_reported=is_reported)

    if checkpoints.last_save_failed:
        abort_all(f"the last checkpoint could not be saved: {config.checkpoint_path} lacks the newest steps")
    outcome = "stopped: the same command goes on from here;" if is_stopping else "done:"
    log.info(f"{outcome} {schedule.describe(state.step)}")
    if is_stopping:
        end_torchrun()


def run_steps(
    run: Run[PretrainConfig],
    state: TrainState,
    data: RunData,
    schedule: Schedule,
    checkpoints: CheckpointManager,
    *,
    is_reported: bool,
) -> bool:
    """Runs the steps, with what is due between them; returns whether a signal has stopped the run.

    is_reported: whether the log has the row of `state.step` already.
    """
    config, total_steps = run.config, schedule.total_steps
    reasoning_of_step = functools.partial(reasoning_at, plan=data.plan, reasoning=state.model.reasoning)
    share = {"rank": state.ranks.index, "world_size": state.ranks.size}
    dataset = PuzzleDataset(data.dataset.folders, "train", data.plan, first_step=state.step, **share)
    # The reader is forked before anything here starts a thread: W&B does, and so does autograd.
    with (
        read_batches(dataset, device=run.device, ignored_signals=SIGNALS) as batches,
        checkpoints,
        Monitor(run, state, data, schedule, is_reported=is_reported) as monitor,
        Interruption() as interruption,
    ):
        # Evaluate one batch of each set, so that a broken evaluation fails before training.
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                evaluate(config, state, data, only_first_batches=True)

        while True:
            is_stopping = interruption.is_agreed()
            is_done = is_stopping or state.step >= schedule.last_step

            # Save before the report and its evaluation, so that a failure there loses nothing.
            if is_done or schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Report: metric sums of all ranks, divided once; one row for a step, with its evaluation.
            if monitor.is_due(state.step) and not is_stopping:
                row = monitor.reduce(state, checkpoints.pop_stall_seconds())
                if schedule.is_evaluation(state.step):
                    with monitor.paused():
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        continue  # asked to stop: save and end above; the next start evaluates
                    row |= results
                    monitor.show_puzzles(state)
                row |= checkpoints.record_metrics(state.step, row)
                monitor.log(state, row)
            if is_done:
                break
            monitor.record_checkpoints(checkpoints.pop_saved())

            # Step: forward, backward, sum over ranks, update, average. The wish of any rank to stop travels
            # with it, so that a signal stops all ranks after this step or the next; with local_steps, after
            # the next synchronisation.
            with monitor.reading():
                set_name, batch = next(batches)
            result = train_step(
                state,
                batch.to(run.device),
                config=config,
                rates=learning_rates(config, state.step + 1, total_steps=total_steps),
                clock=monitor.clock,
                reasoning_at=reasoning_of_step,
                is_asked_to_stop=interruption.is_requested,
            )
            interruption.record_requests(result.synced.stop_requests)
            monitor.step_done(state.step, result, set_name=set_name)

            # Replicas: every rank must hold the same weights.
            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    check_replicas(state.replicated_tensors(), step=state.step)

        with monitor.paused():  # W&B may have much to send, the last checkpoint much to write
            is_finished = state.step == total_steps and not monitor.is_due(state.step)
            close(config, state.step, checkpoints, monitor, is_finished=is_finished, is_stopping=is_stopping)
    return is_stopping


def close(
    config: PretrainConfig,
    step: int,
    checkpoints: CheckpointManager,
    monitor: Monitor,
    *,
    is_finished: bool,
    is_stopping: bool,
) -> None:
    """Waits for the last checkpoint, writes status and report, and ends the logs."""
    checkpoints.close()
    if not checkpoints.last_save_failed:
        write_end(config, step, is_finished=is_finished)
    if config.report and not is_stopping:
        report(Path(config.checkpoint_path))
    monitor.record_checkpoints(checkpoints.pop_saved())  # the one that `checkpoints.close` waited for
    monitor.close()


def open_checkpoints(config: PretrainConfig, data: RunData) -> CheckpointManager:
    """Opens the run folder: rank 0 makes and locks it, and every rank has its log there."""
    with collective_errors():
        if config.report:
            from report.page import check_packages

            check_packages()
        folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)
    info = read_info(data.dataset.folders, data.dataset.metadata).to_json()
    return CheckpointManager(folder, config=config, fingerprint=data.fingerprint, dataset_info=info)


def report(folder: Path) -> None:
    """Writes the report of a run on rank 0. A failure is a warning, and ends nothing."""
    if is_main():
        from report.page import write_report

        try:
            log.info(f"wrote {write_report(folder, warn=log.warning)}")
        except ValueError as error:
            log.warning(f"there is no report: {error}")


def write_end(config: PretrainConfig, step: int, *, is_finished: bool) -> None:
    """Says in the file `status` of the run folder, from rank 0, whether the run has finished or stopped."""
    if is_main():
        write_status(Path(config.checkpoint_path), "finished" if is_finished else "stopped", step=step)


if __name__ == "__main__":
    main()
