"""Solves one puzzle with a trained model, and shows the answer after each thinking step.

    python solve.py checkpoint=PATH puzzle="1..4 .... ...3 4..1" [key=value ...]

The same from Python:

    from solve import load
    model = load("checkpoints/demo")
    answer = model.solve("1..4 .... ...3 4..1")
    answer.text, answer.valid, answer.steps
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH

import runtime.environment  # noqa: F401

import os
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from config.compose import compose_config, config_with, show
from config.programs import SolveConfig
from dataset.metadata import Metadata
from distributed import log
from distributed.backend import choose_device, set_cpu_threads
from distributed.errors import local_errors
from distributed.number_format import choose_evaluation_format
from distributed.world import world_size
from evaluation.questions import Questions
from evaluation.solving import Answer, answer_puzzle
from evaluation.terminal import draw_answer
from models import HaltingModel
from runtime.formats import NumberFormat
from training.adaptation import adapt

_MOST_MODELS = 4  # copies of the model that a solver keeps, one for each size of puzzle


def main() -> None:
    with local_errors():
        config = compose_config(SolveConfig)
        if config is not None:
            print_answer(config)


def print_answer(config: SolveConfig) -> None:
    if world_size() > 1:
        raise ValueError("solve.py is one process. Start it with python, not with torchrun.")
    set_cpu_threads(config.cpu_threads)
    solver = load(
        config.checkpoint,
        data_path=config.data_path,
        raw=config.raw,
        device=config.device,
        forward_dtype=config.forward_dtype,
    )
    answer = solver.answer(config)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    show(draw_answer(answer, width=shutil.get_terminal_size().columns, color=color))
    if config.picture is not None:
        from report.animation import draw_animation  # here, because both take a third of a second to load
        from report.page import write_page

        write_page(Path(config.picture), draw_animation(answer))
        log.info(f"wrote {config.picture}")


class Solver:
    """A trained model that solves single puzzles. `load` is another name of this class.

    Args:
        checkpoint: Run folder (its newest checkpoint), checkpoint folder, file, name of a model in weights/,
            or hf://OWNER/NAME.
        data_path: Folder of the dataset that the model was trained on, or a list of folders. If None, the
            paths that are stored in the checkpoint.
        raw: Whether to use the weights themselves instead of their moving average (EMA).
        device: "auto", "cpu", "cuda" or "mps".
        forward_dtype: Dtype of the computation, such as "float32". If None, the dtype of the training, or
            float32 on a CPU without bfloat16 instructions.

    Attributes:
        checkpoint: Checkpoint of the model.
        device: Device of the model.
        forward_dtype: Dtype in which the model computes.
        questions: Reader that turns texts into puzzles for this model.
        info: Description of the dataset on which the model was trained.

    Raises:
        ValueError: The checkpoint or the data cannot be read. The message has one line.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        data_path: str | Path | Sequence[str | Path] | None = None,
        raw: bool = False,
        device: str = "auto",
        forward_dtype: NumberFormat | None = None,
    ):
        data_paths = [data_path] if isinstance(data_path, str | Path) else data_path
        folders = None if data_paths is None else [Path(path) for path in data_paths]
        self.checkpoint, self.raw, self.device = find_checkpoint(checkpoint), raw, choose_device(device)
        arch = self.checkpoint.arch
        chosen = choose_evaluation_format(
            arch.forward_dtype, self.device, allowed=arch.formats, configured=forward_dtype
        )
        self.forward_dtype = chosen.name
        self.questions = Questions(self.checkpoint, folders)
        self.info = self.questions.info
        self._models: dict[Metadata, HaltingModel] = {}

    def solve(self, puzzle: str | Path | dict | Sequence | np.ndarray, **keys: Any) -> Answer:
        """Solves a puzzle.

        Args:
            puzzle: Text, path of a file, ARC task as a dict, array of cells, or list of rows. A row is a text
                or a list of cells. Cells are symbols as in a text, such as the digits of a Sudoku, not
                tokens.
            keys: Options of solve.py, such as steps=64, samples=8. The docstring of `answer` lists those
                without effect.

        Returns:
            The final answer, and the model's answer after every thinking step.

        Raises:
            ValueError: The puzzle or an option is invalid. The message has one line.
        """
        if not isinstance(puzzle, str | Path):
            puzzle = self.questions.text_of(puzzle)
        keys = {"checkpoint": str(self.checkpoint.path), "puzzle": str(puzzle)} | keys
        return self.answer(config_with(SolveConfig, **keys))

    def answer(self, config: SolveConfig) -> Answer:
        """Solves the puzzle in the key `puzzle` of a config of solve.py, and returns the answer.

        If the model has no embedding for the puzzle and the config has adapt=true, trains an embedding first.
        These keys have no effect, because the model is already loaded: checkpoint, data_path, plugins, raw,
        forward_dtype, device and cpu_threads. Only the command line draws `picture`.
        """
        puzzle = self.questions.read(config)
        metadata = self.questions.metadata_for(puzzle)
        identifier = self.questions.find_identifier(puzzle, config)
        if identifier is None:
            views = puzzle.draw_demonstrations(config.adapt_steps, seed=config.seed)
            options = {"lr": config.adapt_lr, "seed": config.seed, "device": self.device, "raw": self.raw}
            options["forward_dtype"] = self.forward_dtype
            model, identifier = adapt(self.checkpoint, views, metadata, **options), 1
        else:
            model = self._model_for(metadata)
        self.questions.warn_of_size(puzzle)  # not before the model is loaded: the puzzle may not fit it
        return answer_puzzle(
            model, puzzle, config, style=self.info.style, identifier=identifier, device=self.device
        )

    def _model_for(self, metadata: Metadata) -> HaltingModel:
        if metadata not in self._models:
            if len(self._models) == _MOST_MODELS:
                del self._models[next(iter(self._models))]  # the oldest
            options = {"raw": self.raw, "forward_dtype": self.forward_dtype}
            model = load_trained_model(self.checkpoint, metadata, **options)
            self._models[metadata] = model.to(self.device).eval()
        return self._models[metadata]


load = Solver

if __name__ == "__main__":
    main()
