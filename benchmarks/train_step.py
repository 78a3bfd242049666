"""The training step of HRM and TRM against the public code's: how fast, and where its time goes.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --device cuda --published-sizes

published: `benchmarks.published`, eager. ours: `training.step`, on a state as a run builds it; ours_compiled:
with compiled blocks and optimizer; ours_deferred: with `q_target: deferred`, where there is a q_continue.
published_compiled, where asked for: compiled as a whole, as the public code is on CUDA. All begin with the
same weights and with slots at every step of their puzzles, and take turns, one step each, on the same random
batches; a speedup is the median over rounds of published over ours in the same round, and `speedup_<model>`
the best of those with the default q_target.

Parts come from further rounds, in which clocks around the step's own calls wait for the device. data: the
batch on its way to the device (reading is the question of `benchmarks.dataset`). forward: with the loss;
what is left of a step, such as the carry's slicing, is `rest`. Memory and compilation are measured first, in
a process of its own for each contender and with an empty compiler cache: the most that a process with two
steps had, on a CPU with the 0.3 GiB of torch itself; compilation is the first step less the second.

Of peak: the operations of `benchmarks.flops` in the median step, over those a second of the best plain matrix
product in the same dtype: one with the shape of the largest of the model, and a square one.
"""

import argparse
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.flops import inner_width, step_flops
from benchmarks.harness import benchmark_parser, is_under_torchrun, now, parse
from benchmarks.hrm import FACTS, sized_config
from benchmarks.report import Sample, print_report
from benchmarks.trainers import CONTENDERS, OURS, PARTS, Ours, Published, build_contender, timed_calls
from dataset.command_line import integer
from parallel.process_group import choose_device, set_cpu_threads
from training.clock import peak_memory_bytes

