"""Counts the floating-point operations (FLOPs) of a thinking step.

`StepCounter` runs `forward` of the network on torch's meta device, which computes shapes but no numbers. It
counts the calls of levels that the network really makes. So this file needs no formula of any model.

Multiplications and additions of matrix products and convolutions count, as in torch's FlopCounterMode.
Elementwise operations, the optimizer and the recomputation of `activation_checkpointing` do not count.
"""

import collections
import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from dataset.loader import Batch
from models.blocks import Level, levels_of
from models.carry import Reasoning
from models.halting import HaltingModel
from models.network import Network
from models.random import SlotRng


class Step(NamedTuple):
    """The cost of one thinking step on one puzzle.

    Attributes:
        flops: Number of floating-point operations.
        calls: How often the network calls each of its stacks of blocks: a list of (stack, number of calls,
            number of calls with gradient, number of elements of the input for one puzzle).
    """

    flops: float
    calls: list[tuple[Level, int, int, int]]


class StepCounter:
    """Counts the floating-point operations of thinking steps of a model, and caches the results.

    All counts are for one thinking step on one puzzle.

    model: The complete model, not only the part of a pipeline stage or tensor-parallel rank. The constructor
    moves it to the meta device, in place. seq_len: Number of cells (tokens) of a puzzle.
    """

    def __init__(self, model: HaltingModel, *, seq_len: int):
        self.model, self._seq_len = model.to("meta"), seq_len  # buffers from NumPy were on the CPU
        self._counted: dict[tuple[Reasoning, bool], Step] = {}

    def count(self, reasoning: Reasoning, *, trains: bool = False) -> Step:
        reasoning = dataclasses.replace(reasoning, progress=0.0)
        if (reasoning, trains) not in self._counted:
            self._counted[reasoning, trains] = self._count(reasoning, trains=trains)
        return self._counted[reasoning, trains]

    def flops(self, reasoning: Reasoning, *, trains: bool = False) -> float:
        """Returns the number of floating-point operations of one thinking step on one puzzle.

        Raises ValueError if the network reads values of tensors, because the meta device has none.

        reasoning: Settings of the step, such as its number of cycles. trains: Whether to include the backward
        pass, and the extra forward passes that compute training targets.
        """
        flops, more = self.count(reasoning, trains=trains).flops, 0.0
        if trains and (more := self.model.network.objective.more_calls(reasoning)):
            more *= self.count(reasoning).flops
        return flops + more

    def carry_bytes(self) -> int:
        """Returns how many bytes a slot stores between training steps: its puzzles and their states.

        A slot stores one puzzle, or boards_per_slot puzzles (LDT).
        """
        carry = self.model.blank_carry(1, seq_len=self._seq_len, device=torch.device("meta"))
        return sum(tensor.nbytes for tensor in carry.tensors().values())

    def _count(self, reasoning: Reasoning, *, trains: bool) -> Step:
        # Run without dropout. It has no matrix products, but thousands of small operations.
        network, device = self.model.network.eval(), torch.device("meta")
        if network.puzzle_emb is not None:
            network.puzzle_emb.train(trains)  # in training mode, its rows have a gradient
        tokens = torch.zeros(1, self._seq_len, dtype=torch.int32, device=device)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        arrays = network.sample_randomness(seed=0, step=0, batch_size=1, reasoning=reasoning)
        arrays = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        rng = SlotRng.of_training(0, step=0, slots=range(1), device=device, **arrays)
        batch = Batch(tokens, tokens, rows.int(), rows)
        with _meta_errors(network):
            state = network.start(batch, reasoning, None, rows == 0)
        # While the network runs, `record_call` replaces the blocks of every level, and only records the call.
        # The blocks are counted afterwards, once for each kind of call. This saves time.
        levels, calls_of_level = levels_of(network), collections.defaultdict(list)

        def record_call(name: str, h: torch.Tensor, *context: Any) -> torch.Tensor:
            calls_of_level[name].append((h, torch.is_grad_enabled(), context))
            return h + torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())

        try:
            for name, level in levels.items():
                level.run_blocks = functools.partial(record_call, name)
            with _counter() as counter, torch.set_grad_enabled(trains), _meta_errors(network):
                _, prediction = network(state, tokens, rows.int(), reasoning=reasoning, rng=rng)
                if trains:
                    outputs = [output for output in prediction if output is not None and output.requires_grad]
                    sum(output.float().sum() for output in outputs).backward()
        finally:
            for level in levels.values():
                del level.run_blocks
        flops, counts, known = counter.get_total_flops(), [], {}
        for name, calls in calls_of_level.items():
            for h, has_gradient, context in calls:
                kind = name, tuple(h.shape), h.requires_grad, has_gradient
                if kind not in known:
                    known[kind] = _count_blocks(levels[name], h, has_gradient, context)
                flops += known[kind]
            num_with_gradient = sum(has_gradient for _, has_gradient, _ in calls)
            first_input = calls[0][0]
            counts.append((levels[name], len(calls), num_with_gradient, first_input.numel()))
        network.zero_grad()
        if network.puzzle_emb is not None:
            network.puzzle_emb.pop_gradients()
        return Step(flops, counts)


@contextlib.contextmanager
def _meta_errors(network: Network) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        if "meta" not in reason.lower():
            raise
        of_torch = Path(torch.__file__).parent
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if of_torch not in Path(frame.filename).parents][-1]
        raise ValueError(
            f"{Path(frame.filename).name}, line {frame.lineno}: {type(network).__name__} cannot run on the "
            f"meta device, on which its operations are counted ({reason}). `start` and `forward` must not "
            "read values of tensors, and must create tensors on the device of their arguments."
        ) from error


# h: Input of the first block, on the meta device. If the call has a gradient, the backward pass counts too.
def _count_blocks(level: Level, h: torch.Tensor, has_gradient: bool, context: tuple) -> float:
    h = h.detach().requires_grad_(h.requires_grad and has_gradient)
    context = [argument.detach() if torch.is_tensor(argument) else argument for argument in context]
    with _counter() as counter, torch.set_grad_enabled(has_gradient):
        out = level.run_blocks(h, *context)
        if out.requires_grad:
            out.float().sum().backward()
    return counter.get_total_flops()


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=_BACKWARD)


def _count_convolution_backward(
    out: list[int], x: list[int], weight: list[int], *arguments: object, out_shape: list, **_: object
) -> int:
    transposed, mask = arguments[4], arguments[-1]
    return sum(mask[:2]) * conv_flop_count(x, weight, out, transposed=transposed)


# The formula of FlopCounterMode is wrong for convolutions with groups.
_BACKWARD = {torch.ops.aten.convolution_backward: _count_convolution_backward}
