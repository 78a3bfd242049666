"""One step of a model as ONNX, which any language runs: from tokens and a state to an answer and a new state.

Everything is float32, and the batch may have any size. Inputs and outputs:

    inputs              int32 [batch, seq_len]
    puzzle_identifiers  int32 [batch]
    starts              bool [batch]: slots that start on their puzzle; their state is not read
    z_H, ...            [batch, ...], what the model keeps between steps
    next_z_H, ...       the same after the step
    logits              [batch, seq_len, vocab]
    q_halt, q_continue  [batch], logits
    wants_to_halt       bool [batch]

A model that keeps nothing has no `starts`, one without a value of going on no `q_continue`. Of a search only
its pass over boards is translated, which whoever calls it moves:

    alive               [batch, seq_len, values], 1 where a cell may have a value, else 0
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

_OPSET = 18  # of early 2023: every runtime has it
_PACKAGES = "onnx", "onnxscript"
_LARGEST_COPY = 1 << 16  # elements: what the translator computes beforehand, once for each use, is smaller


class Step(nn.Module):
    """A step that begins, in slots that start, with the state that a network starts from."""

    def __init__(self, network: Network, reasoning: Reasoning):
        super().__init__()
        self.network, self.reasoning = network, reasoning

    def forward(
        self, inputs: Tensor, puzzle_identifiers: Tensor, starts: Tensor | None, state: State
    ) -> dict[str, Tensor]:
        """Returns the outputs by name."""
        fresh = self.network.initial_state(*inputs.shape[:1], seq_len=inputs.shape[1])
        state = {
            name: torch.where(starts.view(-1, *[1] * (old.ndim - 1)), fresh[name], old)
            for name, old in state.items()
        }
        inputs, identifiers = inputs.long(), puzzle_identifiers.long()  # ONNX gathers by int64 alone
        state, prediction = self.network(state, inputs, identifiers, reasoning=self.reasoning)
        outputs = {f"next_{name}": tensor for name, tensor in state.items()} | prediction._asdict()
        outputs["wants_to_halt"] = self.network.wants_to_halt(state, prediction)
        return {name: tensor for name, tensor in outputs.items() if tensor is not None}


class Pass(nn.Module):
    """A pass of a search; its last loop answers."""

    def __init__(self, network: Network, reasoning: Reasoning):
        super().__init__()
        self.network, self.loops = network, reasoning.loops

    def forward(self, alive: Tensor) -> dict[str, Tensor]:
        """Returns the outputs by name."""
        return self.network.look(alive, None, loops=self.loops).last()._asdict()


def check_packages() -> None:
    """Raises ValueError, one line, where a package that the translation needs is missing."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise ValueError(f"share page needs the packages {names}: pip install {' '.join(missing)}")


def write_step(network: Network, reasoning: Reasoning, path: Path, *, seq_len: int) -> dict[str, list[int]]:
    """Writes one step, or a search's pass, of a float32 network in evaluation mode, its weights inside.

    Returns the shape of one slot of each tensor that is kept between steps.
    """
    assert network.dtype == torch.float32
    assert not network.training
    batch_size = 2  # any but 1, which would be taken for a constant
    any_batch = {0: torch.export.Dim.DYNAMIC}
    state: State = {}
    if facts := network.search_facts():
        step = Pass(network, reasoning)
        example = {"alive": torch.ones(batch_size, seq_len, len(facts["values"]))}
        shapes = {"alive": any_batch}
    else:
        assert not network.needs_draws(reasoning)
        step, state = Step(network, reasoning), network.initial_state(batch_size, seq_len=seq_len)
        example = {
            "inputs": torch.zeros(batch_size, seq_len, dtype=torch.int32),
            "puzzle_identifiers": torch.zeros(batch_size, dtype=torch.int32),
            "starts": torch.ones(batch_size, dtype=torch.bool) if state else None,
            # Copies: two names of one tensor would become one input.
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
        common.ClearMetadataAndDocStringPass()(program.model)  # where in Python every node comes from
        common.DeduplicateInitializersPass(size_limit=_LARGEST_COPY)(program.model)
        program.save(path, external_data=False)
    return {name: list(tensor.shape[1:]) for name, tensor in state.items()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps the messages of the translator from the console."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
