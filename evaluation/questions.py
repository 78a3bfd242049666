"""Reads the puzzle for solve.py, in the symbols and sizes of the model's training data."""

import dataclasses
import difflib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from checkpointing.finding import Checkpoint
from checkpointing.loading import architecture_errors, load_weights
from checkpointing.sizes import sizes_in
from config.programs import SolveConfig
from dataset.description import DatasetInfo, read_info, read_names
from dataset.kinds.kind import Puzzle, kinds_of, read_symbols
from dataset.kinds.pairs.files import parse_grid
from dataset.metadata import BLANK, Metadata, usual_metadata
from dataset.mixture import open_datasets
from distributed import log
from evaluation.known import find_match
from runtime.reading import read_text

_FILES = (".txt", ".json", ".csv")


class Questions:
    """Reads puzzles from text for one model.

    The text must have the symbols of the model's training data, such as "1..4 .... ...3 4..1" for a Sudoku.

    Args:
        checkpoint: The trained model.
        folders: Dataset folders of the training data. If None, the folders that the checkpoint names. Those
            may be missing on this machine.

    Attributes:
        info: Kind of puzzle, symbols and sizes of the training data.
    """

    def __init__(self, checkpoint: Checkpoint, folders: list[Path] | None):
        self._checkpoint = checkpoint
        self.info = find_info(checkpoint, folders)
        self._folders = folders or checkpoint.find_data()

    def read(self, config: SolveConfig) -> Puzzle:
        """Reads the puzzle that the key `puzzle` of a config of solve.py contains or names.

        If the text contains several puzzles, the key `test` is the index of the one to read, from 0. Raises
        ValueError if the puzzle is missing, malformed or unsolvable.
        """
        text, source = read_question(config.puzzle)
        kind, vocab_size = self.info.kind, self.info.metadata.vocab_size
        try:
            if self.info.vocabulary is not None:
                puzzles = [self.info.vocabulary.read_puzzle(text)]
            elif kind is not None and kind.read_puzzles is not None:
                puzzles = kind.read_puzzles(text)
            else:
                rules = kind and kind.accepts
                puzzles = read_symbols(text, self.info.style.symbols, vocab_size=vocab_size, rules=rules)
            if config.test >= len(puzzles):
                range_of = f"test=0 to test={len(puzzles) - 1}" if len(puzzles) > 1 else "only test=0"
                raise ValueError(f"test={config.test} is out of range: {source} has {range_of}")
            puzzle = puzzles[config.test].laid_into(self.info.metadata.seq_len)
            _ = puzzle.remark  # ValueError if it has no solution
        except ValueError as error:
            is_name = re.fullmatch(r"\S{1,255}\.[A-Za-z]\w{1,4}|\S*/\S*", text)  # looks like a file name
            missing = "there is no such file, and " if source == "puzzle" and is_name else ""
            advice = ""
            if kind is None and (builder := self.info.builder):
                advice = f". If a plugin defines the kind {builder[:40]!r}, add plugins=[FILE]."
            raise ValueError(f"{source}: {missing}{error}{advice}") from None
        return puzzle

    def text_of(self, puzzle: Any) -> str:
        """Converts a puzzle of Python values to the text that `read` reads.

        If the dataset of the model was built from a user's own pairs of grids, the rows may have any form
        that a file of pairs allows (`parse_grid`). Raises ValueError if the puzzle is neither rows nor an ARC
        task, if the model does not know a symbol, or if the text would be ambiguous.

        puzzle: Array, list of rows (lists or texts), or ARC task as a dict.
        """
        kind, vocabulary, puzzle = self.info.kind, self.info.vocabulary, _to_lists(puzzle)
        if isinstance(puzzle, dict) and kind is not None and kind.name == "arc":
            return json.dumps(puzzle, default=repr, skipkeys=True)
        if isinstance(puzzle, dict):
            raise ValueError("the puzzle is a dict, but the model is not for ARC tasks. Pass its rows.")
        if vocabulary is not None:
            grid = parse_grid(puzzle, "puzzle", symbols=vocabulary.symbols)
            vocabulary.tokens_of(grid)
            if (has_spaces := vocabulary.parts_by_spaces) and any(" " in row for row in grid):
                raise ValueError("the puzzle has the cell ' ', but spaces separate the model's symbols.")
        elif isinstance(puzzle, list) and puzzle and all(isinstance(row, str) for row in puzzle):
            grid, has_spaces = puzzle, False
        else:
            grid = parse_grid(puzzle, "puzzle", symbols=" ")
            # If all cells are texts of one character, a cell may be a space, as in a maze.
            cells = [cell for row in puzzle for cell in (row if isinstance(row, list | str) else [row])]
            has_spaces = kind is None or not all(isinstance(cell, str) and len(cell) == 1 for cell in cells)
        lines = [(" " if has_spaces else "").join(row) for row in grid]
        return "\n".join([*lines, ""])  # with a line break, the text is no file name

    def metadata_for(self, puzzle: Puzzle) -> Metadata:
        """Returns the metadata (sizes) of the training data, with the size of the given puzzle.

        Raises ValueError if the model cannot read puzzles of this size.
        """
        trained = self.info.metadata
        sizes = {"vocab_size": puzzle.vocab_size, "seq_len": len(puzzle.tokens)}
        reads_any = self._checkpoint.arch.reads_any_length
        if not reads_any and sizes != {name: getattr(trained, name) for name in sizes}:
            counts = (sizes["seq_len"], trained.seq_len)
            sides = [math.isqrt(count) for count in counts]
            if sides[0] ** 2 == counts[0] and sides[1] ** 2 == counts[1]:
                counts = [f"{side}x{side}" for side in sides]
            raise ValueError(
                f"the puzzle has {counts[0]} cells of {sizes['vocab_size']} tokens, but "
                f"{self._checkpoint} reads {counts[1]} cells of {trained.vocab_size} tokens"
            )
        return dataclasses.replace(trained, **sizes)

    def warn_of_size(self, puzzle: Puzzle) -> None:
        """Logs a warning if the puzzle has another number of cells than the puzzles of the training."""
        size, trained = len(puzzle.tokens), self.info.metadata.seq_len
        if size != trained:
            log.warning(
                f"the puzzle has {size} cells, but {self._checkpoint} was trained on puzzles of {trained} "
                "cells. The answer may be worse. Set steps=N for more thinking steps."
            )

    def find_identifier(self, puzzle: Puzzle, config: SolveConfig) -> int | None:
        """Returns the row of the model's puzzle embedding table that belongs to the puzzle.

        Returns None if the model has no row for the puzzle and the config has `adapt=true`. The caller must
        then train an embedding. If the model has no puzzle embeddings, or if the puzzles have no names, as
        Sudokus, returns the puzzle identifier that stands for no puzzle.

        Raises ValueError if the row cannot be found, or if the config key `task` is not the name of a puzzle.
        Also raises ValueError if the model has no puzzle embeddings, and the config has a `task` or
        `adapt=true`. With `adapt=true`, the puzzle needs demonstrations, and the config has no `task`.
        """
        number = self._find_number(puzzle, config)
        if not number or not all((path / "test" / "dataset.json").is_file() for path in self._folders):
            return number
        data = open_datasets(self._folders, splits=("test",), read_everything=False)
        match, where = find_match(self._checkpoint, data), ", ".join(map(str, self._folders))
        if match is None:
            count, known = (each.num_puzzle_identifiers for each in (data.metadata, self.info.metadata))
            if count != known:  # the model is built for `known`, so `load_trained_model` does not see it
                raise ValueError(
                    f"{where} has {count} puzzle identifiers, but {self._checkpoint} was trained with "
                    f"{known}. Set data_path to the dataset that it was trained on."
                )
            return number
        if match.rows[number] < 0:
            raise ValueError(
                f"{self._checkpoint} has no embedding for the puzzle identifier {number} of {where}. Set "
                "data_path to the dataset that it was trained on."
            )
        return int(match.rows[number])

    def _find_number(self, puzzle: Puzzle, config: SolveConfig) -> int | None:
        blank = self.info.metadata.blank_identifier_id
        if config.adapt and not puzzle.has_own_rule:
            raise ValueError("adapt=true is for puzzles with demonstrations, such as ARC tasks. Remove it.")
        if config.adapt and config.task is not None:
            raise ValueError(f"adapt=true has no effect with task={config.task}. Remove one of them.")
        if not self._checkpoint.arch.has_puzzle_embeddings:
            if config.adapt:
                raise ValueError(
                    f"adapt=true: {self._checkpoint} has no puzzle embeddings to train. Remove it."
                )
            if config.task is not None:
                raise ValueError(
                    f"task={config.task}: {self._checkpoint} has no puzzle embeddings. Remove it."
                )
            return blank
        where = ", ".join(map(str, self._folders))
        if config.task is not None or not puzzle.has_own_rule:
            names = [name for folder in self._folders for name in read_names(folder) or [BLANK]]
            if (count := self.info.metadata.num_puzzle_identifiers) != len(names):
                raise ValueError(
                    f"{where} does not name the {count} puzzle identifiers of the model. Set data_path to a "
                    "dataset with identifiers.json."
                )
            if config.task in names:  # if several folders have the name, the first one counts
                return names.index(config.task)
            if config.task is not None:
                near = difflib.get_close_matches(config.task, names, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"task={config.task} is not a puzzle identifier in {where}{hint}")
            if names := list(dict.fromkeys(name for name in names if name != BLANK)):
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise ValueError(f"the model knows several tasks by name. Set task=NAME, one of {some}.")
            return blank
        known = None
        if all((folder / "train" / "dataset.json").is_file() for folder in self._folders):
            training = open_datasets(self._folders, splits=("train",), read_everything=False)
            known = puzzle.find_identifier(training.splits["train"])
        if known is None and not config.adapt:
            raise ValueError(
                f"the model has no embedding for this task: its demonstrations are not in {where}. "
                "Set adapt=true to train one, or task=NAME if it is a known task."
            )
        if known is not None and config.adapt:
            log.info(f"the model was trained on this task (identifier {known}), so adapt=true has no effect")
        return known


