"""The data of a run, from its config: the datasets, and which of their examples make which step."""

import dataclasses
from pathlib import Path

from config.architecture import Architecture
from config.schema import PretrainConfig, StageConfig
from dataset.format import Dataset
from dataset.mixture import fingerprint_of, open_datasets
from dataset.plan import CurriculumPlan, Stage
from evaluation.evaluators import Evaluators
from models import HaltingModel
from parallel.collectives import broadcast_object
from parallel.errors import collective_errors
from parallel.process_group import is_main


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, the same on all ranks.

    plan: the examples of every step. fingerprint: of the datasets' content.
    """

    dataset: Dataset
    plan: CurriculumPlan
    fingerprint: str


def open_data(config: PretrainConfig) -> RunData:
    """Opens and checks the data, of which rank 0 reads every token. All ranks call it, and end together."""
    fingerprint = ""
    with collective_errors():
        dataset = open_datasets([Path(path) for path in config.data_paths], read_everything=is_main())
        plan = build_plan(config, dataset)
        Evaluators(config.evaluators, dataset)  # those of other puzzles are refused now
        if is_main():
            fingerprint = fingerprint_of(dataset.folders)
    return RunData(dataset, plan, broadcast_object(fingerprint))


def build_plan(config: PretrainConfig, data: Dataset) -> CurriculumPlan:
    """Plans the examples of every step: of the curriculum's stages, then of the main training.

    data: the folders of `config.data_paths`. ValueError where a stage is too short for one batch.
    """
    number = {path: position for position, path in enumerate(config.data_paths)}
    main = StageConfig(epochs=config.epochs, eval_interval=config.eval_interval)
    stages = [
        Stage(
            folders=tuple(number[path] for path in each.data_path or config.data_path),
            epochs=each.epochs,
            eval_interval=each.eval_interval or each.epochs,
            H_cycles=each.H_cycles,
            L_cycles=each.L_cycles,
        )
        for each in [*config.curriculum, main]
    ]
    sets = data.splits["train"].sets
    return CurriculumPlan(sets, stages, seed=config.seed, global_batch_size=config.global_batch_size)


def set_cycles(model: HaltingModel, stage: Stage, arch: Architecture) -> None:
    """Makes the model run the cycles of the stage, if it has cycles."""
    if arch.is_recursive:
        model.network.H_cycles = stage.H_cycles or arch.H_cycles
        model.network.L_cycles = stage.L_cycles or arch.L_cycles
