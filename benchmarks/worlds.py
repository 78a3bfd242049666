"""Groups of processes (`World`) that are timed in turns, and a model in training (`Trainer`).

Contenders are the compared variants of a benchmark. The speed of a machine drifts over minutes. So all
contenders run at the same time and take turns: A B C, A B C, ... A ratio then compares times that are seconds
apart. The time of a group of processes is the time of its slowest process.
"""

import argparse
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # import before the fork, because the optimizers of torch need it
from torch.utils.benchmark import Measurement, timer

from benchmarks.harness import benchmark_parser, fail, measurement, positive
from config.compose import compose_overrides
from config.schema import PretrainConfig
from dataset.loader import Batch
from dataset.metadata import Metadata, usual_metadata
from distributed.backend import choose_device, process_group, set_cpu_threads
from distributed.collectives import barrier, broadcast_object
from distributed.errors import local_errors
from distributed.launch import keep_freed_memory
from distributed.progress import Progress
from distributed.shards import tensor_of
from distributed.signals import stop_signals
from distributed.world import world_size
from optimizers.learning_rate import learning_rates
from runtime.command_line import OneLineParser
from training.clock import StepClock
from training.run_config import find_format, with_format
from training.state import build_first_state
from training.step import train_step
from training.strategy import StepResult

TOTAL_STEPS = 10**6  # for the learning rate; more steps than any benchmark makes
TINY = ("arch.hidden_size=32", "arch.num_heads=2", "arch.H_layers=1", "arch.L_layers=1")
_POLL_SECONDS = 1.0
_CLONE_NEWNET = 0x40000000  # from sched.h of Linux


def world_parser(
    name: str, *, description: str, rounds: int = 7, compares_numbers: bool = False
) -> OneLineParser:
    """Returns the command-line parser of a benchmark that trains one model on several processes.

    rounds: Default number of repetitions. If 0, nothing is repeated, and there is no option --rounds.
    compares_numbers: Whether the option --processes takes several numbers, because the benchmark compares
    them with one process.
    """
    parser = benchmark_parser(name, description=description, rounds=rounds, threads="1")
    options = {"nargs": "+", "default": [1, 2]} if compares_numbers else {"default": 2}
    of_processes = "numbers of processes (default: 1 2)" if compares_numbers else "processes (default: 2)"
    parser.add_argument("--processes", type=positive, metavar="N", help=of_processes, **options)
    of_puzzles = "puzzles per process (default: 8)"
    parser.add_argument("--puzzles", type=positive, default=8, metavar="N", help=of_puzzles)
    return parser


class World:
    """A group of child processes, each of which holds an object, such as a model.

    options: Command line of the benchmark. Its `device` and `threads` are used.
    build: Function that creates the object in a child process: `build(device, *arguments)`.
    arguments: Arguments of `build`, after the device.
    processes: Number of processes.
    apart: If False, the processes are the ranks of one process group. If True, each process has a process
        group of its own, with one rank.
    namespaces: Linux network namespace of each process. Only needed to emulate several machines.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        build: Callable[..., Any],
        *arguments: Any,
        processes: int = 1,
        apart: bool = False,
        namespaces: Sequence[str] = (),
    ):
        self._workers = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        # `fork` is fast, and safe because this process has computed nothing yet.
        context = multiprocessing.get_context("fork")
        for rank in range(processes):
            environment = {
                **{"RANK": "0" if apart else str(rank), "WORLD_SIZE": "1" if apart else str(processes)},
                **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes), "WANDB_MODE": "disabled"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            }
            if namespaces:
                environment |= {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0", "LOCAL_RANK": "0"}
                environment |= {"GROUP_WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": "1"}
            connection, other_end = multiprocessing.Pipe()
            namespace = namespaces[rank] if namespaces else ""
            process = context.Process(
                target=_serve,
                args=(other_end, environment, namespace, options, build, arguments),
                daemon=True,  # the child ends with this process
            )
            process.start()
            other_end.close()
            self._workers.append((process, connection))
        self.receive()  # wait until all contenders are built

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the object in every process. Returns one result for each process."""
        self.send(method, *arguments)
        return self.receive()

    def send(self, method: str, *arguments: Any) -> None:
        for _, connection in self._workers:
            connection.send((method, arguments))

    def receive(self, *, timeout: float | None = None) -> list[Any]:
        """Waits for the results of a call that `send` has started, one for each process.

        If any process has ended, or does not answer within `timeout` seconds, exits the program.
        """
        waiting, answers = {connection: place for place, (_, connection) in enumerate(self._workers)}, {}
        while waiting:
            if not (ready := multiprocessing.connection.wait(list(waiting), timeout)):
                fail(
                    f"processes {sorted(waiting.values())} did not answer within {timeout:g} s: they are "
                    "stuck or too slow. Start again with fewer processes."
                )
            for connection in ready:
                try:
                    answers[waiting.pop(connection)] = connection.recv()
                except (EOFError, ConnectionError):
                    fail("a process of the benchmark ended. See its error above.")
        return [answers[place] for place in range(len(self._workers))]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        for process, connection in self._workers:
            if failure is None:
                connection.send(None)
            else:
                process.terminate()
        for process, _ in self._workers:
            process.join()


