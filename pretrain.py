"""Trains a model: the story of a run, from the command line to the last checkpoint.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

Started again with the same run_name, a run goes on from its newest checkpoint.
"""

from collections.abc import Callable
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
    with launch(PretrainConfig, compose_run) as run:
        train(run)


def train(run: Run[PretrainConfig]) -> None:
    """Trains to the end, or until asked to stop. Every rank runs every line but those of rank 0 alone."""
    config = run.config

    # Data: which examples make which step. Model and optimizers: drawn from the seed, equal on all ranks.
    data = open_data(config)
    plan, schedule = data.plan, Schedule(config, data.plan)
    metadata = data.dataset.metadata
    state = build_replicated_state(config, metadata, device=run.device, total_steps=plan.total_steps)

    # Resume: the newest checkpoint, if there is one, says where we are.
    checkpoints = open_checkpoints(config, data)
    with run.watchdog.paused():  # init_from may have to be downloaded
        is_reported = checkpoints.resume(state)
    if is_reported and state.step >= schedule.last_step:
        log.info(f"nothing to do: {schedule.describe(state.step)}")
        return

    ranks = state.ranks
    # Around the steps: this rank's slice of the data, the checkpoints, what a person sees, and signals.
    dataset = PuzzleDataset(
        data.dataset.folders, "train", plan, rank=ranks.index, world_size=ranks.size, first_step=state.step
    )
    # The reader is forked before anything here starts a thread: W&B does, and so does autograd.
    with (
        read_batches(dataset, device=run.device, ignored_signals=SIGNALS) as batches,
        checkpoints,
        Monitor(run, state, data, schedule, is_reported=is_reported) as monitor,
        Interruption() as interruption,
    ):
        # What would end the run at its first evaluation ends it now.
        if config.sanity_check and state.step == 0:
            with monitor.paused():
                evaluate(config, state, data, only_first_batches=True)

        while True:
            is_stopping = interruption.all_ranks_stop()
            is_done = is_stopping or state.step >= schedule.last_step

            # Keep: before the report and its evaluation, so that what fails there loses nothing.
            if is_done or schedule.is_checkpoint(state.step):
                with monitor.paused():
                    checkpoints.save(state)

            # Report: metric sums of all ranks, divided once; one row for a step, with its evaluation.
            if monitor.is_due(state.step) and not is_stopping:
                row = monitor.reduce(state, checkpoints.pop_stall())
                if schedule.is_evaluation(state.step):
                    with monitor.paused():
                        results = evaluate(config, state, data, interruption)
                    if results is None:
                        continue  # asked to stop meanwhile: the next start makes up for it
                    row |= results
                    monitor.show_puzzles(state)
                row |= checkpoints.record_metrics(state.step, row)
                monitor.log(state, row)
            if is_done:
                break

            monitor.record_checkpoints(checkpoints.pop_saved())

            # Step: forward, backward, sum over ranks, update, average. Whether a rank was asked to
            # stop travels with the gradients, so that a signal stops all ranks after this step or the next;
            # with local_steps, after the next synchronisation.
            with monitor.reading():
                set_name, batch = next(batches)
            result = train_step(
                state,
                batch.to(run.device),
                config=config,
                rates=learning_rates(config, state.step + 1, total_steps=plan.total_steps),
                clock=monitor.clock,
                reasoning_at=lambda step: reasoning_at(step, plan, state.model.reasoning),
                is_asked_to_stop=interruption.is_requested,
            )
            interruption.record_requests(result.synced.stop_requests)
            monitor.step_done(state.step, result, set_name=set_name)

            # Replicas: every rank holds the same weights, or nothing that follows means anything.
            if schedule.is_replica_check(state.step):
                with monitor.paused():
                    check_replicas(state.replicated_tensors(), step=state.step)

        with monitor.paused():  # W&B may have much to send, the last checkpoint much to write
            checkpoints.close()
            if config.report and not is_stopping:
                report(Path(config.checkpoint_path))
            monitor.record_checkpoints(checkpoints.pop_saved())
            monitor.close()
    end(config, state, schedule, is_stopped=is_stopping, is_saved=not checkpoints.last_save_failed)


def open_checkpoints(config: PretrainConfig, data: RunData) -> CheckpointManager:
    """Opens the run folder: rank 0 makes and locks it, and every rank has its log there."""
    with collective_errors():
        if config.report:
            load_report_writer()
        folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)
    info = read_info(data.dataset.folders, data.dataset.metadata).to_json()
    return CheckpointManager(folder, config=config, fingerprint=data.fingerprint, dataset_info=info)


def load_report_writer() -> Callable[..., Path]:
    """Imports what writes the report, for a run that asks for one; ValueError without its packages."""
    from report.page import check_packages, write_report

    check_packages()
    return write_report


def report(folder: Path) -> None:
    """Writes the report of a run on rank 0. A failure is a warning, and ends nothing."""
    if is_main():
        try:
            log.info(f"wrote {load_report_writer()(folder, warn=log.warning)}")
        except ValueError as error:
            log.warning(f"there is no report: {error}")


def end(
    config: PretrainConfig, state: TrainState, schedule: Schedule, *, is_stopped: bool, is_saved: bool
) -> None:
    """Says how the run ended, to a person and in the file `status`."""
    if not is_saved:
        abort_all(f"the last checkpoint could not be saved: {config.checkpoint_path} lacks the newest steps")
    if is_main():
        is_finished = state.step == schedule.total_steps
        write_status(Path(config.checkpoint_path), "finished" if is_finished else "stopped", step=state.step)
    outcome = "stopped: the same command goes on from here;" if is_stopped else "done:"
    log.info(f"{outcome} {schedule.describe(state.step)}")
    if is_stopped:
        end_torchrun()


if __name__ == "__main__":
    main()
