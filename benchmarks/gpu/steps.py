"""How fast the training step is, of what the card can do, and where the host waits for it."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._inductor import config as inductor
from torch.utils.flop_counter import FlopCounterMode

import training.state
from benchmarks import optimizers
from benchmarks.gpu.static import Static
from benchmarks.gpu.tasks import NothingToDoError, Options, Tell, place_of
from benchmarks.gpu.timing import seconds_of
from benchmarks.harness import now
from benchmarks.train_step.contenders import Ours, Published, build_contender
from benchmarks.train_step.flops import inner_width, matmul_rate
from benchmarks.trainee import METADATA, build_experiment
from models.compilation import COMPILER_OPTIONS
from models.halting import HaltingModel
from models.layers import Level
from parallel.launch import keep_freed_memory
from training.clock import peak_memory_bytes

EXPERIMENTS = {
    "hrm": "sudoku_extreme",
    "trm": "trm_sudoku_attention",
    "serrm": "serrm_sudoku",
    "urm": "urm_sudoku",
}
# Of each way to step, the name of `build_contender`.
WAYS = {
    "published": "published",
    "published_compiled": "published_compiled",
    "eager": "ours",
    "compiled": "ours_compiled",
    "deferred_compiled": "ours_deferred_compiled",
    "graphs": "ours_compiled",
    "levels_compiled": "ours_compiled",
    "autotuned_compiled": "ours_compiled",
}
_TINY = {"hidden_size": 32, "num_heads": 2, "H_cycles": 2, "L_cycles": 2, "L_layers": 1}
_TINY_OF = {"hrm": {"H_layers": 1}, "serrm": {"num_heads_t": 2, "head_dim": 8, "head_dim_t": 8}}
_TINY_BATCH = 4
_WARMUP_STEPS = 5
_COPIED_BYTES = 2**30


def step_config(name: str, options: Options, **changes: Any) -> SimpleNamespace:
    """Returns the config of a model's published run, or of a tiny one, without the average of weights."""
    if not options.is_tiny:
        return build_experiment(EXPERIMENTS[name], ema=None, **changes)
    sizes = _TINY | _TINY_OF.get(name, {})
    changes = {"global_batch_size": _TINY_BATCH} | changes
    return build_experiment(EXPERIMENTS[name], sizes=sizes, ema=None, **changes)


def measure_rates(options: Options, seconds: float, tell: Tell) -> None:
    """Measures what the card can do: products in bfloat16, as large as the models' and square; copies."""
    device = torch.device(options.device)
    shapes = {"square": (64,) * 3 if options.is_tiny else (8192,) * 3}
    for name in ("hrm", "serrm"):
        config = step_config(name, options)
        tokens = config.global_batch_size * METADATA.seq_len * (METADATA.vocab_size if name == "serrm" else 1)
        shapes[name] = (tokens, config.arch.hidden_size, 2 * inner_width(config.arch))
    for name, shape in shapes.items():
        rate = matmul_rate(*shape, dtype=torch.bfloat16, device=device, rounds=5)
        tell(product=name, shape=shape, flops_per_second=rate)
    numbers = torch.ones(_COPIED_BYTES // (1024 if options.is_tiny else 1) // 4, device=device)
    best = min(seconds_of(numbers.neg_, device, bundles=3))
    tell(copy="in place", bytes_per_second=2 * numbers.nbytes / best)


def measure_step(options: Options, seconds: float, tell: Tell, name: str, way: str) -> None:
    """Times the training step of a model; with the largest half, quarter, ... of its batch that fits."""
    device = torch.device(options.device)
    keep_freed_memory(device)
    if options.is_tiny:
        torch.compiler.set_stance("force_eager")  # all but the compiler
    with compiling(way):
        for halvings in itertools.count():
            config = step_config(name, options)
            config.global_batch_size >>= halvings
            try:
                tell(**_measure_step(config, way, device))
                break
            except torch.OutOfMemoryError:
                if config.global_batch_size == 1:
                    raise
            torch.cuda.empty_cache()
        if way.startswith("published") or way.startswith("deferred"):
            return  # they wait by design
        if device.type == "cpu":
            raise NothingToDoError("whether the host waits is seen on CUDA alone")
        tell(host_waits_at=find_host_wait(_contender(config, way, device).step))


@contextlib.contextmanager
def compiling(way: str) -> Iterator[None]:
    """Within, blocks are compiled as a way has it: tried in several forms, or all of a level as one graph."""
    with contextlib.ExitStack() as stack:
        if way == "autotuned_compiled":
            stack.enter_context(inductor.patch(max_autotune=True))
        if way == "levels_compiled":
            stack.enter_context(mock.patch.object(training.state, "compile_blocks", _compile_levels))
        yield


def _compile_levels(model: HaltingModel) -> None:
    for module in model.modules():
        if isinstance(module, Level):
            module.compile(dynamic=False, fullgraph=True, options=COMPILER_OPTIONS)


def _measure_step(config: SimpleNamespace, way: str, device: torch.device) -> dict[str, Any]:
    begin = now(device)
    contender = _contender(config, way, device)
    losses = [contender.step() for _ in range(_WARMUP_STEPS)]
    row = {"first_steps_seconds": now(device) - begin}
    seconds = seconds_of(contender.step, device)
    p10, median, p90 = np.percentile(seconds, (10, 50, 90)).tolist()
    row |= {"batch": config.global_batch_size, "seconds": median, "p10": p10, "p90": p90}
    row |= {"examples_per_second": config.global_batch_size / median}
    row["peak_memory_bytes"] = peak_memory_bytes(device)
    if isinstance(contender, Ours):
        row["losses"] = [float(result.loss) for result in losses]
    if way == "eager":
        row["flops_per_example"] = count_flops(contender.step) / config.global_batch_size
    return row


def _contender(config: SimpleNamespace, way: str, device: torch.device) -> Ours | Published:
    build = Static if way == "graphs" else build_contender
    return build(WAYS[way], config, METADATA, device)


def count_flops(step: Callable[[], Any]) -> int:
    """Counts the operations of the matrix products in a step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def find_host_wait(step: Callable[[], Any]) -> str | None:
    """Returns where the host waits for the GPU in a step, and why; None where it does not."""
    for _ in range(_WARMUP_STEPS):
        step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            step()
    except RuntimeError as error:
        return f"{place_of(error)}: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def measure_optimizers(options: Options, seconds: float, tell: Tell) -> None:
    """Times an update of all weights of HRM, and of their average, against the bare memory traffic."""
    device = torch.device(options.device)
    if options.is_tiny:
        torch.compiler.set_stance("force_eager")
    updates, _ = optimizers.build_updates(step_config("hrm", options).arch, device)
    traffic = {}
    for kind, way in sorted(updates, key=lambda key: key[1] != "traffic"):
        for _ in range(3):  # compiles
            updates[kind, way]()
        median = float(np.median(seconds_of(updates[kind, way], device)))
        traffic.setdefault(kind, median)
        tell(update=f"{kind} {way}", seconds=median, over_traffic=median / traffic[kind])
