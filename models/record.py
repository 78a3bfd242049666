"""Records the states and the outputs of modules, call by call, while a model thinks in an evaluation."""

import contextlib
import fnmatch
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from models.blocks import Level, levels_of
from models.carry import Carry, State
from models.halting import HaltingModel
from models.network import Network


class Call(NamedTuple):
    """A recorded call of a module, or a recorded value of a hidden state.

    The network is called once in each thinking step. It calls a module once or several times.

    Attributes:
        name: Name of the module in the network, such as "L_level.layers.0.mlp", or of the state, such as
            "z_H".
        output: Copy of the output of the module, or of the state, usually [batch, positions, hidden] (SE-RRM:
            [batch, symbols, positions, hidden]).
        steps: Number of thinking steps that each puzzle has had, including this one, int32 [batch].
        rows: Index of each puzzle in its test set, int64 [batch], or -1 for padding. With several samples,
            index * number of samples + index of the sample.
        cycle: Index of the H cycle in the thinking step, from 1. If the model has no H cycles, 1.
        call: Number of runs of a stack of blocks in this H cycle so far. A run that has started counts. If
            the network has several stacks, the runs of all stacks count. 0 before the first run.
        network: The network. `network.answer(output)` applies its output layers to the state z_H.
    """

    name: str
    output: Any  # a state includes damping and noise
    steps: Tensor
    rows: Tensor  # 0 for the puzzle of `solve`
    cycle: int
    call: int
    network: Network

    @property
    def step(self) -> int:
        """Returns the number of thinking steps that every puzzle has had, including this one.

        Raises ValueError if this number differs among the puzzles of the batch, as with halting=act.
        """
        if (self.steps != self.steps[0]).any():
            raise ValueError(
                "the slots are at different thinking steps. Read Call.steps, or set halting=max."
            )
        return int(self.steps[0])


@contextlib.contextmanager
def record(model: Any, names: Sequence[str]) -> Iterator[list[Call]]:
    """Context manager that records calls of modules of a model in evaluation mode.

    Yields a list. At the end of each thinking step, the calls of this step are added to the list. Only calls
    in the current thread are recorded. The list keeps all outputs in memory.

    A hidden state is recorded after each call of a stack of blocks that changes the state. The recorded value
    is the state that the next such call reads. After the last such call, it is the state that the network
    returns.

    Args:
        model: `HaltingModel` or its network, or a `solve.Solver` (from `solve.load`).
        names: Names of states (z_H, z_L), and of modules of the network as patterns of `fnmatch`, such as
            "L_level.layers.0.*".

    Raises:
        ValueError: The model is compiled, no state or module has one of the names, or the network was called
            by itself, without its `HaltingModel`, or not at all.
    """
    network = getattr(model, "network", model)
    if isinstance(network, Network):
        _names_of(network, names)
    elif isinstance(model, nn.Module):
        raise ValueError(f"cannot record {type(model).__name__}. Pass a HaltingModel that is not compiled.")
    recorder = _Recorder(network if isinstance(network, Network) else None, names)
    hooks = register_module_forward_pre_hook(recorder.before), register_module_forward_hook(recorder.after)
    try:
        yield recorder.calls
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.num_steps:
        raise ValueError("nothing is recorded: the model ran no thinking step in evaluation mode.")


