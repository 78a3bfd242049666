"""A puzzle as somebody asks it: a text, and the tokens that it stands for.

Every kind of puzzle reads its usual forms (`Kind.read_questions`). For all others `read_symbols` reads the
symbols of the tokens. Takes no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from dataset.format import Split
    from dataset.puzzle_set import PuzzleSet

# Inputs and answers, tokens [n, seq_len] each -> which answers the rules of the puzzle accept: bool [n].
Rules = Callable[[np.ndarray, np.ndarray], np.ndarray]

_MAX_COLUMNS = 32


@dataclasses.dataclass(frozen=True)
class Question:
    """A puzzle without its answer.

    tokens      uint8 or int32 [seq_len]
    vocab_size  of the datasets that have such puzzles
    rules       None where they cannot tell
    solution    tokens [seq_len], where the text has it
    """

    tokens: np.ndarray
    vocab_size: int
    rules: Rules | None = None
    solution: np.ndarray | None = None
    has_own_rule: ClassVar[bool] = False
    """Whether its rule is in demonstrations of its own, so that a model knows it by its puzzle embedding."""

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns which cells of an answer [seq_len] make its grid: int64 [rows, columns]."""
        return to_grid(np.arange(len(tokens)))

    def is_solution(self, tokens: np.ndarray) -> bool:
        """Tells whether an answer, tokens [seq_len], is the solution: by the cells of their grids."""
        ours, right = self.cells_of(tokens), self.cells_of(self.solution)
        return np.array_equal(ours, right) and bool((tokens[ours] == self.solution[right]).all())

    def laid_into(self, seq_len: int) -> Question:
        """Returns the puzzle as datasets of so many cells have it: itself, unless it lies in a field.

        ValueError where it is larger than the field.
        """
        return self

    def find_identifier(self, training: Split) -> int | None:
        """Finds the puzzle identifier under which a model was trained on this puzzle's demonstrations.

        None where it was not, or where the puzzle has none.
        """
        return None

    def draw_demonstrations(self, num_views: int, *, seed: int) -> PuzzleSet | None:
        """Makes views of its demonstrations, each a puzzle of identifier 1; None where it has none."""
        return None


def to_grid(cells: np.ndarray, *, num_columns: int | None = None) -> np.ndarray:
    """Reshapes [seq_len] to [rows, columns]; without a number of columns a square where it can be one."""
    if num_columns is not None:
        return cells.reshape(-1, num_columns)
    num_columns = math.isqrt(len(cells))
    if num_columns**2 != len(cells):
        num_columns = next(number for number in range(_MAX_COLUMNS, 0, -1) if len(cells) % number == 0)
    return cells.reshape(-1, num_columns)


def read_symbols(text: str, symbols: Sequence[str], *, vocab_size: int) -> list[Question]:
    """Reads a puzzle of symbols: with spaces between them or, where each is one character, without.

    symbols: of the tokens 0, 1, ...; where there are none, a token is its number. ValueError where a symbol
    is unknown.
    """
    names = list(symbols)[:vocab_size] or [str(token) for token in range(vocab_size)]
    token_of = {name: token for token, name in enumerate(names)}
    words = text.split()
    if not all(word in token_of for word in words) and all(len(name) == 1 for name in names):
        words = [character for character in text if character in token_of or not character.isspace()]
    if unknown := [word for word in words if word not in token_of]:
        known = " ".join(names) if len(names) <= 40 else f"{' '.join(names[:20])} ... {names[-1]}"
        raise ValueError(f"{unknown[0][:40]!r} is no symbol of its puzzles: {known}")
    return [Question(np.array([token_of[word] for word in words], np.int32), vocab_size)]
