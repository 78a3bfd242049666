"""One pass over a split: runs a model on every example, and computes metrics.

Every rank works on its slice of each global batch. Metrics are summed over all ranks, and outputs are in
dataset order. `evaluation.loop` runs each puzzle once, `evaluation.test_time` runs it several times.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataset.kinds.evaluator import Answers
from dataset.loader import Batch, PuzzleDataset, read_batches
from dataset.metadata import IGNORE_LABEL_ID, Dataset
from dataset.plan import EvaluationPlan
from distributed.collectives import ALONE, Ranks, RankSums, all_ranks, gather_objects
from distributed.errors import local_errors
from distributed.progress import Progress
from distributed.world import is_main
from evaluation.evaluators import Evaluators
from evaluation.leaks import Leak
from evaluation.loop import answer_batches
from evaluation.names import written_name
from evaluation.selection import ScoreKey, Scores, Settings, predicted_tokens
from evaluation.test_time import build_draw, run_settings
from models import HaltingModel
from models.carry import Reasoning, StepOutput
from models.network import Network
from models.objective import correct_sequences, divide, sum_names


@dataclasses.dataclass(frozen=True)
class SetResult:
    """The result of evaluating a model on one test set.

    Attributes:
        metrics: {name: value}, such as "exact_accuracy", "count" (number of labeled puzzles), and
            "sudoku/valid_accuracy" from an evaluator. "unseen/<metric>" leaves out puzzles that the model was
            trained on. If the evaluation ran with halting=max, more than one thinking step and no `settings`,
            "act_exact_accuracy" and "act_steps" (mean number of thinking steps) are the values that
            halting=act would give.
        exact_accuracy_after_each_step: Fraction of solved puzzles after 1, 2, ... thinking steps. Empty with
            halting=act, with `settings`, or without labels.
        outputs: {name: array [examples, ...]}, in the order of the dataset.
        scores: {(number of thinking steps, number of samples, selection rule, what is counted): sum over
            puzzles}. Example of what is counted: "exact", the right answers (`Scores.sums`). Empty if
            `evaluate_split` got no `settings`. With `settings`, the other attributes describe the answers
            that the first rule selects, for the largest number of steps and the largest number of samples.
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
    leaks: Mapping[str, Leak] | None = None,
    all_reduce_stop: Callable[[], bool] = lambda: False,
    fetch_rows: Callable[[Tensor], None] | None = None,
    ranks: Ranks | None = None,
    stages: Ranks = ALONE,
) -> dict[str, SetResult] | None:
    """Evaluates a model on every set of a split. All ranks call it.

    Args:
        model: Model to evaluate. It runs in evaluation mode. Its previous mode is restored at the end.
        global_batch_size: Number of slots of all ranks together. Each sample of a puzzle takes one slot.
        reasoning: Number of thinking steps, early halting, and other settings. If None, the settings of the
            architecture, with halting=max, or with halting=act for a search model (LDT).
        outputs: Names of arrays to return for every example, such as "preds" or "logits".
        evaluators: Compute extra metrics from the answers. If None, there are no extra metrics.
        settings: Numbers of thinking steps and of samples to evaluate. If None, each puzzle has one sample,
            with the number of thinking steps in `reasoning`.
        seed: Seed of the noise.
        only_first_batches: Whether to evaluate only the first batch of each set.
        puzzles: {test set: indices of the puzzles to evaluate, int64 [n], ascending}. If None, all puzzles.
        leaks: {test set: puzzles that the model was trained on}. If None, there are no metrics about such
            puzzles.
        all_reduce_stop: Function that all ranks call before every batch. If it returns True, the evaluation
            stops.
        fetch_rows: Function (puzzle identifiers, int64 [n]) that loads their embeddings from other ranks, if
            the embeddings are sharded. All ranks call it before each set. If None, nothing is loaded.
        ranks: Ranks that divide the puzzles among themselves. If None, all ranks.
        stages: Ranks that hold the stages of this rank's pipeline. Not supported together with `settings`.

    Returns:
        {test set: result} on rank 0, {} on other ranks. None if `all_reduce_stop` returned True.
    """
    network, ranks = model.network, ranks or all_ranks()
    reasoning = reasoning or model.eval_reasoning("max")
    device, was_training = next(model.parameters()).device, model.training
    num_puzzles = global_batch_size
    if settings is not None and settings.samples[-1] > 1:  # at least one puzzle for each rank
        num_puzzles = max(global_batch_size // settings.samples[-1], ranks.size)
    share = {"global_batch_size": num_puzzles, "only_first_batches": only_first_batches, "puzzles": puzzles}
    options = {"num_slots": -(-global_batch_size // ranks.size), "vocab_size": data.metadata.vocab_size}
    options["seed"], draw = seed, build_draw(network, reasoning, seed=seed)
    has_seen = {name for name, leak in (leaks or {}).items() if leak.rate == 1 and len(leak.rows)}
    of_unseen = evaluators.fresh_copy(only_answered=True) if evaluators and has_seen else None
    is_stopped = False

    def until_stopped(source: Iterator[tuple[str, Batch]]) -> Iterator[Batch]:
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
            leak = leaks[name] if leaks else None
            sums[name] = _SetSums(network, device, ranks, num_steps=num_steps, outputs=outputs, leak=leak)
            if settings is not None:
                rules = evaluators.rules_of(name) if evaluators else None
                sums[name].scores = Scores(settings, rules=rules, is_search=network.is_search)
            bar = Progress(
                desc=f"evaluating {name}",
                total=puzzle_set.num_examples if puzzles is None else None,
                unit="puzzles",
                shown=sums[name].describe,
                leave=False,
                delay=3,
                disable=only_first_batches or not is_main(),
            )
            with bar, torch.inference_mode(), read_batches(dataset, device=device) as source:
                batches = until_stopped(source)

                def on_step(*step: Any, part: _SetSums = sums[name], bar: Progress = bar) -> None:
                    part.add_step(*step)
                    bar.update(0)  # also shows progress while no puzzle is complete

                if sums[name].scores is not None:  # several settings or samples of each puzzle
                    options |= {"scores": sums[name].scores, "on_step": on_step}
                    options["runs_all"] = bool(evaluators) and evaluators.needs_all_samples(name)
                    answered = run_settings(model, batches, reasoning, **options)
                else:
                    more = {"draw": draw, "on_step": on_step, "stages": stages}
                    finals = answer_batches(model, batches, reasoning, **more)
                    answered = ((final, None, None) for final in finals)
                for final, attempts, _ in answered:
                    sums[name].add(final)
                    bar.update(int(final.carry.data.is_real.sum()) * ranks.size)
                    if evaluators:
                        _add_answers(evaluators, name, network, final, attempts)
                    if of_unseen and name in has_seen:
                        select = sums[name].select_unseen
                        _add_answers(of_unseen, name, network, select(final), attempts and select(attempts))
            if is_stopped:
                return None
    finally:
        model.train(was_training)
    extra = evaluators.gather_metrics(ranks) if evaluators else {}
    for name, metrics in (of_unseen.gather_metrics(ranks) if of_unseen else {}).items():
        if name in has_seen:
            unseen = {f"unseen/{metric}": value for metric, value in metrics.items()}
            extra[name] = extra.get(name, {}) | unseen
    results = {name: part.reduce(extra.get(name, {})) for name, part in sums.items()}
    return results if is_main() else {}


def _add_answers(
    evaluators: Evaluators, name: str, network: Network, final: StepOutput, attempts: StepOutput | None
) -> None:
    answers, samples = _answers(network, final), None
    if attempts is not None:
        samples = _answers(network, attempts)
        samples = samples._replace(num_samples=len(samples.preds) // max(len(answers.preds), 1) or 1)
    evaluators.add(name, answers, samples=samples)


class _SetSums:
    """Sums the metrics of one test set on this rank, and collects its outputs.

    num_steps: The exact accuracy is computed after each of the first `num_steps` thinking steps. If 0, it is
    computed only for the final answers.
    outputs: Names of arrays to store for every example, such as "preds".
    leak: Puzzles of the test set that the model was trained on. None if nothing is known about them.
    """

    def __init__(
        self,
        network: Network,
        device: torch.device,
        ranks: Ranks,
        *,
        num_steps: int,
        outputs: Sequence[str],
        leak: Leak | None,
    ):
        names = sum_names(network.objective.metrics)
        self._network, self._metrics = network, RankSums(names, device, ranks)
        self._leak = leak
        self._unseen = RankSums(names, device, ranks) if leak is not None and len(leak.rows) else None
        self._seen_rows = torch.from_numpy(leak.rows).to(device) if self._unseen is not None else None
        self._exact_after_step = torch.zeros(num_steps, dtype=torch.float32, device=device)
        self._act_sums = torch.zeros(2, dtype=torch.float32, device=device)  # exact answers, steps
        self._rows: list[np.ndarray] = []
        self._outputs: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
        self.scores: Scores | None = None

    def add_step(self, output: StepOutput, acts_here: Tensor) -> None:
        """Counts right answers after a thinking step of a batch. If `num_steps` is 0, counts nothing.

        acts_here: bool [batch]. True in the thinking step in which halting=act would halt the slot.
        """
        if not len(self._exact_after_step):
            return
        labels, steps = output.carry.data.labels, output.carry.steps
        _, is_exact = correct_sequences(output.prediction.logits, labels)
        self._exact_after_step.index_add_(0, steps.long() - 1, is_exact.to(self._exact_after_step.dtype))
        counted = acts_here & (labels != IGNORE_LABEL_ID).any(-1)
        self._act_sums += torch.stack([(counted & is_exact).sum(), (counted * steps).sum()])

    def add(self, final: StepOutput) -> None:
        sums = self._network.objective.sums(final)
        if "count" not in sums:  # of a plugin's model
            with local_errors():
                name = type(self._network.objective).__name__
                raise ValueError(f'{name}.sums returns no "count", the number of answered puzzles. Add it.')
        self._metrics.add(sums)
        if self._unseen is not None:
            self._unseen.add(self._network.objective.sums(self.select_unseen(final)))
        if self._outputs:
            is_real = final.carry.data.is_real
            self._rows.append(final.carry.data.rows[is_real].cpu().numpy())
            for name, arrays in self._outputs.items():
                arrays.append(_output(name, final)[is_real].cpu().numpy())

    def select_unseen(self, output: StepOutput) -> StepOutput:
        return output.select((~torch.isin(output.carry.data.rows, self._seen_rows)).nonzero().flatten())

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        return divide(sums, self._network.objective.metrics, slots=sums.get("count", 0))

    def describe(self) -> str:
        """Returns the metrics of this rank for the progress bar: "solved 0.512  cells right 0.914"."""
        metrics = self._means(self._metrics.own())
        names = [name for name in ("exact_accuracy", "accuracy") if name in metrics]
        return "  ".join(f"{written_name(name)} {metrics[name]:.3f}" for name in names)

    def _leak_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics about test puzzles that the model was trained on. All ranks call it.

        Examples are "trained_on" (number of these puzzles) and "unseen/accuracy" (accuracy without them).

        metrics: Metrics of all puzzles of the set, on all ranks together.
        """
        leak, count = self._leak, metrics.get("count", 0)
        unseen = {"count": count}
        if self._unseen is not None:
            unseen = self._means(self._unseen.reduce())
        if leak is None or not metrics:
            return {}
        found = {"trained_on_rate": leak.rate}
        if count:
            found["distinct_count"] = min(leak.num_distinct, count)
        if leak.share is not None:
            names = ("trained_on", "trained_on_low", "trained_on_high")
            return found | {name: fraction * count for name, fraction in zip(names, leak.share, strict=True)}
        num_unseen = unseen.get("count", 0.0)
        if leak.rate == 1 or num_unseen < count:
            found["trained_on"] = count - num_unseen
        if leak.rate == 1 and num_unseen < count:
            found |= {f"unseen/{name}": value for name, value in unseen.items() if name.endswith("accuracy")}
            found["unseen/count"] = num_unseen
        return found

    def reduce(self, extra: dict[str, float]) -> SetResult:
        """Sums the metrics over the ranks that divided the puzzles. All ranks call it.

        Returns the result on the first of these ranks. On the other ranks, the result is undefined.

        extra: Metrics of the evaluators, such as {"sudoku/valid_accuracy": 0.9}. The result includes them.
        """
        metrics = self._means(self._metrics.reduce())
        passes = (self._exact_after_step, self._act_sums)
        exact, act = (self._metrics.ranks.reduce_sum_(tensor).tolist() for tensor in passes)
        if not metrics:
            exact = []
        elif len(exact) > 1:
            metrics["act_exact_accuracy"], metrics["act_steps"] = (part / metrics["count"] for part in act)
        outputs = {}
        if self._outputs and (parts := gather_objects((self._rows, self._outputs), self._metrics.ranks)):
            order = np.argsort(np.concatenate([array for rows, _ in parts for array in rows]))
            for name in self._outputs:
                arrays = [array for _, arrays_of_rank in parts for array in arrays_of_rank[name]]
                outputs[name] = np.concatenate(arrays)[order]
        metrics |= self._leak_metrics(metrics)
        after_each_step = [num_exact / metrics["count"] for num_exact in exact]
        scores: Counter[ScoreKey] = Counter()
        for part in (gather_objects(self.scores.sums, self._metrics.ranks) if self.scores else None) or ():
            scores.update(part)
        return SetResult(metrics | extra, after_each_step, outputs, scores)


def _answers(network: Network, final: StepOutput) -> Answers:
    data, is_decided = final.carry.data, None
    if network.is_search:
        is_decided = network.wants_to_halt(final.carry.state, final.prediction)[data.is_real].cpu().numpy()
    preds, q_halt = _output("preds", final), final.prediction.q_halt
    columns = (data.inputs, data.labels, data.puzzle_identifiers, preds, q_halt)
    return Answers(*(column[data.is_real].cpu().numpy() for column in columns), is_decided=is_decided)


def _output(name: str, output: StepOutput) -> Tensor:
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
