"""The interface of a network whose evaluation is a search."""

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from dataset.format import Metadata
from models.carry import State
from models.network import Network


class Board(NamedTuple):
    """The state of a search on each puzzle, for display.

    candidates: bool [batch, seq_len, vocab], the tokens that are still possible in a cell. guess: int16
    [batch], the cell at which the last step guessed a value; NO_GUESS; or ANEW if it reset the board.
    """

    candidates: Tensor
    guess: Tensor


NO_GUESS, ANEW = -1, -2


class Search(Network):
    """The base of networks that search: a try at a puzzle ends when the network wants to halt.

    The first such try answers the puzzle; without one the puzzle is undecided. Every step needs `SlotRng`.

    of_data  names of stored tensors that are facts of the training data, not learned
    """

    is_search: ClassVar[bool] = True
    of_data: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        """Returns the metadata with facts about the training data that are stored in the weights."""
        raise NotImplementedError

    def board(self, state: State) -> Board:
        """Returns the candidates of each cell, for display."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns constants as JSON values, by which a web page runs the search itself."""
        raise NotImplementedError
