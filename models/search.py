"""The interface of networks that search in evaluation. LDT (models/ldt.py) is the only one.

An evaluation runs a search like any other network: evaluation/loop.py calls `HaltingModel` until the slot
halts. The slot halts if the search has found an answer (`wants_to_halt`), or after the largest number of
steps. The methods below serve other programs: they display a search, or run it in a web page.
"""

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from dataset.metadata import Metadata
from models.carry import State
from models.network import Network


class SearchView(NamedTuple):
    """The state of a search on each puzzle, for display.

    Attributes:
        candidates: Tokens that are still possible in each cell, bool [batch, seq_len, vocab].
        guess: Cell in which the last step guessed a value, int16 [batch]. If the step did not guess, it is
            NO_GUESS. If the step reset the board to its start, it is RESET.
    """

    candidates: Tensor
    guess: Tensor


NO_GUESS, RESET = -1, -2


class Search(Network):
    """The base class of networks that search in evaluation.

    If the search finds no answer within the largest number of steps, the puzzle is undecided. If several
    samples of a puzzle run, the sample that halts first gives the answer. Every thinking step needs random
    numbers (`SlotRng`).

    Attributes:
        of_data: Names of the tensors of a checkpoint that describe the training data, and are not learned.
    """

    is_search: ClassVar[bool] = True
    is_random: ClassVar[bool] = True
    of_data: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        """Returns a copy of a dataset's metadata, with the facts about the training data from a checkpoint.

        weights: State dict of a trained network. Its tensors with names in `of_data` contain these facts.
        """
        raise NotImplementedError

    def view(self, state: State) -> SearchView:
        """Returns the tokens that are still possible in each cell, and the last guess, for display.

        state: State of the network, after a thinking step.
        """
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns the constants, as JSON values, with which a web page runs the search (share/browser.py)."""
        raise NotImplementedError
