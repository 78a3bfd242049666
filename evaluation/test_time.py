"""Test-time compute: every puzzle is run several times, and longer, and one of its runs answers it.

A slot works on a run: a puzzle and the number of its sample. All runs go to the deepest number of steps, and
on the way leave what each (steps, samples) of a grid needs: deeper continues shallower, more samples begin
with the fewer, so that the grid costs what its largest corner costs. Invariant: a run depends on the seed,
its puzzle and its sample alone; so does what is selected, and all sums are of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dataset.format import IGNORE_LABEL_ID
from dataset.kinds.kind import Answers
from dataset.loader import Batch
from evaluation.halting import Draw, Halting, Watch, answer_batches
from evaluation.scores import Grid, Tally
from evaluation.selection import MOMENT_OF, Moment
from models import HaltingModel
from models.halting import Carry, StepOutput
from models.network import Network, Prediction, State
from models.random import Draws

if TYPE_CHECKING:
    from config.schema import EvaluateConfig, SolveConfig

_RESIDUAL_STEPS = 3  # EqR takes the mean change of so many last steps


def set_up(model: HaltingModel, config: EvaluateConfig) -> Grid | None:
    """Makes the model reason as long and as noisily as the config says; returns the grid, if it asks for one.

    ValueError where that means nothing for this model.
    """
    steps = sorted(config.halt_max_steps or [model.eval_halt_max_steps])
    samples = sorted(config.samples)
    set_up_runs(model, config, num_steps=steps[-1], num_samples=samples[-1])
    return Grid(tuple(steps), tuple(samples), tuple(config.select)) if config.asks_for_grid else None


def set_up_runs(
    model: HaltingModel, noises: EvaluateConfig | SolveConfig, *, num_steps: int, num_samples: int
) -> None:
    """Makes the runs of the model so long, with the noises and the damping that a config names."""
    network = model.network
    asked = {"noise": noises.noise or None, "init_noise": noises.init_noise, "damping": noises.damping}
    if not network.initial_state(1, seq_len=1) and (given := [k for k, v in asked.items() if v is not None]):
        raise ValueError(
            f"{given[0]} is for models that keep a state between steps, and this one does not: drop it"
        )
    network.step_noise = noises.noise
    network.init_noise = network.init_noise if noises.init_noise is None else noises.init_noise
    network.damping = network.damping if noises.damping is None else noises.damping
    model.eval_halt_max_steps = num_steps
    if num_samples > 1 and not network.is_noisy:
        raise ValueError(
            f"samples={num_samples} would all be the same run: add noise=0.3, say, or init_noise=1"
        )


def build_draw(model: HaltingModel, *, seed: int, num_samples: int = 1) -> Draw:
    """Makes the random numbers of the steps of an evaluation, where the network is noisy.

    Slots hold runs, row * num_samples + sample in place of the row.
    """

    def draw(carry: Carry) -> Draws | None:
        if not model.network.is_noisy:
            return None
        rows, samples = carry.data.rows // num_samples, carry.data.rows % num_samples
        return Draws.of_evaluation(seed, rows=rows, samples=samples, steps=carry.steps + 1)

    return draw


def split_into_runs(batches: Iterator[Batch], *, num_samples: int, num_slots: int) -> Iterator[Batch]:
    """Yields every row as often as it has samples, in batches of num_slots, the last one padded to it.

    In place of the row stands the run, row * num_samples + sample. With one sample batches stay as they are.
    """
    if num_samples == 1:
        yield from batches
        return
    waiting: Batch | None = None
    for batch in batches:
        real = batch.is_real.nonzero().flatten().repeat_interleave(num_samples)
        runs = Batch(*(column[real] for column in batch))
        samples = torch.arange(len(real), device=real.device) % num_samples
        runs = runs._replace(rows=runs.rows * num_samples + samples)
        waiting = runs if waiting is None else Batch(*map(torch.cat, zip(waiting, runs, strict=True)))
        while len(waiting.rows) >= num_slots:
            yield Batch(*(column[:num_slots] for column in waiting))
            waiting = Batch(*(column[num_slots:] for column in waiting))
    if waiting is not None and len(waiting.rows):
        slots = torch.arange(num_slots, device=waiting.rows.device).clamp(max=len(waiting.rows) - 1)
        padded = Batch(*(column[slots] for column in waiting))
        is_real = torch.arange(num_slots, device=slots.device) < len(waiting.rows)
        padded = padded._replace(rows=torch.where(is_real, padded.rows, -1))
        yield padded._replace(labels=torch.where(is_real[:, None], padded.labels, IGNORE_LABEL_ID))


class HistoryNetwork(nn.Module):
    """A network that also keeps, as part of its state, what the ways to select need of the steps so far.

    So it travels with its slot, and starts anew with it. `halt.` is the answer of the step where the Q head
    halts first, until then the newest; `peak.` that of the step with the largest q_halt; each has logits,
    q_halt, q_continue, and steps, int32 [batch]: the number of its step.
    """

    _MOMENTS: tuple[Moment, ...] = ("halt", "peak")

    def __init__(self, network: Network, wants_to_halt: Callable[[Prediction], Tensor], *, vocab_size: int):
        super().__init__()
        self.network, self._wants_to_halt, self._vocab_size = network, wants_to_halt, vocab_size

    @property
    def is_noisy(self) -> bool:
        return self.network.is_noisy

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        device = next(self.network.parameters()).device
        logits = torch.zeros(batch_size, seq_len, self._vocab_size, dtype=self.network.dtype, device=device)
        numbers = torch.zeros(batch_size, dtype=torch.float32, device=device)
        steps = torch.zeros(batch_size, dtype=torch.int32, device=device)
        history = {
            "history.steps": steps,
            "history.has_halted": steps.bool(),
            "history.logits": logits,
            "history.changes": numbers[:, None].expand(-1, _RESIDUAL_STEPS) * torch.nan,
        }
        for moment in self._MOMENTS:
            answer = {"logits": logits, "q_halt": numbers, "q_continue": numbers, "steps": steps}
            history |= {f"{moment}.{name}": tensor for name, tensor in answer.items()}
        return self.network.initial_state(batch_size, seq_len=seq_len) | history

    def random_start(self, state: State, draws: Draws, slots: Tensor) -> State:
        return self.network.random_start(state, draws, slots)

    def forward(
        self, state: State, inputs: Tensor, puzzle_identifiers: Tensor, draws: Draws | None = None
    ) -> tuple[State, Prediction]:
        own = {name: tensor for name, tensor in state.items() if "." not in name}
        after, prediction = self.network(own, inputs, puzzle_identifiers, draws=draws)

        steps = state["history.steps"] + 1
        change = (prediction.logits.float() - state["history.logits"].float()).norm(dim=-1).mean(-1)
        change = torch.where(steps == 1, torch.nan, change)  # from nothing
        after["history.steps"], after["history.logits"] = steps, prediction.logits
        after["history.changes"] = torch.cat([state["history.changes"][:, 1:], change[:, None]], dim=1)
        after["history.has_halted"] = state["history.has_halted"] | self._wants_to_halt(prediction)

        newest = {**_columns_of(prediction), "steps": steps}
        is_newer = {
            "halt": ~state["history.has_halted"],
            "peak": (steps == 1) | (prediction.q_halt > state["peak.q_halt"]),
        }
        for moment, where in is_newer.items():
            for name, tensor in newest.items():
                mask = where.view(-1, *[1] * (tensor.ndim - 1))
                after[f"{moment}.{name}"] = torch.where(mask, tensor, state[f"{moment}.{name}"])
        return after, prediction


def answer_grid(
    model: HaltingModel,
    batches: Iterator[Batch],
    grid: Grid,
    *,
    halting: Halting,
    seed: int,
    num_slots: int,
    vocab_size: int,
    tally: Tally,
    watch: Watch = lambda *_: None,
) -> Iterator[tuple[StepOutput, Answers]]:
    """Yields the final outputs of the largest corner by the first way to select, and all answers to its rows.

    The rows come in pieces of any size and in any order. num_slots: of this rank. The rest of the grid is
    added to the tally. watch: called after every step of the runs.
    """
    watching = HaltingModel(
        HistoryNetwork(model.network, model.wants_to_halt, vocab_size=vocab_size),
        halt_max_steps=grid.steps[-1],
        no_ACT_continue=model.no_ACT_continue,
        q_target=model.q_target,
    ).eval()
    num_samples = grid.samples[-1]
    runs = split_into_runs(batches, num_samples=num_samples, num_slots=num_slots)
    draw = build_draw(model, seed=seed, num_samples=num_samples)
    collector = _Collector(grid)

    def watch_both(output: StepOutput, halts: Tensor) -> None:
        collector.add(output, halts)
        watch(output, halts)

    for _ in answer_batches(watching, runs, halting=halting, draw=draw, watch=watch_both):
        if collector.num_waiting >= num_slots:
            yield from collector.take(tally)
    yield from collector.take(tally)


class _Collector:
    """The runs of puzzles that are not all there yet, as they were at each depth of the grid."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._parts: list[list[dict[str, np.ndarray]]] = [[] for _ in grid.steps]
        self._moments = {"end", *(MOMENT_OF[by] for by in grid.selects)}
        self.num_waiting = 0  # runs that have ended since `take`
        self._device = torch.device("cpu")

    def add(self, output: StepOutput, _: Tensor) -> None:
        """Takes a step of all slots: what is at a depth of the grid, or has halted before it."""
        carry, self._device = output.carry, output.carry.steps.device
        for number, depth in enumerate(self._grid.steps):
            is_here = (carry.steps == depth) | (carry.halted & (carry.steps < depth))
            slots = (is_here & carry.data.is_real).nonzero().flatten()
            if not len(slots):
                continue
            is_last = number == len(self._grid.steps) - 1
            chosen = StepOutput(carry.select(slots), output.prediction.select(slots))
            self._parts[number].append(self._columns(chosen, is_last=is_last))
            self.num_waiting += len(slots) if is_last else 0

    def _columns(self, output: StepOutput, *, is_last: bool) -> dict[str, np.ndarray]:
        """Returns the arrays that are kept of runs, [runs, ...] each; is_last: those of an output too."""
        state, data = output.carry.state, output.carry.data
        columns = {
            "run": data.rows,
            "inputs": data.inputs,
            "labels": data.labels,
            "has_halted": state["history.has_halted"],
            "residual": state["history.changes"].nanmean(dim=1),
            "calls": output.carry.steps,
        }
        answers = {"end": {**_columns_of(output.prediction), "steps": output.carry.steps}}
        for moment in ("halt", "peak"):
            names = (*Prediction._fields, "steps")
            answers[moment] = {name: state[f"{moment}.{name}"] for name in names}
        for moment in self._moments:
            answer = answers[moment]
            columns[f"{moment}.preds"] = predicted_tokens(answer["logits"])
            columns |= {f"{moment}.{name}": answer[name] for name in ("q_halt", "steps")}
        if is_last:
            columns["puzzle_identifiers"] = data.puzzle_identifiers
            answer = answers[MOMENT_OF[self._grid.selects[0]]]
            columns |= {name: answer[name] for name in Prediction._fields}
        # numpy has no bfloat16; the outputs are float32 anyway.
        floats = {name: each.float() if each.is_floating_point() else each for name, each in columns.items()}
        return {name: each.cpu().numpy() for name, each in floats.items()}

    def take(self, tally: Tally) -> Iterator[tuple[StepOutput, Answers]]:
        """Selects, of the puzzles whose runs are all there; of the largest corner it yields the outputs."""
        self.num_waiting = 0
        for number, depth in enumerate(self._grid.steps):
            puzzles = self._pop_whole(number)
            if puzzles is None:
                continue
            chosen = tally.add(depth, puzzles)
            if number == len(self._grid.steps) - 1:
                yield self._output(puzzles, chosen), self._all_answers(puzzles)

    def _pop_whole(self, number: int) -> dict[str, np.ndarray] | None:
        """Returns the columns of the puzzles that are whole, [puzzles, samples, ...]; the others stay."""
        if not self._parts[number]:
            return None
        num_samples = self._grid.samples[-1]
        parts = self._parts[number]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        rows = columns["run"] // num_samples
        _, place, counts = np.unique(rows, return_inverse=True, return_counts=True)
        is_whole = counts[place] == num_samples
        rest = np.flatnonzero(~is_whole)
        self._parts[number] = [{name: each[rest] for name, each in columns.items()}] if len(rest) else []
        order = np.flatnonzero(is_whole)
        if not len(order):
            return None
        order = order[columns["run"][order].argsort()].reshape(-1, num_samples)
        return {name: each[order] for name, each in columns.items()}

    def _output(self, puzzles: dict[str, np.ndarray], chosen: np.ndarray) -> StepOutput:
        """Makes the output of the chosen run of each puzzle, with the puzzle's row and all its halted."""
        of_run = {name: each[np.arange(len(chosen)), chosen] for name, each in puzzles.items()}
        tensors = {name: torch.from_numpy(each).to(self._device) for name, each in of_run.items()}
        data = Batch(
            inputs=tensors["inputs"],
            labels=tensors["labels"],
            puzzle_identifiers=tensors["puzzle_identifiers"],
            rows=tensors["run"] // self._grid.samples[-1],
        )
        steps = tensors[f"{MOMENT_OF[self._grid.selects[0]]}.steps"]
        carry = Carry({}, steps, torch.ones_like(steps, dtype=torch.bool), data)
        return StepOutput(carry, Prediction(*(tensors[name] for name in Prediction._fields)))

    def _all_answers(self, puzzles: dict[str, np.ndarray]) -> Answers:
        """Returns the answers at the end of all runs, each with its puzzle's row."""
        flat = {name: each.reshape(-1, *each.shape[2:]) for name, each in puzzles.items()}
        return Answers(
            rows=flat["run"] // self._grid.samples[-1],
            inputs=flat["inputs"],
            labels=flat["labels"],
            puzzle_identifiers=flat["puzzle_identifiers"],
            preds=flat["end.preds"],
            q_halt=flat["end.q_halt"],
        )


def _columns_of(prediction: Prediction) -> dict[str, Tensor]:
    """Returns the tensors by name, zeros for a q_continue that the network has not."""
    q_continue = (
        torch.zeros_like(prediction.q_halt) if prediction.q_continue is None else prediction.q_continue
    )
    return prediction._replace(q_continue=q_continue)._asdict()


def predicted_tokens(logits: Tensor) -> Tensor:
    """Returns the likeliest token of every cell: uint8 or int32 [batch, seq_len]."""
    return logits.argmax(-1).to(torch.uint8 if logits.shape[-1] <= 256 else torch.int32)
