"""Evaluates checkpoints on a test split.

    python evaluate.py checkpoint=PATH [data_path=...] [evaluators=[sudoku]] [halting=act] [key=value ...]
    torchrun --nproc-per-node N evaluate.py checkpoint=PATH [...]

The same from Python. The evaluation runs in new processes:

    import evaluate
    result = evaluate.run(["checkpoint=checkpoints/demo"], processes=2)
    result.metrics["all"]["exact_accuracy"], result.folder

The results do not depend on the number of processes, except for rounding. The program needs no optimizer, no
training split and no W&B.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH

import runtime.environment  # noqa: F401

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from checkpointing.finding import Checkpoint, broadcast_checkpoints, find_checkpoint
from checkpointing.loading import hash_weights, load_trained_model
from config.compose import compose_config, compose_overrides
from config.programs import EvaluateConfig
from dataset.metadata import Metadata
from dataset.mixture import fingerprint_of, open_datasets
from distributed import log
from distributed.child import run_child
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors, memory_errors
from distributed.launch import Program, check_same_files, launch
from distributed.number_format import Choice, choose_evaluation_format
from distributed.world import is_main, local_rank, num_nodes, world_size
from evaluation.compilation import compiler_cache_errors, compiles_on_all_ranks
from evaluation.evaluators import Evaluators
from evaluation.known import find_match, known_puzzles
from evaluation.leaks import Leaks, find_trained
from evaluation.passes import evaluate_split
from evaluation.results import (
    SUMMARY_FILE,
    measured_with,
    name_of,
    open_output_folder,
    read_results,
    remove_other_format,
    warn_of_new_data,
    write_measured,
    write_results,
    write_summary,
)
from evaluation.test_time import check_effects, set_up
from models import HaltingModel, build_model
from models.carry import Reasoning
from models.compilation import compile_blocks
from models.flops import StepCounter
from report.page import check_packages, write_evaluation_report, write_picture


def main() -> None:
    with launch(EvaluateConfig, lambda: compose_config(EvaluateConfig)) as program:
        with memory_errors("lower eval_batch_size, or use more processes"), compiler_cache_errors():
            evaluate(program)


def evaluate(program: Program[EvaluateConfig]) -> None:
    """Evaluates the checkpoints of the config one after the other. All ranks call it.

    If there are several checkpoints and all have the same arch.name and the same test splits, rank 0 also
    prints the mean and the standard deviation of each metric. If the config has an output_dir, rank 0 writes
    them to summary.json.
    """
    config = program.config
    with program.watchdog.paused():  # no time limit here
        checkpoints = broadcast_checkpoints(config.checkpoint)
        with collective_errors():
            if is_main() and len(checkpoints) > 1:
                check_folders(checkpoints, config)
            formats = [
                choose_evaluation_format(
                    checkpoint.arch.forward_dtype,
                    program.device,
                    allowed=checkpoint.arch.formats,
                    configured=config.forward_dtype,
                )
                for checkpoint in checkpoints
            ]
        formats = broadcast_object(formats)  # other ranks may run on other kinds of processors
        metrics = [
            evaluate_checkpoint(config, *pair, program.device)
            for pair in zip(checkpoints, formats, strict=True)
        ]
        with collective_errors():
            if is_main() and len(metrics) > 1:
                tests = {_measured(checkpoint, config)["test"] for checkpoint in checkpoints}
                models = sorted({checkpoint.arch.name for checkpoint in checkpoints})
                if len(tests) > 1:
                    log.warning(
                        f"no mean is computed: the checkpoints were evaluated on {len(tests)} different test "
                        "splits. Set data_path to evaluate all of them on the same data."
                    )
                elif len(models) > 1:
                    log.warning(f"no mean is computed, because the models differ: {', '.join(models)}")
                else:
                    write_summary(metrics, list(map(str, checkpoints)), output_dir=config.output_dir)


def evaluate_checkpoint(
    config: EvaluateConfig, checkpoint: Checkpoint, number_format: Choice, device: torch.device
) -> dict[str, dict[str, float]]:
    """Evaluates a checkpoint, and writes the result files on rank 0. All ranks call it.

    Returns {test set: {metric: value}} on rank 0, {} on other ranks.

    number_format: Dtype in which the model computes, with the reason for it.
    """
    # Data. Only rank 0 reads every token, to check the dataset.
    folders, leaks, trained, compared = _folders(checkpoint, config), Leaks(config.leaks), None, ""
    with collective_errors():
        data = open_datasets(folders, splits=("test",), read_everything=is_main())
        evaluators = Evaluators(config.evaluators, data)
        if world_size() > 1 and local_rank() == 0:
            compared = repr((fingerprint_of(folders, ("test",)), evaluators.kinds))
    check_same_files(compared, what="data", names=list(map(str, folders)))
    with collective_errors():
        match = find_match(checkpoint, data) if is_main() else None
    match = broadcast_object(match)
    with collective_errors():
        data, puzzles, of_identifiers = known_puzzles(data, match, model=str(checkpoint))
        if puzzles is not None:
            evaluators = evaluators.fresh_copy(only_answered=True)
        if is_main():
            trained = find_trained(checkpoint)
            for name, test_set in data.splits["test"].sets.items():
                leaks.add(name, test_set, "test", data.folders, puzzles=puzzles and puzzles[name])
    leaks.broadcast_find(trained, model=str(checkpoint))

    # Model.
    batch_size = config.eval_batch_size or checkpoint.global_batch_size
    operations: dict[str, float] = {}
    with collective_errors():
        checkpoint.arch.check_outputs(config.save_outputs)
        forward_dtype, reason = number_format
        options = {"raw": config.raw, "forward_dtype": forward_dtype, "rows": match and match.rows}
        model = load_trained_model(checkpoint, data.metadata, **options).to(device)
        compared = hash_weights(model) if num_nodes() > 1 and local_rank() == 0 else ""
    check_same_files(compared, what="checkpoint", names=[str(checkpoint)])
    with collective_errors():
        reasoning, settings = set_up(model, config)
        check_effects(model, config, seq_len=data.metadata.seq_len)
        evaluators.check(settings)
        if is_main():
            measured = _measured(checkpoint, config)
            output_folder = open_output_folder(folder_for(checkpoint, config))
            log.info(f"{checkpoint} computes in {forward_dtype}: {reason}")
            where = str(checkpoint.address or checkpoint.path.resolve())
            write_measured(output_folder, measured, folders, checkpoint=where if config.output_dir else None)
            if config.output_dir and len(config.checkpoint) > 1:  # its means may be of other results
                (Path(config.output_dir) / SUMMARY_FILE).unlink(missing_ok=True)
            stored = checkpoint.arch.forward_dtype
            remove_other_format(output_folder, folders, forward_dtype, stored=stored)
            if not config.data_path:
                warn_of_new_data(checkpoint, folders)
            if config.report:
                check_packages()
            # Only where a table or page shows it: counting first imports torch's compiler, for two seconds.
            if settings or config.report or config.loops is not None:
                operations["gigaflops_per_step"] = _gigaflops_per_step(model, data.metadata, reasoning)
        num_runs = sum(test_set.num_examples for test_set in data.splits["test"].sets.values())
        num_runs *= settings.samples[-1] if settings else 1
        num_calls = num_runs // batch_size * reasoning.max_steps
    if compiles_on_all_ranks(config.compile, device, num_steps=num_calls):
        compile_blocks(model)

    # Evaluation. Every rank works on its slice. Rank 0 gets the sums and the outputs.
    options = {"outputs": config.save_outputs, "settings": settings, "seed": config.seed}
    options |= {"global_batch_size": batch_size, "reasoning": reasoning, "leaks": leaks.found}
    options["puzzles"] = puzzles
    results = evaluate_split(model, data, evaluators=evaluators, **options)

    # Report.
    metrics = {}
    with collective_errors():
        if is_main():
            for name, result in results.items():
                result.metrics.update(of_identifiers.get(name, {}) | operations)
            evaluators.write(output_folder)
            title = f"{checkpoint} on {', '.join(map(str, folders))}"
            options = {"title": title, "selected_by": checkpoint.selected_by}
            options["forward_dtype"] = forward_dtype
            metrics, scaling = write_results(output_folder, results, config, **options)
            if scaling:
                write_picture(output_folder / "scaling.svg", scaling)
            if config.report:
                of_rank = -(-batch_size // world_size())
                write_evaluation_report(
                    checkpoint,
                    model,
                    data,
                    output_folder,
                    seed=config.seed,
                    batch_size=of_rank,
                    puzzles=puzzles,
                )
    return metrics


def _gigaflops_per_step(model: HaltingModel, metadata: Metadata, reasoning: Reasoning) -> float:
    """Returns the floating-point operations of a thinking step on one puzzle, in units of 1e9.

    metadata: Sizes of the dataset. reasoning: Settings of the evaluation, such as the number of loops.
    """
    network = model.network
    if network.is_search:
        metadata = network.complete(metadata, network.state_dict())
    with torch.device("meta"):
        counter = StepCounter(build_model(network.arch, metadata), seq_len=metadata.seq_len)
    return counter.flops(reasoning) / 1e9


def _folders(checkpoint: Checkpoint, config: EvaluateConfig) -> list[Path]:
    return [Path(path) for path in config.data_path] if config.data_path else checkpoint.find_data()


def _measured(checkpoint: Checkpoint, config: EvaluateConfig) -> dict[str, Any]:
    return measured_with(config, _folders(checkpoint, config), checkpoint)


def folder_for(checkpoint: Checkpoint, config: EvaluateConfig) -> Path:
    """Returns the folder for the result files of a checkpoint.

    If config.output_dir is None, the folder is <run folder>/evaluation/step_120, for example. Otherwise, it
    is output_dir for a single checkpoint, or a subfolder such as output_dir/demo_step_120 for several.
    """
    if config.output_dir is None:
        return checkpoint.run_folder / "evaluation" / name_of(_measured(checkpoint, config), checkpoint)
    if len(config.checkpoint) == 1:
        return Path(config.output_dir)
    return Path(config.output_dir) / f"{checkpoint.run_folder.name}_{checkpoint.name}"


def check_folders(checkpoints: list[Checkpoint], config: EvaluateConfig) -> None:
    owners: dict[Path, Checkpoint] = {}
    for checkpoint in checkpoints:
        folder = folder_for(checkpoint, config)
        owner = owners.setdefault(folder.resolve(), checkpoint)
        if owner is not checkpoint:
            raise ValueError(
                f"{owner} and {checkpoint} would both write their results into {folder}. "
                "Remove one, or rename its run folder."
            )


class Evaluated(NamedTuple):
    """The results of `run`.

    Attributes:
        folder: Folder of the result files.
        metrics: {test set: {metric: value}}, for example {"all": {"exact_accuracy": 0.9}}.
    """

    folder: Path
    metrics: dict[str, dict[str, float | str]]


def run(overrides: Sequence[str], *, processes: int = 1) -> Evaluated:
    """Evaluates one checkpoint: runs evaluate.py in new processes, and shows their output on the console.

    Args:
        overrides: Arguments of the command line, such as ["checkpoint=checkpoints/demo"].
        processes: Number of processes.

    Returns:
        The folder of the results, and the metrics.

    Raises:
        ValueError: An argument is invalid, or the evaluation failed. The message has one line.
    """
    config = compose_overrides(EvaluateConfig, overrides)
    if len(config.checkpoint) != 1:
        raise ValueError(
            "checkpoint: evaluate.run returns the metrics of one checkpoint. Set checkpoint to one path."
        )
    folder = folder_for(find_checkpoint(config.checkpoint[0]), config)
    run_child("evaluate.py", overrides, processes=processes)
    return Evaluated(folder, read_results(folder))


if __name__ == "__main__":
    main()