DEFAULT_TARGET = "deferred"  # of config/arch/hrm.yaml, which is not read where there is only torch
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_WARMUP_ROUNDS = 2
_PART_ROUNDS = 5  # at most
_PRODUCT_SECONDS = 5e-3  # products are timed in bundles at least so long
_SQUARE = {"cpu": 2048, "cuda": 8192}
_SIZES = {"hidden": 128, "heads": 4, "layers": 2, "batch": 32}
_QUICK_SIZES = {"hidden": 32, "heads": 2, "layers": 1, "batch": 2}
_PUBLISHED_SIZES = {"hidden": 512, "heads": 8, "batch": 768}  # layers: 4 of HRM's levels, 2 of TRM's


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "train_step", description="The training step against the public code's.", rounds=20
    )
    number = integer(at_least=1)
    parser.add_argument("--arch", choices=("hrm", "trm", "both"), default="both", help="default: %(default)s")
    parser.add_argument("--dtype", choices=(*_DTYPES, "both"), default="both", help="default: %(default)s")
    parser.add_argument(
        "--contenders",
        choices=CONTENDERS,
        nargs="+",
        default=["published", *OURS.values()],
        help="default: %(default)s",
    )
    for name, default in _SIZES.items():
        parser.add_argument(f"--{name}", type=number, metavar="N", help=f"default: {default}")
    parser.add_argument(
        "--length", type=number, default=FACTS.seq_len, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--published-sizes",
        action="store_true",
        help="hidden 512, 8 heads, 4 (+ 4) layers of HRM and 2 of TRM, batch 768, or what fits of it",
    )
    parser.add_argument("--threads", type=number, metavar="N", help="default: OMP_NUM_THREADS, else cores")
    parser.set_defaults(processes=1)
    arguments = parse(parser, words)
    if is_under_torchrun():
        parser.error("this benchmark takes one process: start it without torchrun")
    sizes = _PUBLISHED_SIZES if arguments.published_sizes else _QUICK_SIZES if arguments.quick else _SIZES
    for name in _SIZES:
        if getattr(arguments, name) is None:
            setattr(arguments, name, sizes.get(name))
    if arguments.hidden % (2 * arguments.heads):
        parser.error(f"--hidden {arguments.hidden} must be a multiple of twice --heads {arguments.heads}")
    ours = set(arguments.contenders) & set(OURS.values())
    if arguments.arch != "hrm":  # the others have no q_continue
        ours = {name for name in ours if "deferred" not in name}
    if not ours or "published" not in arguments.contenders:
        parser.error("--contenders must name published and one of ours: a speedup is over published")
    arguments.threads = set_cpu_threads(arguments.threads or "auto")
    try:
        device = choose_device(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        measure(arguments, device)


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    archs = ("hrm", "trm") if arguments.arch == "both" else (arguments.arch,)
    dtypes = tuple(_DTYPES) if arguments.dtype == "both" else (arguments.dtype,)
    rows, notes, samples, result = [], [], {}, {"compile_seconds": 0.0}
    for name, dtype in itertools.product(archs, dtypes):
        model = Model(name, dtype, arguments, device)
        rows += model.rows()
        notes += model.notes()
        samples |= {f"{model.label} {key}": sample for key, sample in model.samples.items()}
        result |= model.result()
        result["compile_seconds"] += sum(model.compile_seconds.values())
    header = ["model", "examples/s", "step ms", "spread ms", "speedup", "of peak", "MiB", *PARTS, "rest"]
    print_report(
        "train_step",
        header=header,
        rows=rows,
        notes=[*notes, "Parts in ms, of rounds of their own."],
        result=result,
        samples=samples,
        arguments=arguments,
    )


class Model:
    """One architecture in one dtype: builds its contenders, lets them take turns, and says what came out."""

    def __init__(self, name: str, dtype: str, arguments: argparse.Namespace, device: torch.device):
        self.label = f"{name} {_DTYPES[dtype]}"
        self.facts = SimpleNamespace(**vars(FACTS) | {"seq_len": arguments.length})
        self.config, probes = _probe(name, dtype, arguments, device, self.facts)
        self.peak_memory = {each: probe["peak_memory_bytes"] for each, probe in probes.items()}
        self.compile_seconds = {
            each: max(0.0, probe["first_seconds"] - probe["second_seconds"])
            for each, probe in probes.items()
            if each.endswith("compiled")
        }
        contenders = [build_contender(each, self.config, self.facts, device) for each in probes]
        for contender in contenders * _WARMUP_ROUNDS:
            contender.step()
        self.seconds = _take_turns(contenders, arguments.rounds, device)
        self.samples = {each: Sample.of(values) for each, values in self.seconds.items()}
        self.parts = _time_parts(contenders, min(arguments.rounds, _PART_ROUNDS), device)
        self.flops = {each.name: self._step_flops(each.name) for each in contenders}
        self.peaks = _matmul_peaks(self.config, self.facts, arguments, device)

    def _step_flops(self, contender: str) -> int:
        q_target = "deferred" if "deferred" in contender else "exact"
        return step_flops(
            SimpleNamespace(**vars(self.config.arch) | {"q_target": q_target}),
            vocab_size=self.facts.vocab_size,
            seq_len=self.facts.seq_len,
            batch_size=self.config.global_batch_size,
        )

    def speedup(self, contender: str, *, over: str = "published") -> Sample:
        return Sample.of(self.seconds[over] / self.seconds[contender])

    def fraction_of_peak(self, contender: str) -> float:
        return self.flops[contender] / self.samples[contender].median / max(self.peaks.values())

    def has_default_target(self, contender: str) -> bool:
        return self.config.arch.no_ACT_continue or ("deferred" in contender) == (DEFAULT_TARGET == "deferred")

    def rows(self) -> list[list[str]]:
        return [
            [
                f"{self.label} {name}",
                f"{self.config.global_batch_size / sample.median:.1f}",
                *sample.cells(),
                f"{self.speedup(name).median:.2f}",
                f"{self.fraction_of_peak(name):.1%}",
                f"{self.peak_memory[name] / 2**20:.0f}",
                *(f"{1000 * self.parts[name][part]:.1f}" for part in (*PARTS, "rest")),
            ]
            for name, sample in self.samples.items()
        ]

    def notes(self) -> list[str]:
        arch = self.config.arch
        peaks = ", ".join(f"{shape} {peak / 1e9:.0f}" for shape, peak in self.peaks.items())
        compiled = "".join(f"; {name} compiles {each:.0f} s" for name, each in self.compile_seconds.items())
        return [
            f"{self.label}: batch {self.config.global_batch_size}, {self.facts.seq_len} + "
            f"{arch.puzzle_emb_positions} positions, hidden {arch.hidden_size}, {arch.num_heads} heads, "
            f"layers H {arch.H_layers} L {arch.L_layers}, cycles H {arch.H_cycles} L {arch.L_cycles}: "
            f"{self.flops['published'] / 1e9:.1f} GFLOP a published step; "
            f"products (GFLOP/s): {peaks}{compiled}"
        ]

    def result(self) -> dict[str, Any]:
        key = self.label.replace(" ", "_")
        speedups = {kind: self.speedup(name).median for kind, name in OURS.items() if name in self.samples}
        default = [kind for kind in speedups if self.has_default_target(OURS[kind])]
        best = OURS[max(default or speedups, key=speedups.get)]
        result = {
            f"speedup_{key}": self.speedup(best).median,
            **{f"speedup_{key}_{kind}": speedup for kind, speedup in speedups.items()},
            f"fraction_of_matmul_peak_{key}": self.fraction_of_peak(best),
            f"batch_{key}": self.config.global_batch_size,
            f"peak_memory_bytes_{key}": self.peak_memory,
            f"parts_seconds_{key}": self.parts,
            **{f"compile_seconds_{key}_{name}": each for name, each in self.compile_seconds.items()},
        }
        if "published_compiled" in self.samples:
            over = self.speedup(best, over="published_compiled")
            result[f"speedup_over_published_compiled_{key}"] = over.median
        return result


# ----------------------------------------------------------------------------------------------------- clocks
def _take_turns(
    contenders: list[Ours | Published], rounds: int, device: torch.device
) -> dict[str, np.ndarray]:
    """Seconds [rounds] of a step, by contender."""
    seconds = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            begin = now(device)
            contender.step()
            seconds[contender.name].append(now(device) - begin)
    return {name: np.array(values) for name, values in seconds.items()}


def _time_parts(
    contenders: list[Ours | Published], rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """The median seconds of each part, and of the rest of the step, by contender."""
    timings = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            with timed_calls(contender.calls(), device) as seconds:
                begin = now(device)
                contender.step()
                whole = now(device) - begin
            timings[contender.name].append({**seconds, "rest": whole - sum(seconds.values())})
    return {
        name: {part: float(np.median([each[part] for each in rounds_])) for part in (*PARTS, "rest")}
        for name, rounds_ in timings.items()
    }


# --------------------------------------------------------------------------------- memory, compilation, peaks
def _probe(
    name: str, dtype: str, arguments: argparse.Namespace, device: torch.device, facts: SimpleNamespace
) -> tuple[SimpleNamespace, dict[str, dict[str, float]]]:
    """The config with the largest batch that all contenders have room for, and what `probe` said of each.

    The batch is halved until it fits, on CUDA.
    """
    batch_size = arguments.batch
    while True:
        config = _config(name, dtype, arguments, batch_size=batch_size)
        has_target = not config.arch.no_ACT_continue
        try:
            return config, {
                each: _in_a_process_of_its_own(probe, each, config, facts, device, arguments.threads)
                for each in arguments.contenders
                if has_target or "deferred" not in each
            }
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
            batch_size //= 2


def probe(
    name: str, config: SimpleNamespace, facts: SimpleNamespace, device: torch.device, threads: int
) -> dict[str, float]:
    """Seconds of the first and the second step of a contender, and the most bytes this process had."""
    set_cpu_threads(threads)
    contender = build_contender(name, config, facts, device)
    seconds = []
    for _ in range(2):
        begin = now(device)
        contender.step()
        seconds.append(now(device) - begin)
    return {
        "first_seconds": seconds[0],
        "second_seconds": seconds[1],
        "peak_memory_bytes": peak_memory_bytes(device),
    }


def _in_a_process_of_its_own(function: Callable, *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _config(name: str, dtype: str, arguments: argparse.Namespace, *, batch_size: int) -> SimpleNamespace:
    layers = arguments.layers or {"hrm": 4, "trm": 2}[name]
    return sized_config(
        name,
        global_batch_size=batch_size,
        hidden_size=arguments.hidden,
        num_heads=arguments.heads,
        H_layers=layers if name == "hrm" else 0,
        L_layers=layers,
        forward_dtype=dtype,
    )


def _matmul_peaks(
    config: SimpleNamespace, facts: SimpleNamespace, arguments: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Operations a second, at best, of a product as large as the model's largest, and of a square one."""
    tokens = config.global_batch_size * (facts.seq_len + config.arch.puzzle_emb_positions)
    square = _SQUARE[device.type] // (8 if arguments.quick else 1)
    peaks = {}
    for m, k, n in (
        (tokens, config.arch.hidden_size, 2 * inner_width(config.arch)),
        (square, square, square),
    ):
        first, second = (
            torch.randn(shape, device=device).to(getattr(torch, config.arch.forward_dtype))
            for shape in ((m, k), (n, k))
        )
        best = min(_seconds_of_product(first, second, device) for _ in range(2 + arguments.rounds))
        peaks[f"{m} x {k} x {n}"] = 2 * m * k * n / best
    return peaks


def _seconds_of_product(first: torch.Tensor, second: torch.Tensor, device: torch.device) -> float:
    """Of one, out of as many as a clock needs."""
    count = 1
    while True:
        begin = now(device)
        for _ in range(count):
            torch.nn.functional.linear(first, second)
        seconds = now(device) - begin
        if seconds > _PRODUCT_SECONDS:
            return seconds / count
        count *= 2


if __name__ == "__main__":
    main()