def _to_lists(value: Any) -> Any:
    # Arrays and their numbers become Python lists and numbers.
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {key: _to_lists(item) for key, item in value.items()}
    return [_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


def read_question(puzzle: str | None) -> tuple[str, str]:
    """Reads the text of a puzzle from a file, standard input or the argument.

    Returns (text, name of the source for messages), such as ("1..4 ...", "standard input"). Raises ValueError
    if there is no text.

    puzzle: Text of the puzzle, a file name, or "-" for standard input.
    """
    if puzzle is None:
        raise ValueError(
            'puzzle is missing. Set it to a text such as "1..4 .... ...3 4..1", a file, or - for stdin.'
        )
    text, source = puzzle, "puzzle"
    if puzzle == "-":
        text, source = sys.stdin.read().removeprefix("\ufeff"), "standard input"
    elif os.path.exists(puzzle) or Path(puzzle).suffix in _FILES:  # no error for a text too long for a path
        try:
            text, source = read_text(Path(puzzle)), puzzle
        except ValueError as error:
            raise ValueError(
                f"puzzle={error}. Set it to a text file, a text, or - for standard input."
            ) from None
    if not text.strip():
        raise ValueError(f"{source} is empty. It must contain a puzzle.")
    return text, source


def find_info(checkpoint: Checkpoint, folders: list[Path] | None) -> DatasetInfo:
    """Returns the kind of puzzle, symbols and sizes of a model's training data.

    They are taken from the first of these sources that exists:

    1. the dataset folders `folders`, if it is not None
    2. the description of the dataset in the checkpoint
    3. the dataset folders that the checkpoint names
    4. the sizes of the weights in the checkpoint, such as the vocabulary size

    Raises ValueError if `folders` are not valid datasets. For source 4, raises ValueError if the sizes cannot
    be determined, or if several kinds of puzzles have these sizes.
    """
    if folders is None and checkpoint.dataset_info is not None:
        return DatasetInfo.from_json(checkpoint.dataset_info, where=f"dataset description of {checkpoint}")
    paths = folders or checkpoint.find_data()
    if folders is not None or all((path / "test" / "dataset.json").is_file() for path in paths):
        data = open_datasets(paths, splits=("test",), read_everything=False)
        return read_info(paths, data.metadata)
    weights = load_weights(checkpoint)
    sizes = {"seq_len": checkpoint.seq_len, "num_puzzle_identifiers": 1}
    with architecture_errors(checkpoint):
        sizes |= sizes_in(weights, checkpoint.arch)
    if sizes["seq_len"] is None or "vocab_size" not in sizes:
        where = ", ".join(map(str, paths))
        raise ValueError(
            f"unknown kind of puzzle: {checkpoint} does not describe its dataset, and {where} does not "
            "exist. Set data_path."
        )
    info = DatasetInfo(usual_metadata(**sizes))
    if len(fitting := kinds_of(info.metadata)) > 1:
        names = " or ".join(kind.name for kind in fitting)
        raise ValueError(f"{checkpoint} does not say whether its puzzles are {names}. Set data_path.")
    return info