def _serve(connection, environment, namespace, options, build, arguments) -> None:
    parent = os.getppid()
    # Only the parent prints, and `terminate` must end a rank inside a collective.
    for signal_number in stop_signals():
        signal.signal(signal_number, signal.SIG_DFL)
    os.environ.update(environment)
    if namespace:
        with open(f"/run/netns/{namespace}", "rb") as entry:
            assert not ctypes.CDLL(None).setns(entry.fileno(), _CLONE_NEWNET), f"cannot enter {namespace}"
    set_cpu_threads(options.threads)
    device = choose_device(options.device)
    with local_errors(), process_group(device):
        contender = build(device, *arguments)
        barrier()
        connection.send(None)
        while True:
            while not connection.poll(_POLL_SECONDS):
                if os.getppid() != parent:
                    os._exit(1)
            if (request := connection.recv()) is None:
                break
            method, values = request
            is_turn = method == "time"
            connection.send(timed(contender, *values) if is_turn else getattr(contender, method)(*values))
        del contender  # nothing may refer to the group when it closes


def timed(contender: Any, turn: str, warm_calls: int) -> float:
    """Returns the seconds that `contender.turns[turn]()` takes on this rank.

    `warm_calls` untimed calls come first. All ranks must call this together, because they wait for each other
    before the timed call.
    """
    for _ in range(warm_calls):
        contender.turns[turn]()
    barrier()
    begin = timer()  # `timer` waits for the device first
    contender.turns[turn]()
    return timer() - begin


def take_turns(
    turns: Mapping[str, tuple[World, str]], *, rounds: int, warmup_rounds: int = 1, warm_calls: int = 0
) -> dict[str, Measurement]:
    """Measures several functions in turns: A B C, A B C, ... Returns {name: measurement}.

    If the machine is slow for a while, all functions are affected equally. The time of the slowest process
    counts.

    turns: {name: (group of child processes, key of the function)}. The objects of the processes have a dict
    `turns` with this key.
    warmup_rounds: Number of earlier rounds that are not counted.
    warm_calls: Number of untimed calls before each timed call.
    """
    seconds = {name: [] for name in turns}
    numbers = range(warmup_rounds + rounds)
    for _ in Progress(iterable=numbers, desc="measuring", unit="rounds", leave=False):
        for name, (world, turn) in turns.items():
            seconds[name].append(max(world.call("time", turn, warm_calls)))
    return {name: measurement(values[warmup_rounds:]) for name, values in seconds.items()}


