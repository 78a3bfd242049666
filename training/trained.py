"""The examples on which the weights were trained, by this run and by those that it started from."""

from collections.abc import Callable
from pathlib import Path

from checkpointing.files import TRAINED_FILE
from checkpointing.finding import find_checkpoint
from config.schema import PretrainConfig
from dataset.equal import Trained, read_trained
from distributed.world import is_main
from evaluation.leaks import find_trained


class TrainedExamples:
    """The examples on which the weights were trained. Only rank 0 knows them.

    of_this_run: Function (step) -> hashes of this run's examples that were trained on up to the step. If it
        is None, no examples are known, and checkpoints do not contain them.
    """

    def __init__(self, of_this_run: Callable[[int], Trained] | None):
        self._of_this_run = of_this_run
        self._before: Trained | None = None  # those on which the weights were trained before this launch

    def start_from(self, config: PretrainConfig, checkpoint: Path | None, *, is_this_run: bool) -> None:
        """Reads the examples on which the weights were trained before this launch. Only rank 0 calls it.

        Raises ValueError if a file is damaged.

        checkpoint: Folder of the checkpoint from which training continues. If None, the weights come from the
            checkpoint `init_from`, or are random.
        is_this_run: Whether `checkpoint` is a checkpoint of this run.
        """
        if checkpoint is None and config.init_from is None:  # the weights are random
            return
        if checkpoint is None:
            found = find_trained(find_checkpoint(config.init_from))
        elif (found := read_trained(checkpoint / TRAINED_FILE)) is None and not is_this_run:
            found = find_trained(find_checkpoint(checkpoint))
        elif found is None:  # an older version saved it: only the examples of `init_from` are unknown
            found = Trained.of([], is_complete=config.init_from is None)
        self._before = Trained.of([], is_complete=False) if found is None else found

    def at(self, step: int) -> Trained | None:
        """Returns hashes of all examples on which the weights at training step `step` were trained.

        If some of the examples are unknown, the field `is_complete` of the result is False. Returns None on
        ranks other than 0, and if `of_this_run` of the constructor is None. Call it after `start_from`.
        """
        return self._of_this_run(step).join(self._before) if is_main() and self._of_this_run else None
