"""Judges one checkpoint on a test split: the first chapters of a run, then one evaluation.

    python evaluate.py checkpoint=PATH [data_path=...] [output_dir=...] [eval_batch_size=...]
    torchrun --nproc-per-node N evaluate.py checkpoint=PATH [...]

The number of processes changes nothing but the time. No optimizer, no training split and no W&B are needed.
"""

from __future__ import annotations

from pathlib import Path

from config.schema import EvaluateConfig
from parallel.agreement import decide_on_rank_0, own_outcome, shared_outcome
from parallel.messages import say, set_up_console
from parallel.process_group import choose_backend, choose_device, is_main, process_group, set_cpu_threads
from parallel.start import check_same_start
from parallel.watchdog import Watchdog


def main() -> None:
    set_up_console()

    # Config: rank 0 composes and checks; every rank receives the same frozen config.
    config = EvaluateConfig.model_validate_json(decide_on_rank_0(ask_for_config))

    check_same_start(timeout_seconds=config.init_timeout_seconds)

    # Group: opened by all ranks, closed whatever happens.
    with own_outcome():
        device = choose_device(config.device)
        choose_backend(config.backend, device)
    set_cpu_threads(config.cpu_threads)
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
    """Every chapter runs on every rank; where only rank 0 works, it says so."""
    from dataset.format import open_dataset
    from evaluation.passes import evaluate_split
    from evaluation.report import metrics_table, open_output_folder, write_metrics, write_outputs
    from evaluation.trained_model import find_checkpoint, load_trained_model
    from models import compile_blocks, should_compile
    from parallel.collectives import broadcast_object

    # Facts: the checkpoint and its data, both chosen by rank 0, which also verifies every byte and token.
    checkpoint = folder = None
    with shared_outcome():
        if is_main():
            checkpoint = find_checkpoint(Path(config.checkpoint))
            folder = Path(config.data_path[0]) if config.data_path else checkpoint.find_data()
    checkpoint, folder = broadcast_object((checkpoint, folder))
    with shared_outcome():
        data = open_dataset(folder, splits=("test",), read_everything=is_main())

    # Model.
    with shared_outcome():
        model = load_trained_model(checkpoint, data.metadata).to(device)
        if is_main():
            default = checkpoint.run_folder / "evaluation" / f"step_{checkpoint.step}"
            output_folder = open_output_folder(Path(config.output_dir) if config.output_dir else default)
    if should_compile(config.compile, device):
        compile_blocks(model)

    with watchdog.paused():  # it may take any time
        # Judge: every rank evaluates its slice; sums and outputs come together on rank 0.
        results = evaluate_split(
            model,
            data,
            loss_type=checkpoint.arch.loss.loss_type,
            global_batch_size=config.eval_batch_size or checkpoint.global_batch_size,
            device=device,
            outputs=config.eval_save_outputs,
        )

        # Report.
        with shared_outcome():
            if is_main():
                write_metrics(output_folder, results)
                write_outputs(output_folder, results)
                say(metrics_table(results, title=f"{checkpoint.path} on {folder}"))
                say(f"wrote {output_folder}")


if __name__ == "__main__":
    main()
