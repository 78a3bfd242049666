"""Times the training step. For HRM and TRM, compares it with the public code (`benchmarks.published`).

    python -m benchmarks.step
    python -m benchmarks.step --dtype bfloat16 float32
    python -m benchmarks.step --arch trm infiloop ldt
    python -m benchmarks.step --device cuda --published-sizes

Contenders are the compared implementations. The public code is what the authors of HRM and TRM published.

    published           the public code, eager
    published_flash     the public code of HRM with the attention of torch, also on a CPU
    published_compiled  the complete model is compiled, as in the public code on CUDA
    exact, deferred     our step with this value of the config key arch.q_target. Only HRM has `deferred`
    exact_compiled, deferred_compiled  the same with compiled blocks and optimizer

--arch infiloop is TRM with a gate. --arch ldt is LDT as in the last stage of
experiment=sudoku_extreme_search.

Each contender runs in a separate process. All start with the same weights and batches. The puzzles of a batch
have made different numbers of thinking steps (calls of the model). Contenders are measured alternately. Each
makes two steps, and the second is timed.

speedup: time of the first contender / time of this one, median over rounds. compile: time of the first step -
time of the second. The first contender that compiles has an empty cache. MiB: peak memory of the process. of
peak: operations per second of the step (`models.flops`) / operations per second of the best matrix product.

--dtype: By default, the number format that `forward_dtype=auto` chooses on this machine. --rounds: By
default, the number of rounds that takes 45 s for the first model, from 3 to 20.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.benchmark import Timer, timer

from benchmarks.harness import benchmark_parser, cells, parse, positive, print_report, ratio, run_main
from benchmarks.published import PublishedTrainer
from benchmarks.worlds import (
    Trainer,
    World,
    compose_training,
    random_batches,
    spread_slots_,
    take_turns,
)
from distributed.number_format import choose_format
from models import build_model
from training.clock import peak_memory_bytes
from training.metrics import FiniteCheck
from training.model import count_steps

_PUBLISHED = ("published", "published_flash", "published_compiled")
_OURS = ("exact", "exact_compiled", "deferred", "deferred_compiled")
# {--arch: prefixes of contenders that do not exist for it}.
_WITHOUT: dict[str, tuple[str, ...]] = {"hrm": (), "trm": ("deferred", "published_f")}
_WITHOUT |= dict.fromkeys(("infiloop", "ldt"), ("deferred", "published"))
_SIZES = {"hidden": 128, "heads": 4, "layers": 2, "batch": 32}
_QUICK_SIZES = {"hidden": 32, "heads": 2, "layers": 1, "batch": 4}
# layers=None: 4 layers in each level of HRM and in LDT, 2 in TRM.
_PUBLISHED_SIZES = {"hidden": 512, "heads": 8, "layers": None, "batch": 768}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_MIN_ROUNDS, _MAX_ROUNDS, _SECONDS_OF_ROUNDS = 3, 20, 45.0  # if --rounds is not set
_PRODUCT_SECONDS = 0.5  # if a matrix product would take longer, it gets fewer rows


class Contender:
    """One of the compared implementations of the training step, in a process of its own.

    name: Name of the implementation, such as "exact_compiled" or "published".
    """

    def __init__(self, device: torch.device, name: str, arch: str, dtype: str, options: argparse.Namespace):
        self._device, self._options = device, options
        overrides = _overrides(arch, dtype, options)
        overrides += [f"arch.q_target={name.partition('_')[0]}"] if name in _OURS and arch == "hrm" else []
        compiles = name in _OURS and name.endswith("_compiled")
        sizes = {"puzzles": options.batch, "seq_len": options.length}
        if name in _OURS:
            self._trainer = Trainer(device, *overrides, compiles=compiles, **sizes)
            config, metadata = self._trainer.config, self._trainer.metadata
            self._finite = FiniteCheck(device)
            self._step = self._our_step
        else:
            # The memory of a training state of ours would count as that of the public code.
            config, metadata = compose_training(device, *overrides, **sizes)
            torch.manual_seed(config.seed)
            self._trainer = PublishedTrainer(
                config,
                metadata,
                build_model(config.arch, metadata).network.state_dict(),
                device=device,
                compile_model=name.endswith("compiled"),
                flash_attention=name.endswith("flash"),
            )
            spread_slots_(self._trainer.carry, halt_max_steps=config.arch.halt_max_steps)
            self._batches = itertools.cycle(random_batches(options.batch, metadata))
            self._step = self._published_step
        self.turns, self._counter = {"step": self._step}, count_steps(config, metadata)

    def _our_step(self) -> None:
        result = self._trainer.step()
        step = self._trainer.state.step
        self._finite.add(step, set_name="all", loss=result.loss, grad_norm=result.grad_norm)

    def _published_step(self) -> None:
        batch = next(self._batches)._replace(rows=None)._asdict()  # the public code has no rows
        columns = {name: column for name, column in batch.items() if column is not None}
        self._trainer.step({name: column.to(self._device) for name, column in columns.items()})

    def begin(self) -> dict[str, float]:
        """Makes two training steps, and returns their times and memory.

        The keys are "step" (seconds of the second step), "compile" (additional seconds of the first step),
        and "memory" (peak memory in bytes).
        """
        seconds = []
        for _ in range(2):
            began = timer()
            self._step()
            seconds.append(timer() - began)
        compiling = max(0.0, seconds[0] - seconds[1])
        return {"compile": compiling, "memory": peak_memory_bytes(self._device), "step": seconds[1]}

    def count_operations(self) -> float:
        """Returns the floating-point operations of all matrix products in a training step."""
        return self._options.batch * self._counter.flops(self._counter.model.reasoning, trains=True)

    def product_rate(self) -> float:
        """Returns the speed of matrix products on this device, in operations per second.

        Measures a product with the sizes of the model and a product of square matrices, and returns the
        higher speed.
        """
        options = self._options
        square = {"cpu": 2048, "cuda": 8192}[self._device.type] // (8 if options.quick else 1)
        small, seconds = square // 8, 0.05 if options.quick else 0.5
        most = _PRODUCT_SECONDS * self._rate_of(small, small, small, min_run_time=0.05)  # operations
        rates = []
        of_model = options.batch * options.length, options.hidden, 8 * options.hidden
        for m, k, n in (of_model, (square, square, square)):
            rows = max(1, min(m, int(most / (2 * k * n))))
            rates.append(self._rate_of(rows, k, n, min_run_time=seconds))
        return max(rates)

    def _rate_of(self, m: int, k: int, n: int, *, min_run_time: float) -> float:
        dtype = getattr(torch, self._trainer.config.arch.forward_dtype)
        x, weight = (torch.randn(shape, device=self._device).to(dtype) for shape in ((m, k), (n, k)))
        stmt = Timer(
            "torch.nn.functional.linear(x, weight)",
            globals={"torch": torch, "x": x, "weight": weight},
            num_threads=torch.get_num_threads(),
        )
        return 2 * m * k * n / min(stmt.blocked_autorange(min_run_time=min_run_time).times)


def _overrides(arch: str, dtype: str, options: argparse.Namespace) -> list[str]:
    overrides = [f"arch={arch.partition('_')[0]}", f"arch.hidden_size={options.hidden}"]
    overrides += [f"arch.num_heads={options.heads}", f"arch.forward_dtype={dtype}"]
    if arch == "ldt":
        overrides = ["experiment=sudoku_extreme_search", "curriculum=[]", *overrides[1:]]
        return [*overrides, f"arch.num_layers={options.layers or 4}"]
    layers = options.layers or (4 if arch == "hrm" else 2)
    overrides += [f"arch.puzzle_emb_ndim={options.hidden}", f"arch.L_layers={layers}"]
    overrides += [f"arch.H_layers={layers}"] if arch == "hrm" else []
    return overrides


def main(argv: Sequence[str] | None = None) -> None:
    description = "Times the training step, and compares it with the public code."
    parser = benchmark_parser("step", description=description, rounds=None)
    parser.add_argument("--arch", choices=_WITHOUT, nargs="+", default=["hrm", "trm"])
    of_dtype = "number formats (default: the one that forward_dtype=auto chooses on this machine)"
    parser.add_argument("--dtype", choices=_DTYPES, nargs="+", help=of_dtype)
    names = [*_PUBLISHED, *_OURS]
    default = ["published", "published_flash", *_OURS]
    parser.add_argument("--contenders", choices=names, nargs="+", default=default, help="%(choices)s")
    for option, size in _SIZES.items():
        parser.add_argument(f"--{option}", type=positive, metavar="N", help=f"default: {size}")
    parser.add_argument("--length", type=positive, default=81, metavar="N", help="default: %(default)s")
    published = "published sizes: hidden 512, 8 heads, batch 768, 2 layers (4 in LDT and each level of HRM)"
    parser.add_argument("--published-sizes", action="store_true", help=published)
    options = parse(parser, argv)
    sizes = _PUBLISHED_SIZES if options.published_sizes else _QUICK_SIZES if options.quick else _SIZES
    for option in _SIZES:
        if getattr(options, option) is None:
            setattr(options, option, sizes[option])
    if options.hidden % (2 * options.heads):
        parser.error(f"--hidden {options.hidden} must be a multiple of twice --heads {options.heads}")
    rows, result = [], {}
    for arch, dtype in itertools.product(options.arch, options.dtype or [_format_of_machine(options)]):
        more_rows, more_result = _compare(arch, dtype, options)
        rows += more_rows
        result |= more_result
    print_report(
        "step",
        options,
        header=["model", "step ms", "spread ms", "speedup", "of peak", "MiB", "compile s"],
        rows=rows,
        notes=[
            f"Batch {options.batch}, {options.length} tokens, hidden {options.hidden}, {options.heads} heads."
        ],
        result=result,
    )


class _Format:
    def __init__(self, device: torch.device):
        self._device = device

    def choose(self) -> str:
        return choose_format(self._device).name


def _format_of_machine(options: argparse.Namespace) -> str:
    # Choosing may initialize CUDA. This process must not, because it forks later.
    with World(options, _Format) as world:
        return world.call("choose")[0]


def choose_rounds(seconds: float) -> int:
    """Returns how many rounds of measurements take about 45 s, between 3 and 20.

    seconds: Time of one training step, summed over all compared implementations.
    """
    of_round = 2 * seconds  # a warm-up step and a timed step
    return max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_SECONDS_OF_ROUNDS / of_round)))


def _compare(arch: str, dtype: str, options: argparse.Namespace) -> tuple[list[list[str]], dict[str, Any]]:
    label, rows, result = f"{arch}_{_DTYPES[dtype]}", [], {}
    names = [contender for contender in options.contenders if not contender.startswith(_WITHOUT[arch])]
    if not names:
        return rows, result
    with contextlib.ExitStack() as opened:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = opened.enter_context(tempfile.TemporaryDirectory())
        worlds, begun = {}, {}
        for name in names:
            world = World(options, Contender, name, arch, dtype, options)
            worlds[name] = opened.enter_context(world)
            (begun[name],) = world.call("begin")
        if options.rounds is None:
            options.rounds = choose_rounds(sum(measured["step"] for measured in begun.values()))
        times = take_turns(
            {name: (world, "step") for name, world in worlds.items()}, rounds=options.rounds, warm_calls=1
        )
        operations = {name: world.call("count_operations")[0] for name, world in worlds.items()}
        (rate,) = worlds[names[0]].call("product_rate")
    for name, found in times.items():
        speedup, of_peak = ratio(times[names[0]], found), operations[name] / found.median / rate
        result |= {f"speedup_{label}_{name}": speedup, f"of_peak_{label}_{name}": of_peak}
        compiling = begun[name]["compile"] if "compiled" in name else 0.0
        result |= {f"compile_seconds_{label}_{name}": compiling} if compiling else {}
        memory = f"{begun[name]['memory'] / 2**20:.0f}"
        figures = [f"{speedup:.2f}", f"{of_peak:.1%}", memory, f"{compiling:.0f}" if compiling else ""]
        rows.append([f"{label} {name}", *cells(found), *figures])
    return rows, result


if __name__ == "__main__":
    run_main(main)
