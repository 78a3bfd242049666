"""Test-time compute: every puzzle is run several times, and longer, and one of its attempts answers it.

A slot works on an attempt: a puzzle and the number of its sample. All attempts go to the largest number of
steps, and on the way leave what each (steps, samples) of a grid needs: a 64-step result continues the 16-step
one, and 8 samples include the first 4, so that the grid costs what its largest setting costs. Invariant: an
attempt depends on the seed, its puzzle and its sample alone; so does the selection, and sums are of integers.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from config.schema import EvaluateConfig, SolveConfig
from dataset.format import IGNORE_LABEL_ID
from dataset.kinds.kind import Answers
from dataset.loader import Batch
from evaluation.halting import Draw, OnStep, Race, answer_batches
from evaluation.scores import Grid, Scores
from evaluation.selection import ANSWER_AT, AnswerAt
from models import HaltingModel
from models.carry import Carry, Prediction, Reasoning, State, StepOutput, where
from models.network import Network
from models.random import Draws

_RESIDUAL_STEPS = 3  # EqR takes the mean change of so many last steps


def set_up(model: HaltingModel, config: EvaluateConfig) -> tuple[Reasoning, Grid | None]:
    """Returns how long and how noisily attempts are to reason, and the grid, if the config asks for one.

    ValueError where that means nothing for this model.
    """
    steps = sorted(config.halt_max_steps or [model.eval_reasoning.max_steps])
    samples = sorted(config.samples)
    reasoning = reasoning_of_samples(model, config, max_steps=steps[-1], num_samples=samples[-1])
    selects = tuple(config.select)
    if model.network.is_search:
        if extra := set(selects) - {"q_head", "first_to_halt"}:
            raise ValueError(f"select={min(extra)}: this model's first run to halt is its answer: drop it")
        selects = ("first_to_halt",)
    return reasoning, Grid(tuple(steps), tuple(samples), selects) if config.asks_for_grid else None


def reasoning_of_samples(
    model: HaltingModel, config: EvaluateConfig | SolveConfig, *, max_steps: int, num_samples: int
) -> Reasoning:
    """Returns the reasoning of the architecture with the noises and the damping that a config names."""
    network = model.network
    asked = {"noise": config.noise or None, "init_noise": config.init_noise, "damping": config.damping}
    named = {name: value for name, value in asked.items() if value is not None}
    if named and not network.keeps_state:
        first, *_ = named
        raise ValueError(f"{first} is for models that keep a state between steps, this one does not: drop it")
    named["step_noise"] = named.pop("noise", 0.0)
    halts_early = config.halting == "act" or network.is_search
    reasoning = dataclasses.replace(
        model.eval_reasoning, max_steps=max_steps, halts_early=halts_early, **named
    )
    if num_samples > 1 and not network.needs_draws(reasoning):
        raise ValueError(
            f"samples={num_samples} would all be the same run: add noise=0.3, say, or init_noise=1"
        )
    return reasoning


def build_draw(network: Network, reasoning: Reasoning, *, seed: int, num_samples: int = 1) -> Draw:
    """Makes the random numbers of the steps of an evaluation, where the network needs them.

    Slots hold attempts, row * num_samples + sample in place of the row.
    """

    def draw(carry: Carry) -> Draws | None:
        if not network.needs_draws(reasoning):
            return None
        rows, samples = carry.data.rows // num_samples, carry.data.rows % num_samples
        return Draws.of_evaluation(seed, rows=rows, samples=samples, steps=carry.steps + 1)

    return draw


def split_into_attempts(batches: Iterator[Batch], *, num_samples: int, num_slots: int) -> Iterator[Batch]:
    """Yields every row num_samples times, in batches of num_slots, the last one padded.

    The attempt, row * num_samples + sample, replaces the row. With one sample batches stay as they are.
    """
    if num_samples == 1:
        yield from batches
        return
    waiting: Batch | None = None
    for batch in batches:
        real = batch.is_real.nonzero().flatten().repeat_interleave(num_samples)
        attempts = batch.select(real)
        samples = torch.arange(len(real), device=real.device) % num_samples
        attempts = attempts._replace(rows=attempts.rows * num_samples + samples)
        waiting = attempts if waiting is None else Batch.join([waiting, attempts])
        while len(waiting.rows) >= num_slots:
            yield waiting.select(slice(num_slots))
            waiting = waiting.select(slice(num_slots, None))
    if waiting is not None and len(waiting.rows):
        slots = torch.arange(num_slots, device=waiting.rows.device).clamp(max=len(waiting.rows) - 1)
        padded = waiting.select(slots)
        is_real = torch.arange(num_slots, device=slots.device) < len(waiting.rows)
        padded = padded._replace(rows=torch.where(is_real, padded.rows, -1))
        yield padded._replace(labels=torch.where(is_real[:, None], padded.labels, IGNORE_LABEL_ID))


class HistoryNetwork(nn.Module):
    """A network that also keeps, as part of its state, what the ways to select need of the steps so far.

    So it travels with its slot, and starts anew with it. `halt.` is the answer of the step where the network
    wants to halt first, until then the newest; `peak.` is the answer of the step with the largest q_halt.
    Each has logits, q_halt, q_continue, and steps, int32 [batch]: the number of its step.
    """

    _KEPT: tuple[AnswerAt, ...] = ("halt", "peak")

    def __init__(self, network: Network, *, vocab_size: int):
        super().__init__()
        self.network, self._vocab_size = network, vocab_size
        self.wants_to_halt, self.halts = network.wants_to_halt, network.halts

    def start(self, data: Batch, reasoning: Reasoning, draws: Draws | None, fresh: Tensor) -> State:
        batch_size, seq_len = data.inputs.shape
        device = data.inputs.device
        logits = torch.zeros(batch_size, seq_len, self._vocab_size, dtype=self.network.dtype, device=device)
        numbers = torch.zeros(batch_size, dtype=torch.float32, device=device)
        steps = torch.zeros(batch_size, dtype=torch.int32, device=device)
        history = {
            "history.steps": steps,
            "history.has_halted": steps.bool(),
            "history.logits": logits,
            "history.changes": numbers[:, None].expand(-1, _RESIDUAL_STEPS) * torch.nan,
        }
        for at in self._KEPT:
            answer = {"logits": logits, "q_halt": numbers, "q_continue": numbers, "steps": steps}
            history |= {f"{at}.{name}": tensor for name, tensor in answer.items()}
        return self.network.start(data, reasoning, draws, fresh) | history

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        own = {name: tensor for name, tensor in state.items() if "." not in name}
        after, prediction = self.network(own, inputs, puzzle_identifiers, reasoning=reasoning, draws=draws)

        steps = state["history.steps"] + 1
        change = (prediction.logits.float() - state["history.logits"].float()).norm(dim=-1).mean(-1)
        change = torch.where(steps == 1, torch.nan, change)  # from nothing
        wants_to_halt = self.network.wants_to_halt(after, prediction)
        after["history.steps"], after["history.logits"] = steps, prediction.logits
        after["history.changes"] = torch.cat([state["history.changes"][:, 1:], change[:, None]], dim=1)
        after["history.has_halted"] = state["history.has_halted"] | wants_to_halt

        newest = {**_columns_of(prediction), "steps": steps}
        is_newer = {
            "halt": ~state["history.has_halted"],
            "peak": (steps == 1) | (prediction.q_halt > state["peak.q_halt"]),
        }
        for at, mask in is_newer.items():
            for name, tensor in newest.items():
                after[f"{at}.{name}"] = where(mask, tensor, state[f"{at}.{name}"])
        return after, prediction


def answer_grid(
    model: HaltingModel,
    batches: Iterator[Batch],
    reasoning: Reasoning,
    *,
    seed: int,
    num_slots: int,
    vocab_size: int,
    scores: Scores,
    on_step: OnStep = lambda *_: None,
) -> Iterator[tuple[StepOutput, Answers]]:
    """Yields the final outputs of the largest setting by the first way to select, and all answers.

    The rows come in pieces of any size and in any order. num_slots: of this rank. The rest of the grid is
    added to the scores. on_step: called after every step of the attempts.
    """
    network, grid = model.network, scores.grid
    num_samples = grid.samples[-1]
    watched = HaltingModel(
        HistoryNetwork(network, vocab_size=vocab_size), reasoning=reasoning, eval_reasoning=reasoning
    ).eval()
    attempts = split_into_attempts(batches, num_samples=num_samples, num_slots=num_slots)
    draw = build_draw(network, reasoning, seed=seed, num_samples=num_samples)
    race = Race(grid.samples) if network.is_search else None
    collector = _Collector(grid)

    def collect(output: StepOutput, halts: Tensor) -> None:
        collector.add(output)
        on_step(output, halts)

    for _ in answer_batches(watched, attempts, reasoning, draw=draw, on_step=collect, race=race):
        if collector.num_waiting >= num_slots:
            yield from collector.take(scores)
    yield from collector.take(scores)


class _Collector:
    """The attempts of puzzles that are not all there yet, as they were at each depth of the grid."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._parts: list[list[dict[str, np.ndarray]]] = [[] for _ in grid.steps]
        self._kept_at = {"end", *(ANSWER_AT[by] for by in grid.selects)}
        self.num_waiting = 0  # attempts that have ended since `take`
        self._device = torch.device("cpu")

    def add(self, output: StepOutput) -> None:
        """Takes a step of all slots: what is at a depth of the grid, or has halted before it."""
        carry, self._device = output.carry, output.carry.steps.device
        for number, depth in enumerate(self._grid.steps):
            is_here = (carry.steps == depth) | (carry.halted & (carry.steps < depth))
            slots = (is_here & carry.data.is_real).nonzero().flatten()
            if not len(slots):
                continue
            is_last = number == len(self._grid.steps) - 1
            self._parts[number].append(self._columns(output.select(slots), is_last=is_last))
            self.num_waiting += len(slots) if is_last else 0

    def _columns(self, output: StepOutput, *, is_last: bool) -> dict[str, np.ndarray]:
        """Returns the arrays to keep, [attempts, ...] each; is_last: also the arrays of an output."""
        state, data = output.carry.state, output.carry.data
        columns = {
            "attempt": data.rows,
            "inputs": data.inputs,
            "labels": data.labels,
            "has_halted": state["history.has_halted"],
            "residual": state["history.changes"].nanmean(dim=1),
            "calls": output.carry.steps,
        }
        answers = {"end": {**_columns_of(output.prediction), "steps": output.carry.steps}}
        for at in ("halt", "peak"):
            answers[at] = {name: state[f"{at}.{name}"] for name in (*Prediction._fields, "steps")}
        for at in self._kept_at:
            columns[f"{at}.preds"] = predicted_tokens(answers[at]["logits"])
            columns |= {f"{at}.{name}": answers[at][name] for name in ("q_halt", "steps")}
        if is_last:
            columns["puzzle_identifiers"] = data.puzzle_identifiers
            answer = answers[ANSWER_AT[self._grid.selects[0]]]
            columns |= {name: answer[name] for name in Prediction._fields}
        # numpy has no bfloat16; the outputs are float32 anyway.
        floats = {name: each.float() if each.is_floating_point() else each for name, each in columns.items()}
        return {name: each.cpu().numpy() for name, each in floats.items()}

    def take(self, scores: Scores) -> Iterator[tuple[StepOutput, Answers]]:
        """Selects, for puzzles with all their attempts here; yields the outputs of the largest setting."""
        self.num_waiting = 0
        for number, depth in enumerate(self._grid.steps):
            puzzles = self._pop_whole(number)
            if puzzles is None:
                continue
            chosen = scores.add(depth, puzzles)
            if number == len(self._grid.steps) - 1:
                yield self._output(puzzles, chosen), self._all_answers(puzzles)

    def _pop_whole(self, number: int) -> dict[str, np.ndarray] | None:
        """Returns the columns of the puzzles that are whole, [puzzles, samples, ...]; the others stay."""
        if not self._parts[number]:
            return None
        num_samples = self._grid.samples[-1]
        parts = self._parts[number]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        rows = columns["attempt"] // num_samples
        _, group, counts = np.unique(rows, return_inverse=True, return_counts=True)
        is_whole = counts[group] == num_samples
        rest = np.flatnonzero(~is_whole)
        self._parts[number] = [{name: each[rest] for name, each in columns.items()}] if len(rest) else []
        order = np.flatnonzero(is_whole)
        if not len(order):
            return None
        order = order[columns["attempt"][order].argsort()].reshape(-1, num_samples)
        return {name: each[order] for name, each in columns.items()}

    def _output(self, puzzles: dict[str, np.ndarray], chosen: np.ndarray) -> StepOutput:
        """Makes the output of each puzzle's chosen attempt, else of its first one, with its row."""
        of_run = {name: each[np.arange(len(chosen)), np.maximum(chosen, 0)] for name, each in puzzles.items()}
        tensors = {name: torch.from_numpy(each).to(self._device) for name, each in of_run.items()}
        data = Batch(
            inputs=tensors["inputs"],
            labels=tensors["labels"],
            puzzle_identifiers=tensors["puzzle_identifiers"],
            rows=tensors["attempt"] // self._grid.samples[-1],
        )
        steps = tensors[f"{ANSWER_AT[self._grid.selects[0]]}.steps"]
        carry = Carry({}, steps, torch.ones_like(steps, dtype=torch.bool), data)
        return StepOutput(carry, Prediction(*(tensors[name] for name in Prediction._fields)))

    def _all_answers(self, puzzles: dict[str, np.ndarray]) -> Answers:
        """Returns the answers at the end of all attempts, each with its puzzle's row."""
        flat = {name: each.reshape(-1, *each.shape[2:]) for name, each in puzzles.items()}
        return Answers(
            rows=flat["attempt"] // self._grid.samples[-1],
            inputs=flat["inputs"],
            labels=flat["labels"],
            puzzle_identifiers=flat["puzzle_identifiers"],
            preds=flat["end.preds"],
            q_halt=flat["end.q_halt"],
        )


def _columns_of(prediction: Prediction) -> dict[str, Tensor]:
    """Returns the tensors by name, zeros for a q_continue that the network has not."""
    q_continue = prediction.q_continue
    q_continue = torch.zeros_like(prediction.q_halt) if q_continue is None else q_continue
    return {"logits": prediction.logits, "q_halt": prediction.q_halt, "q_continue": q_continue}


def predicted_tokens(logits: Tensor) -> Tensor:
    """Returns the likeliest token of every cell: uint8 or int32 [batch, seq_len]."""
    return logits.argmax(-1).to(torch.uint8 if logits.shape[-1] <= 256 else torch.int32)
