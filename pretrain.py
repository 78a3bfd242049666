"""Trains a model: the story of a run, from the command line to the last checkpoint.

    python pretrain.py data_path=... [key=value ...]
    torchrun --nproc-per-node N pretrain.py data_path=... [key=value ...]

Started again with the same run_name, a run goes on from its newest checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from config.schema import PretrainConfig
from parallel import log
from parallel.agreement import decide_on_rank_0, end_together, own_outcome, shared_outcome
from parallel.heap import keep_freed_memory
from parallel.interruption import Interruption
from parallel.process_group import (
    choose_backend,
    choose_device,
    is_main,
    process_group,
    rank,
    set_cpu_threads,
    world_size,
)
from parallel.start import wait_for_all_ranks
from parallel.watchdog import Watchdog


def main() -> None:
    log.capture_library_warnings()

    # Config: rank 0 composes, checks and names the run; every rank receives the same frozen config.
    config = PretrainConfig.model_validate_json(decide_on_rank_0(ask_for_config))

    wait_for_all_ranks(timeout_seconds=config.init_timeout_seconds)

    # Group: opened by all ranks, closed whatever happens; no rank waits forever for another.
    with own_outcome():
        device = choose_device(config.device)
        choose_backend(config.backend, device)
    log.capture_library_warnings()  # those of torch too, which is loaded now
    set_cpu_threads(config.cpu_threads)
    keep_freed_memory(device)
    with Watchdog(
        init_timeout_seconds=config.init_timeout_seconds, step_timeout_seconds=config.step_timeout_seconds
    ) as watchdog:
        with process_group(device, config.backend):
            train(config, device, watchdog)


def ask_for_config() -> str | None:
    """The config of the command line as JSON, checked as far as that goes without the data.

    None if help was asked for.
    """
    from config.compose import compose_config
    from training.run_folder import name_run

    config = compose_config(PretrainConfig, config_name="pretrain")
    if config is None:
        return None
    if config.global_batch_size % world_size():
        raise ValueError(
            f"global_batch_size {config.global_batch_size} is not divisible by the {world_size()} processes: "
            "change one of them"
        )
    if config.global_batch_size // world_size() % config.gradient_accumulation_steps:
        raise ValueError(
            f"the {config.global_batch_size // world_size()} slots of each process are not divisible by "
            f"gradient_accumulation_steps {config.gradient_accumulation_steps}"
        )
    choose_backend(config.backend, choose_device(config.device))
    return name_run(config).model_dump_json()


def train(config: PretrainConfig, device, watchdog: Watchdog) -> None:
    """Every chapter runs on every rank; where only rank 0 works, it says so.

    Heavy imports wait until the config stands.
    """
    from dataset.puzzles import PuzzleDataset, read_batches
    from dataset.several import fingerprint_of, open_datasets
    from evaluation.passes import Judges
    from models.compilation import should_compile
    from optimizers.schedule import peak_learning_rates
    from parallel.collectives import broadcast_object, true_on_all_ranks
    from parallel.replicas import check_replicas
    from training.checkpoint import Checkpoints
    from training.clock import StepClock
    from training.curriculum import build_plan, set_cycles
    from training.evaluation import evaluate
    from training.health import Health
    from training.logger import RunLogger
    from training.profiler import profile_steps
    from training.recovery import Recovery
    from training.run_folder import open_run_folder, write_status
    from training.start_weights import copy_weights_
    from training.state import broadcast_model_, build_train_state
    from training.step import train_step

    # Facts: what the data is, and which examples make which step. Rank 0 also reads every token.
    with shared_outcome():
        data = open_datasets([Path(path) for path in config.data_paths], read_everything=is_main())
        data_fingerprint = fingerprint_of(data.folders) if is_main() else None
        plan = build_plan(config, data)
        Judges(config.evaluators, data)  # those of other puzzles are refused now, not at the first evaluation
    data_fingerprint = broadcast_object(data_fingerprint)
    last_step = min(plan.total_steps, config.max_steps or plan.total_steps)
    evaluation_steps = {*plan.iteration_ends, last_step}

    def is_kept(step: int) -> bool:
        at_interval = config.checkpoint_interval and step % config.checkpoint_interval == 0
        at_evaluation = config.checkpoint_every_eval and step in evaluation_steps
        return step == last_step or at_interval or at_evaluation

    def is_logged(step: int) -> bool:
        return step == 1 or step % config.log_interval == 0 or step in evaluation_steps

    # Model and optimizers: drawn from the seed, and equal on all ranks.
    with shared_outcome():
        compiles = should_compile(config.compile, device, num_steps=plan.total_steps)
    compiles = true_on_all_ranks(compiles, device=device)  # none alone: its weights would come to differ
    with shared_outcome():
        state = build_train_state(config, data.metadata, device=device, compiles=compiles)
    broadcast_model_(state)

    # Resume: the newest checkpoint, if there is one, says where we are.
    with shared_outcome():
        run_folder = open_run_folder(config) if is_main() else Path(config.checkpoint_path)
    log.open_rank_file(run_folder)
    watchdog.files.append(log.rank_file())
    checkpoints = Checkpoints(run_folder, config=config, fingerprint=data_fingerprint)
    is_reported = checkpoints.resume(state)
    if config.init_from and state.step == 0:
        with shared_outcome():
            if is_main():
                copy_weights_(state.model, Path(config.init_from))
        broadcast_model_(state)
    if state.step >= last_step and is_reported:
        log.info(
            f"nothing to do: {run_folder} is at step {state.step} of {plan.total_steps}, "
            f"max_steps={config.max_steps}"
        )
        return
    if is_reported and is_logged(state.step):
        state.metrics.reset()

    # Data: this rank's slice of the plan, from here on.
    dataset = PuzzleDataset(
        data.folders, "train", plan, rank=rank(), world_size=world_size(), first_step=state.step
    )
    log.info(
        f"{run_folder}: {state.num_parameters:,} parameters on {world_size()} x {device.type}, "
        f"from step {state.step} to {last_step} of {plan.total_steps}; "
        + ", ".join(f"{name} {rate:.3g}" for name, rate in peak_learning_rates(config).items())
    )

    if is_main():
        write_status(run_folder, "running", step=state.step)
    remaining = range(state.step, last_step)
    # The reader is forked before anything here starts a thread: the logger does, and so does autograd.
    with (
        read_batches(dataset, device=device) as batches,
        checkpoints,
        RunLogger(config, is_main=is_main(), steps=remaining, num_parameters=state.num_parameters) as logger,
        profile_steps(
            config.profile, folder=run_folder / "profile", is_main=is_main(), steps=remaining
        ) as profiler,
        Interruption() as interruption,
    ):
        # Rehearse: what would end the run at its first evaluation ends it now.
        set_cycles(state.model, plan.stage_of(max(state.step, 1)), config.arch)
        if config.dry_run and state.step == 0:
            with watchdog.paused():
                evaluate(config, state, data, only_first_batches=True)

        clock, health, recovery = StepClock(device), Health(device), Recovery(state.step)
        while not (is_stopping := interruption.all_reduce_request()):
            # Report: metric sums of all ranks, divided once. One line for the step, with what the judge adds.
            if is_logged(state.step) and not is_reported:
                health.check()
                others = checkpoints.read_stall() | recovery.read()
                line = measure(config, state, clock, total_steps=plan.total_steps, others=others)
                health.remember(state.step, line)
                # Judge: every rank evaluates its slice of the test split.
                if state.step in evaluation_steps:
                    with watchdog.paused():
                        judged = evaluate(config, state, data, interruption)
                    if judged is None:  # asked to stop: the next start makes up for it
                        continue
                    line |= judged
                logger.log(state.step, line)
                checkpoints.note_metrics(state.step, line)
                state.metrics.reset()
            if state.step >= last_step:
                break

            # Step: forward, backward, gradient all-reduce, learning rates, optimizers.
            set_cycles(state.model, plan.stage_of(state.step + 1), config.arch)
            clock.start()
            with clock.measure("data_wait"):
                set_name, batch = next(batches)
            result = train_step(
                state, batch.to(device), config=config, total_steps=plan.total_steps, clock=clock
            )
            health.note(state.step, set_name=set_name, loss=result.loss, grad_norm=result.grad_norm)
            clock.count_step()
            watchdog.step_done(state.step)
            recovery.step_done(state.step)
            if config.profile:
                clock.stop()  # tracing and writing are no part of a step
            profiler.step()
            logger.step_done()
            is_reported = False

            # Replicas: every rank holds the same weights, or nothing that follows means anything.
            if config.replica_check_interval and state.step % config.replica_check_interval == 0:
                clock.stop()
                check_replicas(state.replicated_tensors(), step=state.step)

            # Keep: before the evaluation, so that a failing evaluation loses nothing.
            if is_kept(state.step):
                clock.stop()
                health.check()
                with watchdog.paused():
                    checkpoints.save(state)
        with watchdog.paused():  # W&B may have much to send, the last checkpoint much to write
            if is_stopping:
                health.check()
                checkpoints.save(state)
            logger.close()
            checkpoints.close()
    if checkpoints.last_save_failed:
        end_together(f"the last checkpoint could not be saved: {run_folder} lacks the newest steps")
    if is_main():
        is_finished = state.step == plan.total_steps
        write_status(run_folder, "finished" if is_finished else "stopped", step=state.step)
    outcome = "stopped: the same command goes on from here;" if is_stopping else "done:"
    log.info(f"{outcome} {run_folder} is at step {state.step} of {plan.total_steps}")


def measure(
    config: PretrainConfig, state, clock, *, total_steps: int, others: dict[str, float]
) -> dict[str, float]:
    """What happened since the last line, as it is logged on rank 0."""
    from optimizers.schedule import learning_rates
    from training.clock import gather_timing
    from training.metrics import training_metrics

    line = training_metrics(
        state.metrics.reduce(), steps=state.metrics.steps, global_batch_size=config.global_batch_size
    )
    timing, straggler = gather_timing(clock, global_batch_size=config.global_batch_size)
    if straggler:
        log.warning(straggler)
    line |= timing | others
    line |= learning_rates(config, state.step, total_steps=total_steps)
    return {f"train/{name}": value for name, value in line.items()}


if __name__ == "__main__":
    main()
