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
    """What a search knows about each puzzle after a step, for display.

    Attributes:
        candidates: Which tokens are still possible in each cell, bool [batch, seq_len, vocab].
        guess: Index of the cell in which the last step guessed a token, int16 [batch]. NO_GUESS (-1) if it
            did not guess. RESET (-2) if it restored the initial candidates.
    """

    candidates: Tensor
    guess: Tensor


NO_GUESS, RESET = -1, -2


class Search(Network):
    """The base class of networks that search for an answer in an evaluation.

    Each call of the network is one step of the search. If the search finds no answer within the largest
    number of calls, the puzzle is undecided. An evaluation may run several searches on one puzzle, with
    different random numbers. The answer is then that of the search that finishes first. Every call needs
    random numbers (`SlotRng`).

    Attributes:
        of_data: Names of the tensors in a checkpoint that describe the training data, such as "candidates".
    """

    is_search: ClassVar[bool] = True
    is_random: ClassVar[bool] = True
    of_data: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        """Adds facts about the training data to the metadata of a dataset. Returns a copy.

        Example: which labels a cell may have, by its input token. The files of a dataset do not contain these
        facts, but the network needs them.

        weights: State dict of a trained network. The tensors with names in `of_data` contain the facts.
        """
        raise NotImplementedError

    def view(self, state: State) -> SearchView:
        """Returns the possible tokens of each cell, and the last guess, for display.

        state: State of the network after a call.
        """
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns the constants that a web page needs to run the search.

        The result is {name: value}, with values for JSON. Example: {"kill_threshold": 0.1}.
        """
        raise NotImplementedError
