"""Judges checkpoints on a test split: the first chapters of a run, then one evaluation of each.

    python evaluate.py checkpoint=PATH [data_path=...] [evaluators=[sudoku]] [halting=act] [key=value ...]
    torchrun --nproc-per-node N evaluate.py checkpoint=PATH [...]

The number of processes changes nothing but the time. No optimizer, no training split and no W&B are needed.
"""

from __future__ import annotations

from pathlib import Path

from config.schema import EvaluateConfig
from parallel import log
from parallel.agreement import decide_on_rank_0, own_outcome, shared_outcome
from parallel.heap import keep_freed_memory
from parallel.process_group import (
    choose_backend,
    choose_device,
    is_main,
    process_group,
    set_cpu_threads,
)
from parallel.start import wait_for_all_ranks
from parallel.watchdog import Watchdog


def main() -> None:
    log.capture_library_warnings()

    # Config: rank 0 composes and checks; every rank receives the same frozen config.
    config = EvaluateConfig.model_validate_json(decide_on_rank_0(ask_for_config))

    wait_for_all_ranks(timeout_seconds=config.init_timeout_seconds)

    # Group: opened by all ranks, closed whatever happens.
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
            judge(config, device, watchdog)


def ask_for_config() -> str | None:
    """The config of the command line as JSON; None if help was asked for."""
    from config.compose import compose_config

    config = compose_config(EvaluateConfig, config_name="evaluate")
    if config is None:
        return None
    choose_backend(config.backend, choose_device(config.device))
    return config.model_dump_json()


def judge(config: EvaluateConfig, device, watchdog: Watchdog) -> None:
    """One checkpoint after the other; over several, their mean and deviation."""
    from evaluation.report import metrics_table, open_output_folder, summarize, write_summary
    from evaluation.trained_model import find_checkpoint
    from parallel.collectives import broadcast_object

    # Facts: which checkpoints, chosen and verified by rank 0.
    checkpoints = None
    with shared_outcome():
        if is_main():
            checkpoints = [find_checkpoint(Path(path)) for path in config.checkpoint]
            check_folders(checkpoints, config)
    checkpoints = broadcast_object(checkpoints)

    with watchdog.paused():  # it may take any time
        runs = [judge_one(config, checkpoint, device) for checkpoint in checkpoints]
        with shared_outcome():
            if is_main() and len(runs) > 1:
                summary = summarize(runs)
                log.info(
                    metrics_table(summary, title=f"mean and standard deviation of {len(runs)} checkpoints")
                )
                if config.output_dir:
                    folder = open_output_folder(Path(config.output_dir))
                    write_summary(folder, summary, checkpoints=[each.path for each in checkpoints])
                    log.info(f"wrote {folder}")


def judge_one(config: EvaluateConfig, checkpoint, device) -> dict[str, dict[str, float]]:
    """The metrics by set, on rank 0. Every rank runs every chapter; where only rank 0 works, it says so."""
    from dataset.several import open_datasets
    from evaluation.passes import Judges, evaluate_split
    from evaluation.report import (
        all_metrics,
        metrics_table,
        open_output_folder,
        write_metrics,
        write_outputs,
    )
    from evaluation.trained_model import load_trained_model
    from models.compilation import compile_blocks, should_compile
    from parallel.collectives import true_on_all_ranks

    # Facts: the data, of which rank 0 reads every token.
    folders = [Path(path) for path in config.data_path] if config.data_path else checkpoint.find_data()
    with shared_outcome():
        data = open_datasets(folders, splits=("test",), read_everything=is_main())
        votes = [Path(path) for path in config.arc_votes]
        judges = Judges(config.evaluators, data, further_votes=votes)

    # Model.
    batch_size = config.eval_batch_size or checkpoint.global_batch_size
    with shared_outcome():
        model = load_trained_model(checkpoint, data.metadata, raw=config.raw).to(device)
        model.halt_max_steps = config.halt_max_steps or model.halt_max_steps
        if is_main():
            output_folder = open_output_folder(folder_for(checkpoint, config))
        num_examples = sum(each.num_examples for each in data.splits["test"].sets.values())
        num_calls = num_examples // batch_size * model.halt_max_steps
        compiles = should_compile(config.compile, device, num_steps=num_calls)
    if true_on_all_ranks(compiles, device=device):
        compile_blocks(model)

    # Judge: every rank evaluates its slice; sums and outputs come together on rank 0.
    results = evaluate_split(
        model,
        data,
        loss_type=checkpoint.arch.loss.loss_type,
        global_batch_size=batch_size,
        device=device,
        halting=config.halting,
        outputs=config.save_outputs,
        judges=judges,
    )

    # Report.
    metrics = all_metrics(results)
    with shared_outcome():
        if is_main():
            write_metrics(output_folder, metrics)
            write_outputs(output_folder, results)
            judges.write(output_folder)
            log.info(metrics_table(metrics, title=f"{checkpoint.path} on {', '.join(map(str, folders))}"))
            log.info(f"wrote {output_folder}")
    return metrics


def folder_for(checkpoint, config: EvaluateConfig) -> Path:
    """Where the results of a checkpoint go."""
    if config.output_dir is None:
        return checkpoint.run_folder / "evaluation" / f"step_{checkpoint.step}"
    if len(config.checkpoint) == 1:
        return Path(config.output_dir)
    return Path(config.output_dir) / f"{checkpoint.run_folder.name}_step_{checkpoint.step}"


def check_folders(checkpoints: list, config: EvaluateConfig) -> None:
    """ValueError where one checkpoint's results would replace another's."""
    owners = {}
    for checkpoint in checkpoints:
        folder = folder_for(checkpoint, config)
        owner = owners.setdefault(folder.resolve(), checkpoint)
        if owner is not checkpoint:
            raise ValueError(
                f"{owner.path} and {checkpoint.path} would both have their results in {folder}: "
                "leave one out, or rename its run folder"
            )


if __name__ == "__main__":
    main()
