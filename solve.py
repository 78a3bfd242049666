"""Solves one puzzle, and shows every step of the model that does.

    python solve.py checkpoint=PATH puzzle="1..4 .... .... 4..1" [key=value ...]

The same from Python:

    from solve import load
    model = load("checkpoints/demo")
    answer = model.solve("1..4 .... .... 4..1")
    answer.text, answer.valid, answer.steps
"""

import dataclasses
import difflib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.pretrained import Checkpoint, find_checkpoint, load_trained_model
from config.compose import compose_config
from config.files import load_defaults
from config.schema import SolveConfig, validate_config
from dataset.description import read_names
from dataset.format import BLANK, Metadata
from dataset.hub import is_address
from dataset.kinds.kind import Puzzle, read_symbols
from dataset.mixture import open_datasets
from evaluation.solving import Answer, answer_puzzle, find_info, read_text
from evaluation.terminal import draw_answer
from models import HaltingModel
from parallel import log
from parallel.errors import local_errors
from parallel.process_group import choose_device, set_cpu_threads, world_size
from report.animation import draw_animation
from training.adaptation import adapt

_DEMO = "`make demo` trains a small one, checkpoints/demo, in a minute or two"


def main() -> None:
    with local_errors():
        config = compose_config(SolveConfig)
        if config is not None:
            print_answer(config)


def print_answer(config: SolveConfig) -> None:
    """Prints the answer to the puzzle of the config. ValueError, one line, where there is none."""
    if world_size() > 1:
        raise ValueError("solve.py is one process: start it with python, not with torchrun")
    set_cpu_threads(config.cpu_threads)
    solver = load(config.checkpoint, data_path=config.data_path, raw=config.raw, device=config.device)
    answer = solver.answer(config)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    log.info(draw_answer(answer, width=shutil.get_terminal_size().columns, color=color))
    if config.picture is not None:
        write_picture(Path(config.picture), answer)


def write_picture(path: Path, answer: Answer) -> None:
    """Draws the steps into an SVG file. ValueError where it cannot be written."""
    try:
        path.write_text(draw_animation(answer), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"picture={path} cannot be written ({error.strerror}): give another file") from None
    log.info(f"wrote {path}")


def load(
    checkpoint: str | Path,
    *,
    data_path: str | Path | Sequence[str | Path] | None = None,
    raw: bool = False,
    device: str = "auto",
) -> "Solver":
    """Loads a trained model; the arguments are keys of solve.py. ValueError where it cannot be used."""
    path = Path(checkpoint)
    if not is_address(checkpoint) and not path.exists() and path.name != "best":
        raise ValueError(
            f"checkpoint {path} does not exist: give a run folder, or a step_<N> in one; {_DEMO}"
        )
    given = [data_path] if isinstance(data_path, str | Path) else data_path
    folders = None if given is None else [Path(each) for each in given]
    return Solver(find_checkpoint(checkpoint), folders, raw=raw, device=choose_device(device))