class _Recorder:
    """Stores what `record` records in the list `calls`: outputs of modules, and hidden states.

    Its methods `before` and `after` are forward hooks: torch calls them before and after each module.

    network: The network to record. If None, every network that runs in this thread. names: Names of hidden
    states, such as "z_H", which are recorded after each call of a stack of blocks (`Level`) that updates
    them. Also patterns of `fnmatch` for the names of modules.
    """

    def __init__(self, network: Network | None, names: Sequence[str]):
        self.calls: list[Call] = []
        self.num_steps = 0
        self._network, self._names = network, names
        self._thread = threading.get_ident()
        self._carry: Carry | None = None
        self._num_cycles = 1
        self._now: Network | None = None  # the network that runs a thinking step
        self._modules: dict[nn.Module, str] = {}  # names of its modules to record
        self._inputs: list[Tensor] = []  # the state that each call of a level reads
        self._outputs: list[tuple[str | None, int, Any]] = []  # (name, number of level calls, output)

    def before(self, module: nn.Module, args: tuple) -> None:
        if threading.get_ident() != self._thread:
            return
        if isinstance(module, HaltingModel):
            self._carry, self._num_cycles = args[0], max(args[1].H_cycles, 1)
        elif isinstance(module, Network):
            if not module.training and self._network in (None, module):
                if self._carry is None:
                    message = "a network is called without its HaltingModel. Call the HaltingModel."
                    raise ValueError(f"cannot record: {message}")
                self._now, self._modules = module, _names_of(module, self._names)
                self._inputs, self._outputs = [], []
        elif isinstance(module, Level) and self._now is not None:
            self._inputs.append(args[0])

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._now is None or threading.get_ident() != self._thread:
            return
        if module in self._modules:
            self._outputs.append((self._modules[module], len(self._inputs), output))
        if isinstance(module, Level):
            self._outputs.append((None, len(self._inputs), None))  # the place of the state
        if module is self._now:
            self._now = None
            self._end_step(module, args[0], output[0])

    # Adds the recorded calls of a thinking step to the list. old, new: State before and after the step.
    def _end_step(self, network: Network, old: State, new: State) -> None:
        self.num_steps += 1
        num_calls = len(self._inputs)
        per_cycle = num_calls // self._num_cycles if num_calls % self._num_cycles == 0 else num_calls
        # In the first cycle, the first call that reads a state reads the very tensor of the old state. The
        # next calls belong to the same state, up to the first call for another one. Cycles are alike.
        names: list[str | None] = []
        for z in self._inputs[:per_cycle]:
            found = next((name for name, tensor in old.items() if tensor is z), None)
            names.append(found or (names[-1] if names else None))
        names *= num_calls // max(per_cycle, 1)
        states = [name for name in self._names if not fnmatch.filter(self._modules.values(), name)]
        if missing := set(states) - {*names}:
            raise ValueError(f"cannot record {min(missing)}: no call of a level changes it. Remove it.")
        for name, number, output in self._outputs:
            if name is None:
                name = names[number - 1]
                if name not in self._names:
                    continue
                later = (index for index in range(number, num_calls) if names[index] == name)
                output = next((self._inputs[index] for index in later), new[name])
            cycle, call = divmod(max(number - 1, 0), max(per_cycle, 1))
            # A tensor of inference mode could not be used with autograd, such as by an output head.
            with torch.inference_mode(False):
                output = output.detach().clone() if isinstance(output, Tensor) else output
                steps, rows = self._carry.steps + 1, self._carry.data.rows.clone()
            of = {"cycle": cycle + 1, "call": call + 1 if number else 0, "network": network}
            self.calls.append(Call(name, output, steps, rows, **of))


# The modules that match one of the patterns in `names`. Names that start with "z_" are states.
def _names_of(network: Network, names: Sequence[str]) -> dict[nn.Module, str]:
    if any(level.is_compiled for level in levels_of(network).values()):
        raise ValueError("cannot record a compiled model. Load it again, and do not compile it.")
    modules = {name: module for name, module in network.named_modules() if name}
    for pattern in names:
        if not pattern.startswith("z_") and not fnmatch.filter(modules, pattern):
            known = ", ".join(name for name, _ in network.named_children())
            raise ValueError(
                f"cannot record {pattern}: no module of the network has this name. Choose from {known}, "
                "the modules in them, or a state such as z_H."
            )
    return {modules[name]: name for pattern in names for name in fnmatch.filter(modules, pattern)}
