"""The interface of networks that search in evaluation. LDT (models/ldt.py) is one.

`evaluation.loop` runs a search as it runs other networks: it calls `HaltingModel` until the slot halts. A
slot halts if the search has found an answer (`wants_to_halt`), or after the largest number of steps.
"""

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from dataset.format import Metadata
from models.carry import State
from models.network import Network


class SearchView(NamedTuple):
    """The state of a search on each puzzle, for display.

    candidates: Tokens that are still possible in each cell, bool [batch, seq_len, vocab].
    guess: Cell in which the last step guessed a value, int16 [batch]. NO_GUESS: it did not guess. RESET: it
    reset the board.
    """

    candidates: Tensor
    guess: Tensor


NO_GUESS, RESET = -1, -2


class Search(Network):
    """The base of networks that search in evaluation.

    If the search finds no answer within the largest number of steps, the puzzle is undecided. With several
    samples, the sample that halts first gives the answer. Every thinking step needs a `SlotRng`.

    of_data: Names of the stored tensors that describe the training data, and are not learned.
    """

    is_search: ClassVar[bool] = True
    of_data: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        """Returns the metadata, with the facts about the training data that `weights` contains.

        weights: State dict of a trained network.
        """
        raise NotImplementedError

    def view(self, state: State) -> SearchView:
        """Returns the candidates of each cell and the last guess, for display."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns the constants, as JSON values, with which a web page runs the search (share/browser.py)."""
        raise NotImplementedError