class Solver:
    """A trained model that solves single puzzles.

    info: of the dataset that it was trained on. folders: of that dataset, which may be gone.
    """

    def __init__(
        self, checkpoint: Checkpoint, folders: list[Path] | None, *, raw: bool, device: torch.device
    ):
        self.checkpoint, self.raw, self.device = checkpoint, raw, device
        self.info = find_info(checkpoint, folders)
        self.folders = folders or checkpoint.find_data()
        self._models: dict[Metadata, HaltingModel] = {}

    def solve(self, puzzle: str | Path | dict | Sequence | np.ndarray, **keys: Any) -> Answer:
        """Solves a puzzle: a text or a file, as on the command line, a task as a dict, or rows of numbers.

        keys: of solve.py, such as steps=64, samples=8. ValueError, one line, for a bad puzzle or key.
        """
        if isinstance(puzzle, dict):
            puzzle = json.dumps(puzzle)
        elif not isinstance(puzzle, str | Path):
            puzzle = "\n".join(" ".join(map(str, row)) for row in np.atleast_2d(puzzle).tolist())
        given = {"checkpoint": str(self.checkpoint.path), "puzzle": str(puzzle)}
        return self.answer(validate_config(SolveConfig, load_defaults("solve") | given | keys, where="solve"))

    def answer(self, config: SolveConfig) -> Answer:
        """Solves the puzzle of a config; of its checkpoint and machine nothing is read."""
        puzzle = self._read(config)
        metadata = self._metadata_for(puzzle)
        identifier = self._find_identifier(puzzle, config)
        if identifier is None:
            views = puzzle.draw_demonstrations(config.adapt_steps, seed=config.seed)
            options = {"lr": config.adapt_lr, "seed": config.seed, "device": self.device, "raw": self.raw}
            model, identifier = adapt(self.checkpoint, views, metadata, **options), 1
        else:
            model = self._model_for(metadata)
        return answer_puzzle(
            model, puzzle, config, style=self.info.style, identifier=identifier, device=self.device
        )

    def _read(self, config: SolveConfig) -> Puzzle:
        text, source = read_text(config.puzzle)
        kind, vocab_size = self.info.kind, self.info.metadata.vocab_size
        try:
            if self.info.vocabulary is not None:
                puzzles = [self.info.vocabulary.read_puzzle(text)]
            elif kind is not None and kind.read_puzzles is not None:
                puzzles = kind.read_puzzles(text)
            else:
                puzzles = read_symbols(text, self.info.style.symbols, vocab_size=vocab_size)
            puzzles = [puzzle.laid_into(self.info.metadata.seq_len) for puzzle in puzzles]
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        if config.test >= len(puzzles):
            range_of = f"has test inputs 0 to {len(puzzles) - 1}" if len(puzzles) > 1 else "has only test=0"
            raise ValueError(f"test={config.test} is out of range: {source} {range_of}")
        return puzzles[config.test]

    def _metadata_for(self, puzzle: Puzzle) -> Metadata:
        """Returns the metadata of a dataset of such puzzles. ValueError where the model cannot read them."""
        trained = self.info.metadata
        sizes = {"vocab_size": puzzle.vocab_size, "seq_len": len(puzzle.tokens)}
        reads_any = self.checkpoint.arch.reads_any_length
        if not reads_any and sizes != {name: getattr(trained, name) for name in sizes}:
            raise ValueError(
                f"the puzzle has {sizes['seq_len']} cells of {sizes['vocab_size']} tokens, but "
                f"{self.checkpoint} reads {trained.seq_len} cells of {trained.vocab_size} tokens"
            )
        return dataclasses.replace(trained, **sizes)

    def _model_for(self, metadata: Metadata) -> HaltingModel:
        """Returns the model for puzzles of these sizes, in evaluation mode."""
        if metadata not in self._models:
            model = load_trained_model(self.checkpoint, metadata, raw=self.raw)
            self._models[metadata] = model.to(self.device).eval()
        return self._models[metadata]

    def _find_identifier(self, puzzle: Puzzle, config: SolveConfig) -> int | None:
        """Finds the puzzle identifier to answer under; None where an embedding is to be trained first."""
        blank = self.info.metadata.blank_identifier_id
        if config.adapt and not puzzle.has_own_rule:
            raise ValueError("adapt=true is for puzzles with demonstrations, such as ARC tasks: drop it")
        if not self.checkpoint.arch.puzzle_emb_ndim:
            if config.adapt:
                raise ValueError(f"adapt=true: {self.checkpoint} has no puzzle embeddings to train: drop it")
            return blank
        if config.task is not None:
            return self._identifier_named(config.task)
        if not puzzle.has_own_rule:
            if names := [name for name in self._names() if name != BLANK]:
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise ValueError(f"the model knows several tasks by name: give task=NAME, one of {some}")
            return blank
        known = self._trained_on(puzzle)
        if known is None and not config.adapt:
            where = ", ".join(map(str, self.folders))
            raise ValueError(
                f"the model has no embedding for this task (its demonstrations are not in {where}): "
                "adapt=true trains one first; or name the task it is with task=NAME"
            )
        if known is not None and config.adapt:
            log.info(f"the model was trained on this task (identifier {known}): there is nothing to adapt")
        return known

    def _trained_on(self, puzzle: Puzzle) -> int | None:
        if not all((folder / "train" / "dataset.json").is_file() for folder in self.folders):
            return None
        training = open_datasets(self.folders, splits=("train",), read_everything=False).splits["train"]
        return puzzle.find_identifier(training)

    def _identifier_named(self, name: str) -> int:
        names = self._names()
        if name not in names:
            hint = "".join(
                f", did you mean {near!r}?" for near in difflib.get_close_matches(name, names, n=1)
            )
            where = ", ".join(map(str, self.folders))
            raise ValueError(f"task={name} is no puzzle identifier in {where}{hint}")
        return names[name]

    def _names(self) -> dict[str, int]:
        """Reads the puzzle identifiers of the dataset; of folders that share a name the first has it."""
        names: dict[str, int] = {}
        for number, name in enumerate(name for folder in self.folders for name in read_names(folder)):
            names.setdefault(name, number)
        return names


if __name__ == "__main__":
    main()
