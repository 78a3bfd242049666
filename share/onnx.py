"""Exports one thinking step as ONNX: from tokens and a state to logits and the next state.

The step computes in float32, and the batch may have any size.

    Inputs:
    inputs              int32 [batch, seq_len]
    puzzle_identifiers  int32 [batch]
    starts              bool [batch]; if True, the slot starts a new puzzle, and its state is ignored
    z_H, ...            [batch, ...], the state before the step

    Outputs:
    next_z_H, ...       the state after the step
    logits              [batch, seq_len, vocab]
    q_halt, q_continue  [batch], logits
    wants_to_halt       bool [batch]

A model without a state has no input `starts`. A model without q_continue has no such output. For a search
model (LDT), only the forward pass over boards is exported. The caller makes the moves of the search.

    Input:
    alive               [batch, seq_len, values], 1 where the value is a candidate of the cell, else 0

    Outputs:
    keep, digit         [batch, seq_len, values], logits of the last loop
    conflict            [batch], logits
"""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from models.carry import Reasoning, State
from models.network import Network

_OPSET = 18  # from early 2023; all runtimes support it
_PACKAGES = "onnx", "onnxscript"
_LARGEST_COPY = 1 << 16  # elements; the exporter makes a copy of smaller constants for each use


class Step(nn.Module):
    """One thinking step of a model, to be exported to ONNX.

    The argument `starts` of `forward` is bool [batch]. In a slot with True, a new puzzle starts, and the
    state of the slot is reset.
    """

    def __init__(self, network: Network, reasoning: Reasoning):
        super().__init__()
        self.network, self.reasoning = network, reasoning

    def forward(
        self, inputs: Tensor, puzzle_identifiers: Tensor, starts: Tensor | None, state: State
    ) -> dict[str, Tensor]:
        fresh = self.network.initial_state(*inputs.shape[:1], seq_len=inputs.shape[1])
        state = {
            name: torch.where(starts.view(-1, *[1] * (old.ndim - 1)), fresh[name], old)
            for name, old in state.items()
        }
        inputs, identifiers = inputs.long(), puzzle_identifiers.long()  # ONNX gathers only by int64
        state, prediction = self.network(state, inputs, identifiers, reasoning=self.reasoning)
        outputs = {f"next_{name}": tensor for name, tensor in state.items()} | prediction._asdict()
        outputs["wants_to_halt"] = self.network.wants_to_halt(state, prediction)
        return {name: tensor for name, tensor in outputs.items() if tensor is not None}


class Pass(nn.Module):
    """One forward pass of a search model (LDT), to be exported to ONNX.

    The input `alive` is float [batch, seq_len, values]. The last axis has an entry for each value that a cell
    may have: 1 if the value is still possible in the cell, otherwise 0. The program that uses the exported
    model makes the moves of the search (example: share/site/search.js).
    """

    def __init__(self, network: Network, reasoning: Reasoning):
        super().__init__()
        self.network, self.loops = network, reasoning.loops

    def forward(self, alive: Tensor) -> dict[str, Tensor]:
        return self.network.look(alive, None, loops=self.loops).last()._asdict()


def check_packages() -> None:
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise ValueError(f"share page needs {names}. Run pip install {' '.join(missing)}.")


def write_step(network: Network, reasoning: Reasoning, path: Path, *, seq_len: int) -> dict[str, list[int]]:
    """Writes one thinking step of a network, with its weights, as the ONNX file `path`.

    For a search model (LDT), writes a forward pass over boards instead. Returns the shapes of the state
    between steps, without the batch axis, such as {"z_H": [81, 512]}. Returns {} if there is no state, as for
    a search model. The docstring of this file lists the inputs and outputs of the ONNX file.

    network: Network in float32 and in evaluation mode.
    """
    assert network.dtype == torch.float32
    assert not network.training
    batch_size = 2  # not 1: torch.export would treat that as a constant
    any_batch = {0: torch.export.Dim.DYNAMIC}
    state: State = {}
    if network.is_search:
        step = Pass(network, reasoning)
        example = {"alive": torch.ones(batch_size, seq_len, len(network.facts()["values"]))}
        shapes = {"alive": any_batch}
    else:
        assert not reasoning.is_noisy
        step, state = Step(network, reasoning), network.initial_state(batch_size, seq_len=seq_len)
        example = {
            "inputs": torch.zeros(batch_size, seq_len, dtype=torch.int32),
            "puzzle_identifiers": torch.zeros(batch_size, dtype=torch.int32),
            "starts": torch.ones(batch_size, dtype=torch.bool) if state else None,
            # Copy the tensors: two names of one tensor would become a single input.
            "state": {name: tensor.contiguous().clone() for name, tensor in state.items()},
        }
        shapes = dict.fromkeys(example, any_batch) | {"state": dict.fromkeys(state, any_batch)}
        shapes |= {} if state else {"starts": None}
    inputs = [*(name for name in example if name != "state" and example[name] is not None), *state]
    with torch.no_grad(), _silence():
        from onnx_ir.passes import common  # a part of onnxscript

        names = {"input_names": inputs, "output_names": list(step(**example))}
        exported = torch.export.export(step, (), example, dynamic_shapes=shapes, strict=False)
        program = torch.onnx.export(exported, **names, opset_version=_OPSET, verbose=False)
        common.ClearMetadataAndDocStringPass()(program.model)  # removes the Python source of each node
        common.DeduplicateInitializersPass(size_limit=_LARGEST_COPY)(program.model)
        program.save(path, external_data=False)
    return {name: list(tensor.shape[1:]) for name, tensor in state.items()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