class Trainer:
    """A model in training on random data, to measure its speed and memory.

    All ranks create it and call `step`.

    overrides: key=value arguments of pretrain.py. If they set no dtype, all ranks use the one that is fast on
    rank 0's processor.
    puzzles: Batch size of each process. rows: Number of puzzle embeddings.
    """

    def __init__(
        self,
        device: torch.device,
        *overrides: str,
        puzzles: int,
        rows: int = 1000,
        seq_len: int = 81,
        compiles: bool = False,
    ):
        keep_freed_memory(device)
        compile_mode = f"compile={str(compiles).lower()}"
        sizes = {"puzzles": puzzles, "rows": rows, "seq_len": seq_len}
        self.config, self.metadata = compose_training(device, compile_mode, *overrides, **sizes)
        options = {"device": device, "total_steps": TOTAL_STEPS}
        self.state = build_first_state(self.config, self.metadata, **options)
        self.state.model.train()
        spread_slots_(self.state.carry, halt_max_steps=self.config.arch.halt_max_steps)
        self.batches = random_batches(len(self.state.slots), self.metadata, rank=self.state.ranks.index)
        self._device, self._clock = device, StepClock(device)

    def step(self) -> StepResult:
        batch = self.batches[self.state.step % len(self.batches)].to(self._device)
        rates = learning_rates(self.config, self.state.step + 1, total_steps=TOTAL_STEPS)
        return train_step(self.state, batch, config=self.config, rates=rates, clock=self._clock)

    def update_weights(self) -> None:
        self.state.step += 1
        self.state.weights.update_(self.config.lr, step=self.state.step)

    def update_average(self) -> None:
        self.state.average.update(range(self.state.step, self.state.step + 1))

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the tensors of this rank that a checkpoint would contain.

        They are grouped by purpose, such as {"weights": {name: tensor}, "optimizer": {name: tensor}}.
        """
        return {
            part: {name: tensor_of(entry) for name, entry in section.items()}
            for part, section in self.state.sections().items()
        }


def compose_training(
    device: torch.device, *overrides: str, puzzles: int, rows: int = 1000, seq_len: int = 81
) -> tuple[PretrainConfig, Metadata]:
    """Returns the config of a training on random data, and the sizes of the data. All ranks call it.

    overrides: key=value arguments of pretrain.py. If they set no dtype, all ranks use the one that is fast on
    rank 0's processor.
    puzzles: Batch size of each process. rows: Number of puzzle embeddings.
    """
    defaults = (f"global_batch_size={puzzles * world_size()}", f"device={device.type}")
    config = compose_overrides(PretrainConfig, [*defaults, *overrides])
    number_format = broadcast_object(find_format(config).name)  # ranks may have different processors
    metadata = usual_metadata(vocab_size=11, seq_len=seq_len, num_puzzle_identifiers=rows)
    return with_format(config, number_format), metadata


def model_sizes(options: argparse.Namespace) -> tuple[str, ...]:
    return TINY if options.quick else ()  # (): HRM with 27 M weights


def random_batches(size: int, metadata: Metadata, *, rank: int = 0) -> list[Batch]:
    return [random_batch(size, metadata, seed=4 * rank + index) for index in range(4)]


def random_batch(size: int, metadata: Metadata, *, seed: int) -> Batch:
    """Returns a batch of random puzzles on the CPU, in pinned memory if CUDA is available."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        drawn = torch.randint(high, (size, *shape), generator=generator, dtype=torch.int32)
        return drawn.pin_memory() if torch.cuda.is_available() else drawn

    tokens = [draw(metadata.vocab_size, metadata.seq_len) for _ in range(2)]
    return Batch(*tokens, draw(metadata.num_puzzle_identifiers), torch.arange(size))


def spread_slots_(carry: Any, *, halt_max_steps: int) -> None:
    """Spreads the numbers of steps that the puzzles of a batch have made, in place.

    They become evenly spaced from 0 to halt_max_steps - 1. As in a real training, about equally many puzzles
    then end in each call of the model.
    """
    slots = torch.arange(carry.steps.shape[-1], dtype=torch.int32)
    carry.halted.fill_(False)
    carry.steps.copy_(slots * halt_max_steps // len(slots))
