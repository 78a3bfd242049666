"""Test-time compute: evaluates several samples of every puzzle, with more thinking steps than in training.

A slot works on an attempt: one sample of a puzzle. An attempt makes as many thinking steps as the largest of
the numbers of steps to evaluate. With halting=act, and always in a search (LDT), the attempt ends earlier if
the model halts. In a search, the attempt also ends if another sample of the puzzle has halted first, unless
the argument `runs_all` of `run_settings` is True.

`run_settings` also counts the answers for every smaller number of steps and samples. Example: an attempt of
64 steps also gives the answer after step 16, and 8 samples include the first 4. So all settings together cost
as much as the largest one. For each setting, a rule selects one sample of each puzzle. The answer of an
attempt depends only on the seed, the puzzle and the sample index.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from config.architecture import FlowConfig
from config.programs import EvaluateConfig, SolveConfig
from dataset.loader import Batch
from evaluation.loop import Draw, OnStep, Race, answer_batches
from evaluation.selection import ANSWER_AT, Scores, Settings, answer_at
from models import HaltingModel
from models.carry import Carry, Prediction, Reasoning, State, StepOutput, where
from models.network import Network
from models.noise import hidden_states
from models.random import SlotRng

_RESIDUAL_STEPS = 3  # EqR's residual is the mean change over this number of last steps


def set_up(model: HaltingModel, config: EvaluateConfig) -> tuple[Reasoning, Settings | None]:
    """Reads from the config of evaluate.py how to evaluate each puzzle.

    Returns (settings of the thinking steps, `Settings`). `Settings` contains the numbers of steps and samples
    to evaluate, and the rules that select a sample. It is None if halt_max_steps has at most one number, and
    samples, select and retry_samples have their defaults. Raises ValueError if the config has an option
    without effect on this kind of model, such as noise for a model that keeps no state, or if all samples of
    a puzzle would be identical.
    """
    steps = sorted(config.halt_max_steps or [model.eval_reasoning(config.halting).max_steps])
    samples = sorted(config.samples)
    reasoning = reasoning_of_samples(model, config, max_steps=steps[-1], num_samples=samples[-1])
    selects = tuple(config.select)
    if model.network.is_search:
        selects = ("first_to_halt",)
    elif config.retry_samples is not None:
        raise ValueError("retry_samples is for models that search. This one does not. Remove it.")
    settings = Settings(tuple(steps), tuple(samples), selects, config.retry_samples)
    return reasoning, settings if config.asks_for_settings else None


def reasoning_of_samples(
    model: HaltingModel, config: EvaluateConfig | SolveConfig, *, max_steps: int, num_samples: int
) -> Reasoning:
    """Returns the settings of the thinking steps, such as noise and early halting.

    All samples of a puzzle have the same settings. Raises ValueError if the config has an option without
    effect on this kind of model, such as noise for a model that keeps no state, or if all samples of a puzzle
    would be identical.

    max_steps: Number of thinking steps of a sample that does not halt earlier.
    num_samples: Number of samples of each puzzle.
    """
    network = model.network
    noises = {"noise": config.noise or None, "init_noise": config.init_noise, "damping": config.damping}
    searches = ("loops", "decision_cell", "decision_value", "eval_conflict_threshold")
    of_search = {name: getattr(config, name) for name in searches}
    of_flow = {"sde_noise": config.sde_noise}
    named = {name: value for name, value in (noises | of_flow | of_search).items() if value is not None}
    known = of_search if network.is_search else noises if network.initial_state(1, seq_len=1) else {}
    if isinstance(network.arch, FlowConfig):
        known = known | of_flow
    if refused := [name for name in named if name not in known]:
        uses = dict.fromkeys(of_search, "search") | dict.fromkeys(of_flow, "follow a flow (arch=flow)")
        what = uses.get(refused[0], "keep a state between steps")
        raise ValueError(f"{refused[0]} is for models that {what}. This one does not. Remove it.")
    if config.noise and not has_hidden_state(network):
        reason = "no state of this model has a name that starts with z_"
        raise ValueError(f"noise={config.noise:g} has no effect: {reason}. Remove it.")
    named["step_noise"] = named.pop("noise", 0.0)
    selects = {config.select} if isinstance(config.select, str) else set(config.select)
    if network.is_search and (extra := selects - {"q_head", "first_to_halt"}):
        effect = "has no effect in a search: the sample that halts first gives the answer"
        raise ValueError(f"select={min(extra)} {effect}. Remove it.")
    reasoning = dataclasses.replace(model.eval_reasoning(config.halting), max_steps=max_steps, **named)
    if num_samples > 1 and not needs_draws(network, reasoning):
        hint = "Set noise=0.3 or init_noise=1." if has_hidden_state(network) else "Remove samples."
        raise ValueError(
            f"samples={num_samples}: all samples would be identical, because nothing in this evaluation is "
            f"random. {hint}"
        )
    return reasoning


@torch.no_grad()
def check_effects(model: HaltingModel, config: EvaluateConfig | SolveConfig, *, seq_len: int) -> None:
    """Raises ValueError if the config sets init_noise or damping, but it does not change a thinking step.

    The network of a plugin may have no hidden state, a `start` that does not read init_noise, or a `forward`
    that does not call `perturb` (models/noise.py).

    seq_len: Number of cells (tokens) of a puzzle.
    """
    row = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
    tokens = torch.zeros(1, seq_len, dtype=torch.int32, device=row.device)
    puzzle = Batch(tokens, tokens, row.int(), row)
    rng = SlotRng.of_evaluation(0, rows=row, samples=row, steps=row)
    for name, without, full, reason in (
        ("init_noise", 0.0, 1.0, "this model does not start with noise"),
        ("damping", 1.0, 0.0, "this model does not damp its state"),
    ):
        value, states = getattr(config, name), []
        if value in (None, without):
            continue
        for setting in (without, full):
            reasoning = dataclasses.replace(model.eval_reasoning("max"), **{name: setting})
            start = model.network.start(puzzle, reasoning, rng, row == 0)
            after, _ = model.network(start, tokens, puzzle.puzzle_identifiers, reasoning=reasoning, rng=rng)
            states.append([*start.values(), *after.values()])
        if all(map(torch.equal, *states)):
            raise ValueError(f"{name}={value:g} has no effect: {reason}. Remove it.")


def needs_draws(network: Network, reasoning: Reasoning) -> bool:
    return network.is_random or reasoning.is_noisy


def has_hidden_state(network: Network) -> bool:
    """Returns whether the network has a state that the noise of thinking steps changes (models/noise.py)."""
    return bool(hidden_states(network.initial_state(1, seq_len=1)))


def build_draw(
    network: Network, reasoning: Reasoning, *, seed: int, num_samples: int = 1, first_sample: int = 0
) -> Draw:
    """Returns a function that creates the random numbers for the next thinking step.

    The function takes the state of the batch (`Carry`), and returns None if nothing is random. The random
    numbers depend only on the seed, the puzzle, the sample index, and the index of the step.

    num_samples: Number of samples of each puzzle. `carry.data.rows` must contain puzzle index * num_samples +
    sample index (from 0).
    first_sample: Number that is added to the sample index. With another number, a second pass over the same
    puzzles gets other random numbers.
    """

    def draw(carry: Carry) -> SlotRng | None:
        if not needs_draws(network, reasoning):
            return None
        rows, samples = carry.data.rows // num_samples, carry.data.rows % num_samples + first_sample
        return SlotRng.of_evaluation(seed, rows=rows, samples=samples, steps=carry.steps + 1)

    return draw


def split_into_attempts(batches: Iterator[Batch], *, num_samples: int, num_slots: int) -> Iterator[Batch]:
    """Repeats every example `num_samples` times, and yields batches of at most `num_slots` examples.

    `rows` of a yielded batch contains example index * num_samples + sample index (from 0). Padding has -1.
    """
    for batch in batches:
        slots = torch.arange(len(batch.rows) * num_samples, device=batch.rows.device)
        repeated = batch.select(slots // num_samples)
        rows = torch.where(repeated.is_real, repeated.rows * num_samples + slots % num_samples, -1)
        for start in range(0, len(rows), num_slots):
            yield repeated._replace(rows=rows).select(slice(start, start + num_slots))


class HistoryNetwork(nn.Module):
    """Wraps a network, and stores answers of earlier thinking steps in the state.

    The state has these additional keys:

    halt.*     answer of the first step after which the network wants to halt. Until then, the newest answer
    peak.*     answer of the step with the largest q_halt
    history.*  number of steps, newest logits, whether the network wanted to halt after any step, and the
               changes of the logits in the last 3 steps (_RESIDUAL_STEPS)

    An answer consists of logits, q_halt, q_continue, and steps (int32 [batch], index of the thinking step
    that gave the answer, from 1).
    """

    def __init__(self, network: Network, *, vocab_size: int):
        super().__init__()
        self.network, self.arch, self._vocab_size = network, network.arch, vocab_size

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
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
        for at in ("halt", "peak"):
            answer = {"logits": logits, "q_halt": numbers, "q_continue": numbers, "steps": steps}
            history |= {f"{at}.{name}": tensor for name, tensor in answer.items()}
        return self.network.start(data, reasoning, rng, fresh) | history

    def wants_to_halt(self, *step: Any) -> Tensor:
        return self.network.wants_to_halt(*step)

    def forward(
        self, state: State, *data: Tensor, reasoning: Reasoning, rng: SlotRng | None = None
    ) -> tuple[State, Prediction]:
        network_state = {name: tensor for name, tensor in state.items() if "." not in name}
        after, prediction = self.network(network_state, *data, reasoning=reasoning, rng=rng)

        steps = state["history.steps"] + 1
        change = (prediction.logits.float() - state["history.logits"].float()).norm(dim=-1).mean(-1)
        change = torch.where(steps == 1, torch.nan, change)  # the first step has no change
        wants_to_halt = self.network.wants_to_halt(after, prediction)
        after["history.steps"], after["history.logits"] = steps, prediction.logits
        after["history.changes"] = torch.cat([state["history.changes"][:, 1:], change[:, None]], dim=1)
        after["history.has_halted"] = state["history.has_halted"] | wants_to_halt

        q_continue = prediction.q_continue
        newest = {
            "logits": prediction.logits,
            "q_halt": prediction.q_halt,
            "q_continue": torch.zeros_like(prediction.q_halt) if q_continue is None else q_continue,
            "steps": steps,
        }
        is_newer = {
            "halt": ~state["history.has_halted"],
            "peak": (steps == 1) | (prediction.q_halt > state["peak.q_halt"]),
        }
        for at, mask in is_newer.items():
            for name, tensor in newest.items():
                after[f"{at}.{name}"] = where(mask, tensor, state[f"{at}.{name}"])
        return after, prediction


def run_settings(
    model: HaltingModel,
    batches: Iterator[Batch],
    reasoning: Reasoning,
    *,
    seed: int,
    num_slots: int,
    vocab_size: int,
    scores: Scores,
    runs_all: bool = False,
    on_step: OnStep = lambda *_: None,
) -> Iterator[tuple[StepOutput, StepOutput, np.ndarray]]:
    """Runs several samples of every puzzle, and yields the outputs of puzzles whose samples have all ended.

    Meanwhile, `scores` counts the right answers for all numbers of thinking steps and samples. Whenever the
    samples of some puzzles have ended, yields a tuple of three parts:

    - outputs of the samples that the first rule in `scores.settings.selects` selects, one for each puzzle
    - outputs of all samples, ordered by puzzle
    - index of the selected sample of each puzzle, int64 [puzzles]. -1 means that a search has no answer

    If `scores.settings.retry_samples` is set, a puzzle that a search has not solved yields nothing at first.
    At the end, it gets more samples with other random numbers, and only their outputs are yielded.

    reasoning: Settings of the thinking steps. Its max_steps is the largest number of steps to evaluate.
    num_slots: Number of slots of this rank. Each sample takes one slot.
    vocab_size: Number of different tokens.
    scores: Receives the counts. `scores.settings` has the numbers of thinking steps and of samples.
    runs_all: Whether all samples of a search (LDT) run to their end. If False, the first sample that halts
    stops the other samples of its puzzle.
    on_step: Function that is called after every step with the output and with a mask, bool [batch]. The mask
    is True once for each sample: after the first step at which the model wants to halt, or after its last.
    It is also called, with a mask of True, for samples that are stopped before their first step.
    """
    options = {"seed": seed, "num_slots": num_slots, "vocab_size": vocab_size, "runs_all": runs_all}
    options["on_step"] = on_step
    results = _run_settings(model, batches, reasoning, scores=scores, **options)
    if scores.settings.retry_samples is None:
        yield from results
        return
    assert not runs_all, "an evaluator needs the same number of samples of every puzzle"
    num_samples, undecided = scores.settings.samples[-1], []
    for final, attempts, chosen in results:
        is_open = torch.from_numpy(chosen < 0).to(final.carry.steps.device)
        if is_open.any():
            undecided.append(final.carry.data.select(is_open))
        if not is_open.all():
            kept = attempts.select((~is_open).repeat_interleave(num_samples))
            yield final.select(~is_open), kept, chosen[chosen >= 0]
    retry = scores.for_retry()
    options["first_sample"] = num_samples
    yield from _run_settings(model, iter(undecided), reasoning, scores=retry, **options)
    scores.add_retry(retry)


def _run_settings(
    model: HaltingModel,
    batches: Iterator[Batch],
    reasoning: Reasoning,
    *,
    seed: int,
    num_slots: int,
    vocab_size: int,
    scores: Scores,
    runs_all: bool,
    on_step: OnStep,
    first_sample: int = 0,
) -> Iterator[tuple[StepOutput, StepOutput, np.ndarray]]:
    settings, num_samples = scores.settings, scores.settings.samples[-1]
    history = HistoryNetwork(model.network, vocab_size=vocab_size)
    watched = HaltingModel(history).eval()
    attempts = split_into_attempts(batches, num_samples=num_samples, num_slots=num_slots)
    numbers = {"num_samples": num_samples, "first_sample": first_sample}
    draw = build_draw(model.network, reasoning, seed=seed, **numbers)
    race = Race(settings.samples) if model.network.is_search and not runs_all else None
    needed = ("history.has_halted", "history.changes", *(f"{ANSWER_AT[by]}." for by in settings.selects))
    waiting: dict[int, list[StepOutput]] = {num_steps: [] for num_steps in settings.steps}

    def collect(output: StepOutput, halts: Tensor) -> None:
        carry = output.carry
        needed_state = {name: tensor for name, tensor in carry.state.items() if name.startswith(needed)}
        for num_steps, parts in waiting.items():  # the attempts that have made num_steps steps
            # A sample that has halted counts for all larger numbers of steps, too.
            is_here = (carry.steps == num_steps) | (carry.halted & (carry.steps < num_steps))
            if len(slots := (is_here & carry.data.is_real).nonzero().flatten()):
                parts.append(output._replace(carry=carry._replace(state=needed_state)).select(slots))
        on_step(output, halts)

    def take() -> Iterator[tuple[StepOutput, StepOutput, np.ndarray]]:
        for num_steps in settings.steps:
            # Puzzles whose samples have all made these steps, or have halted.
            if (complete := _pop_complete(waiting[num_steps], num_samples)) is None:
                continue
            chosen = scores.add(num_steps, complete, runs_all=runs_all)
            if num_steps == settings.steps[-1]:
                slots = np.arange(len(chosen)) * num_samples + np.maximum(chosen, 0)
                of_puzzles = torch.from_numpy(slots).to(complete.carry.steps.device)
                yield answer_at(ANSWER_AT[settings.selects[0]], complete).select(of_puzzles), complete, chosen

    num_ended = 0
    for final in answer_batches(watched, attempts, reasoning, draw=draw, on_step=collect, race=race):
        num_ended += len(final.carry.steps)
        if num_ended >= num_slots:
            yield from take()
            num_ended = 0
    yield from take()


def _pop_complete(parts: list[StepOutput], num_samples: int) -> StepOutput | None:
    """Removes the puzzles that have outputs of all their samples from `parts`, and joins these outputs.

    The result is ordered by puzzle, then by sample. Its `carry.data.rows` contains indices of puzzles.
    Returns None if no puzzle has outputs of all its samples.

    parts: Outputs of samples, in any order.
    """
    if not parts:
        return None
    joined = StepOutput.join(parts)
    attempts = joined.carry.data.rows
    _, numbers, counts = (attempts // num_samples).unique(return_inverse=True, return_counts=True)
    is_complete = counts[numbers] == num_samples
    complete, rest = is_complete.nonzero().flatten(), (~is_complete).nonzero().flatten()
    parts[:] = [joined.select(rest)] if len(rest) else []
    if not len(complete):
        return None
    output = joined.select(complete[attempts[complete].argsort()])
    data = output.carry.data
    data = data._replace(rows=data.rows // num_samples)
    has_ended = torch.ones_like(output.carry.halted)  # for the settings, even if the slot continues
    return output._replace(carry=output.carry._replace(data=data, halted=has_ended))
