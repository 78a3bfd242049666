"""The computation of a training step as one CUDA graph, with static slots.

What a step reads lies always at the same places: the batch, the numbers drawn for it, and the carry. So the
launches of all its kernels, forward and backward, are recorded once and then replayed by one call; collecting
the rows of the puzzles and the optimizers stay outside.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import training.step
from benchmarks.train_step.contenders import Ours
from dataset.loader import Batch
from models.halting import Carry
from training.state import TrainState

_FIRST_STEPS = 3  # that compile and allocate, and are not recorded


class Static(Ours):
    """Our step whose computation is replayed.

    All its work goes to one stream: a graph takes up what hung on another before.
    """

    def __init__(self, name: str, config: SimpleNamespace, metadata: SimpleNamespace, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._num_steps = 0
        with torch.cuda.stream(self._stream):
            super().__init__(name, config, metadata, device)
            self._replayed = _Replayed(self._stream)

    def step(self) -> training.step.StepResult:
        self._num_steps += 1
        computes = contextlib.nullcontext()
        if self._num_steps > _FIRST_STEPS:
            computes = mock.patch.object(training.step, "_forward_and_backward", self._replayed)
        with torch.cuda.stream(self._stream), computes:
            return super().step()


class _Replayed:
    """A stand-in for `training.step._forward_and_backward`, which it records at the first call."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._compute, self._draw = training.step._forward_and_backward, training.step._draw
        self._stream, self._replay = stream, None

    def __call__(
        self, state: TrainState, batch: Batch, config: SimpleNamespace, is_asked_to_stop: Callable[[], bool]
    ) -> dict[str, Tensor]:
        drawn = self._draw(state, config)
        if self._replay is None:
            self._batch = Batch(*(column.clone() for column in batch))
            self._drawn = {name: numbers.clone() for name, numbers in drawn.items()}
            self._carry = Carry.from_tensors({n: t.clone() for n, t in state.carry.tensors().items()})
            self._sums: dict[str, Tensor] = {}
            self._replay = _record(lambda: self._step(state, config), self._stream)
        torch._foreach_copy_([*self._batch, *self._drawn.values()], [*batch, *drawn.values()])
        self._replay()
        state.carry = self._carry
        if state.model.network.puzzle_emb is not None:  # rows and gradients of the recording
            state.model.network.puzzle_emb._used[:] = self._used
        return dict(self._sums)

    def _step(self, state: TrainState, config: SimpleNamespace) -> None:
        state.carry = self._carry
        with mock.patch.object(training.step, "_draw", return_value=self._drawn):
            self._sums = self._compute(state, self._batch, config, lambda: False)
        old, new = self._carry.tensors(), state.carry.tensors()
        for name, tensor in new.items():
            old[name].copy_(tensor)
        if state.model.network.puzzle_emb is not None:
            self._used = list(state.model.network.puzzle_emb._used)


def _record(function: Callable[[], Any], stream: torch.cuda.Stream | None) -> Callable[[], Any]:
    """Returns what does again all that the function does on the device; without a GPU the function itself."""
    if stream is None:
        return function
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    return graph.replay
