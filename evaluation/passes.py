"""One pass over a split: runs a model on every example, and computes metrics.

Every rank works on its slice of each global batch; metrics are sums over all ranks, and outputs are in
dataset order. `evaluation.loop` runs each puzzle once, `evaluation.test_time` several times.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dataset.format import IGNORE_LABEL_ID, Dataset
from dataset.kinds.kind import Answers
from dataset.loader import Batch, PuzzleDataset, read_batches
from dataset.plan import EvaluationPlan
from distributed.collectives import ALONE, Ranks, RankSums, all_ranks, gather_objects
from distributed.process_group import is_main
from distributed.progress import Progress
from evaluation.evaluators import Evaluators
from evaluation.loop import answer_batches
from evaluation.selection import ScoreKey, Scores, Settings, predicted_tokens
from evaluation.test_time import build_draw, run_settings
from models import HaltingModel
from models.carry import Reasoning, StepOutput
from models.network import Network
from models.objective import correct_sequences, divide, sum_names
from models.search import Search


@dataclasses.dataclass(frozen=True)
class SetResult:
    """The result of evaluating one set.

    metrics     of the network (none without labels; `count` among them), and <kind>/<metric> of evaluators;
                where all slots ran all steps, also act_exact_accuracy and act_steps: with early halting
    exact_accuracy_after_each_step  after step 1, 2, ..., where all slots ran all steps
    outputs     {name: [rows, ...]}, in dataset order
    scores      sums of every setting, if settings were evaluated; the other fields are of the largest one
    """

    metrics: dict[str, float]
    exact_accuracy_after_each_step: list[float]
    outputs: dict[str, np.ndarray]
    scores: Counter[ScoreKey] = dataclasses.field(default_factory=Counter)


def evaluate_split(
    model: HaltingModel,
    data: Dataset,
    split: str = "test",
    *,
    global_batch_size: int,
    reasoning: Reasoning | None = None,
    outputs: Sequence[str] = (),
    evaluators: Evaluators | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    only_first_batches: bool = False,
    puzzles: Mapping[str, np.ndarray] | None = None,
    all_reduce_stop: Callable[[], bool] = lambda: False,
    fetch_rows: Callable[[Tensor], None] | None = None,
    ranks: Ranks | None = None,
    stages: Ranks = ALONE,
) -> dict[str, SetResult] | None:
    """Evaluates every set of a split: {set: result} on rank 0, {} elsewhere. All ranks call it.

    model               is evaluated in evaluation mode, and then in its own mode again
    global_batch_size   number of slots over all ranks; each sample of a puzzle takes one
    reasoning           of the evaluation; None: as the architecture has it, with halting=max
    outputs             names of arrays to keep of every example, as in `save_outputs`
    settings            numbers of steps and samples to evaluate, instead of one run a puzzle
    seed                of the noise, if there is any
    only_first_batches  whether to evaluate only one batch of each set
    puzzles             for each set the indices of the puzzles to evaluate, int64 [n], rising; None: all
    all_reduce_stop     called by all ranks before every batch; after True the result is None
    fetch_rows          for sharded puzzle embeddings, called by all ranks before each set: loads those with
                        these identifiers, int64 [n]
    ranks               the ranks that share the puzzles; None: all
    stages              the ranks of this rank's pipeline; without settings only
    """
    network, ranks = model.network, ranks or all_ranks()
    reasoning = reasoning or model.eval_reasoning("max")
    device, was_training = next(model.parameters()).device, model.training
    num_puzzles = global_batch_size
    if settings is not None and settings.samples[-1] > 1:  # at least a puzzle for each rank
        num_puzzles = max(global_batch_size // settings.samples[-1], ranks.size)
    share = {"global_batch_size": num_puzzles, "only_first_batches": only_first_batches, "puzzles": puzzles}
    options = {"num_slots": -(-global_batch_size // ranks.size), "vocab_size": data.metadata.vocab_size}
    options["seed"], draw = seed, build_draw(network, reasoning, seed=seed)
    is_stopped = False

    def until_stopped(source: Iterator[tuple[str, Batch]]) -> Iterator[Batch]:
        """Yields the batches, on the device, until the ranks are asked to stop."""
        nonlocal is_stopped
        for _, batch in source:
            is_stopped = all_reduce_stop()
            if is_stopped:
                return
            yield batch.to(device)

    model.eval()
    try:
        sums = {}
        for name, puzzle_set in data.splits[split].sets.items():
            plan = EvaluationPlan({name: puzzle_set}, **share)
            dataset = PuzzleDataset(data, split, plan, rank=ranks.index, world_size=ranks.size)
            if fetch_rows is not None:
                fetch_rows(torch.from_numpy(dataset.distinct_identifiers()).to(device))
            num_steps = 0 if reasoning.halting == "act" or settings is not None else reasoning.max_steps
            sums[name] = _SetSums(network, device, ranks, num_steps=num_steps, outputs=outputs)
            if settings is not None:
                rules = evaluators.rules_of(name) if evaluators else None
                sums[name].scores = Scores(settings, rules=rules, is_search=isinstance(network, Search))
            bar = Progress(
                desc=f"evaluating {name}",
                total=puzzle_set.num_examples if puzzles is None else None,
                unit="puzzle",
                shown=sums[name].describe,
                leave=False,
                delay=3,
                disable=only_first_batches or not is_main(),
            )
            with bar, torch.inference_mode(), read_batches(dataset, device=device) as source:
                batches = until_stopped(source)
                if sums[name].scores is not None:
                    options["scores"] = sums[name].scores
                    answered = run_settings(model, batches, reasoning, **options)
                else:
                    more = {"draw": draw, "on_step": sums[name].add_step, "stages": stages}
                    finals = answer_batches(model, batches, reasoning, **more)
                    answered = ((final, None, None) for final in finals)
                for final, attempts, _ in answered:
                    sums[name].add(final)
                    bar.update(int(final.carry.data.is_real.sum()) * ranks.size)
                    if evaluators:
                        samples = None if attempts is None else _answers(attempts)
                        evaluators.add(name, _answers(final), samples=samples)
            if is_stopped:
                return None
    finally:
        model.train(was_training)
    extra = evaluators.gather_metrics(ranks) if evaluators else {}
    results = {name: part.reduce(extra.get(name, {})) for name, part in sums.items()}
    return results if is_main() else {}


class _SetSums:
    """The metric sums and outputs of one set on this rank, added up over the batches.

    scores: of the settings, if any. num_steps: the steps that all slots run; 0 with early halting.
    """

    def __init__(
        self, network: Network, device: torch.device, ranks: Ranks, *, num_steps: int, outputs: Sequence[str]
    ):
        self._network, self._metrics = network, RankSums(sum_names(network.objective.metrics), device, ranks)
        self._exact_after_step = torch.zeros(num_steps, dtype=torch.float32, device=device)
        self._act_sums = torch.zeros(2, dtype=torch.float32, device=device)  # exact answers, steps
        self._rows: list[np.ndarray] = []
        self._outputs: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
        self.scores: Scores | None = None

    def add_step(self, output: StepOutput, acts_here: Tensor) -> None:
        """Adds a step for the accuracy after each step; does nothing with early halting.

        acts_here: bool [slots], True in the step where the slot would halt first.
        """
        if not len(self._exact_after_step):
            return
        labels, steps = output.carry.data.labels, output.carry.steps
        _, is_exact = correct_sequences(output.prediction.logits, labels)
        self._exact_after_step.index_add_(0, steps.long() - 1, is_exact.to(self._exact_after_step.dtype))
        counted = acts_here & (labels != IGNORE_LABEL_ID).any(-1)
        self._act_sums += torch.stack([(counted & is_exact).sum(), (counted * steps).sum()])

    def add(self, final: StepOutput) -> None:
        self._metrics.add(self._network.objective.sums(final))
        if self._outputs:
            is_real = final.carry.data.is_real
            self._rows.append(final.carry.data.rows[is_real].cpu().numpy())
            for name, arrays in self._outputs.items():
                arrays.append(_output(name, final)[is_real].cpu().numpy())

    def describe(self) -> str:
        """Returns the accuracies on this rank so far, as a text for the progress bar."""
        sums = self._metrics.own()
        metrics = divide(sums, self._network.objective.metrics, slots=sums.get("count", 0))
        words = {"exact_accuracy": "solved", "accuracy": "cells right"}  # as in the report
        return "  ".join(f"{word} {metrics[name]:.3f}" for name, word in words.items() if name in metrics)

    def reduce(self, extra: dict[str, float]) -> SetResult:
        """Returns the result over all ranks, whole on rank 0 only. All ranks call it. extra: more metrics."""
        sums = self._metrics.reduce()
        metrics = divide(sums, self._network.objective.metrics, slots=sums.get("count", 0))
        passes = (self._exact_after_step, self._act_sums)
        exact, act = (self._metrics.ranks.reduce_sum_(each).tolist() for each in passes)
        if not metrics:
            exact = []
        elif len(exact) > 1:
            metrics["act_exact_accuracy"], metrics["act_steps"] = (part / metrics["count"] for part in act)
        parts = gather_objects((self._rows, self._outputs), self._metrics.ranks) if self._outputs else None
        outputs = {}
        if parts is not None:
            order = np.argsort(np.concatenate([array for rows, _ in parts for array in rows]))
            for name in self._outputs:
                arrays = [array for _, arrays_of_rank in parts for array in arrays_of_rank[name]]
                outputs[name] = np.concatenate(arrays)[order]
        after_each_step = [number / metrics["count"] for number in exact]
        scores: Counter[ScoreKey] = Counter()
        for part in (gather_objects(self.scores.sums, self._metrics.ranks) if self.scores else None) or ():
            scores.update(part)
        return SetResult(metrics | extra, after_each_step, outputs, scores)


def _answers(final: StepOutput) -> Answers:
    data = final.carry.data
    columns = Answers(
        inputs=data.inputs,
        labels=data.labels,
        puzzle_identifiers=data.puzzle_identifiers,
        preds=_output("preds", final),
        q_halt=final.prediction.q_halt,
    )
    return Answers(*(column[data.is_real].cpu().numpy() for column in columns))


def _output(name: str, output: StepOutput) -> Tensor:
    """Returns the array `name` of the key `save_outputs`: [batch, ...]. preds has unscored cells too."""
    logits = output.prediction.logits
    if name == "preds":
        return predicted_tokens(logits)
    if name == "logits":
        return logits.float()
    if name == "q_halt_logits":
        return output.prediction.q_halt
    if name == "q_continue_logits":
        return output.prediction.q_continue
    return getattr(output.carry.data, name)
