"""Creates answers without a model, for tests of evaluators."""

import numpy as np

from dataset.kinds.evaluator import Answers, Evaluator
from dataset.metadata import Metadata, usual_metadata
from distributed.world import rank, world_size
from evaluation.evaluators import Evaluators


def metadata(**changes) -> Metadata:
    """Returns the metadata of 4x4 Sudokus, with some fields changed."""
    return usual_metadata(**{"vocab_size": 6, "seq_len": 16, "num_puzzle_identifiers": 1, **changes})


def answers(inputs, labels, preds, *, identifiers=None, q_halt=None) -> Answers:
    """Creates `Answers` from lists or arrays. `preds` keeps its dtype.

    identifiers: Puzzle identifiers. If None, all are 0. q_halt: Logits. If None, all are 0.
    """
    preds = np.asarray(preds)
    num = len(preds)
    return Answers(
        inputs=np.asarray(inputs, np.int32),
        labels=np.asarray(labels, np.int32),
        puzzle_identifiers=np.asarray(np.zeros(num) if identifiers is None else identifiers, np.int32),
        preds=preds,
        q_halt=np.asarray(np.zeros(num) if q_halt is None else q_halt, np.float32),
    )


def metrics_of(evaluator: Evaluator) -> dict[str, dict[str, float]]:
    """Returns the metrics of all answers that were added to an evaluator, as in a run with one rank."""
    return evaluator.metrics([evaluator.partial()])


def add_in_batches(
    evaluators: Evaluators, set_name: str, everything: Answers, *, global_batch_size: int
) -> None:
    """Adds this rank's share of every global batch of answers, as in an evaluation.

    The share of the last batch may be empty.
    """
    local = -(-global_batch_size // world_size())
    for start in range(0, len(everything.preds), global_batch_size):
        first, end = start + rank() * local, min(start + (rank() + 1) * local, start + global_batch_size)
        evaluators.add(set_name, Answers(*(array[first:end] for array in everything[:5])))
