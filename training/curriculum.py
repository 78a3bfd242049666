"""The stages of a run, from its config: which data and how many cycles when."""

from config.architecture import Architecture
from config.schema import PretrainConfig
from dataset.curriculum import CurriculumPlan, Stage
from dataset.format import Dataset
from models import HaltingModel


def build_plan(config: PretrainConfig, data: Dataset) -> CurriculumPlan:
    """The examples of every step: of the curriculum's stages, then of the main training.

    data: the folders of `config.data_paths`. ValueError where a stage is too short for one batch.
    """
    number = {path: position for position, path in enumerate(config.data_paths)}

    def stage(data_path: list[str], epochs: int, eval_interval: int | None, **cycles: int | None) -> Stage:
        folders = tuple(number[path] for path in data_path)
        return Stage(folders, epochs=epochs, eval_interval=eval_interval or epochs, **cycles)

    stages = [
        stage(
            each.data_path or config.data_path,
            each.epochs,
            each.eval_interval,
            H_cycles=each.H_cycles,
            L_cycles=each.L_cycles,
        )
        for each in config.curriculum
    ]
    return CurriculumPlan(
        data.splits["train"].sets,
        [*stages, stage(config.data_path, config.epochs, config.eval_interval)],
        seed=config.seed,
        global_batch_size=config.global_batch_size,
    )


def set_cycles(model: HaltingModel, stage: Stage, arch: Architecture) -> None:
    """Makes the model run the cycles of the stage, if it has cycles."""
    if arch.is_recursive:
        model.network.H_cycles = stage.H_cycles or arch.H_cycles
        model.network.L_cycles = stage.L_cycles or arch.L_cycles
