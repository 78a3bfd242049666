"""The training step of HRM and TRM against the public code's: how fast, and where its time goes.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --device cuda --published-sizes

published: `benchmarks.published`, eager. ours: `training.step`, on a state as a run builds it; ours_compiled:
with compiled blocks and optimizer; ours_deferred: with `q_target: deferred`, where there is a q_continue.
published_flash_attention, of HRM: with torch's attention also on a CPU, where the code has plain products
(see `published_network`); published_compiled, where asked for: compiled as a whole, as the public code is on
CUDA. All begin with the same weights and with slots at every step of their puzzles, and take turns on the
same random batches, two steps each, of which the second counts; a speedup is the median over rounds of
published over ours in the same round, and `speedup_<model>` the best of those with the default q_target.

Each contender lives in a process of its own, as a run does; ours keeps freed memory, as a run does.
Compilation is the first step less the second, with an empty cache for the first that compiles, but for
torch's headers, which stay compiled elsewhere; memory the most that the process had until then, on a CPU with the 0.3
GiB of torch itself. Parts come from further rounds, in which clocks around the step's own calls wait for the
device. data: the batch on its way to the device (reading is the question of `benchmarks.dataset`). forward:
with the loss; what is left of a step, such as the carry's slicing, is `rest`.

Of peak: the operations of `benchmarks.flops` in the median step, over those a second of the best plain matrix
product in the same dtype: one with the shape of the largest of the model, and a square one.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.flops import inner_width, matmul_rate, step_flops
from benchmarks.harness import benchmark_parser, is_under_torchrun, parse
from benchmarks.hrm import FACTS, sized_config
from benchmarks.report import Sample, print_report
from benchmarks.trainer_process import TrainerProcess
from benchmarks.trainers import CONTENDERS, FLASH_ATTENTION, OURS, PARTS, contenders_of
from dataset.command_line import integer
from parallel.process_group import choose_device, set_cpu_threads

DEFAULT_TARGET = "exact"  # of config/arch/hrm.yaml, which is not read where there is only torch
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_WARMUP_ROUNDS = 2
_PART_ROUNDS = 5  # at most
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
        default=["published", FLASH_ATTENTION, *OURS.values()],
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
    if arguments.arch != "hrm":  # the other has no q_continue
        ours &= set(contenders_of("trm", no_ACT_continue=True))
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
    """One architecture in one dtype: starts its contenders, lets them take turns, and says what came out."""

    def __init__(self, name: str, dtype: str, arguments: argparse.Namespace, device: torch.device):
        self.label = f"{name} {_DTYPES[dtype]}"
        self.facts = SimpleNamespace(**vars(FACTS) | {"seq_len": arguments.length})
        with contextlib.ExitStack() as stack:
            self.config, contenders = self._start(name, dtype, arguments, device, stack)
            self.peak_memory = {each.name: each.begin.peak_memory_bytes for each in contenders}
            self.compile_seconds = {
                each.name: max(0.0, each.begin.first_seconds - each.begin.second_seconds)
                for each in contenders
                if each.name.endswith("compiled")
            }
            rounds = [{each.name: each.take_turn() for each in contenders} for _ in range(arguments.rounds)]
            self.seconds = {name: np.array([each[name] for each in rounds]) for name in rounds[0]}
            part_rounds = min(arguments.rounds, _PART_ROUNDS)
            self.parts = {each.name: each.time_parts(part_rounds) for each in contenders}
        self.samples = {each: Sample.of(values) for each, values in self.seconds.items()}
        self.flops = {each: self._step_flops(each) for each in self.samples}
        self.peaks = self._matmul_peaks(arguments, device)

    def _start(
        self,
        name: str,
        dtype: str,
        arguments: argparse.Namespace,
        device: torch.device,
        stack: contextlib.ExitStack,
    ) -> tuple[SimpleNamespace, list[TrainerProcess]]:
        """The config with the largest batch that all have room for, and its contenders, warm.

        `stack` ends them. The batch is halved until it fits, on CUDA.
        """
        batch_size = arguments.batch
        while True:
            config = _config(name, dtype, arguments, batch_size=batch_size)
            there_are = contenders_of(name, no_ACT_continue=config.arch.no_ACT_continue)
            with contextlib.ExitStack() as attempt:
                try:
                    contenders = [
                        attempt.enter_context(
                            TrainerProcess(each, config, self.facts, device=device, threads=arguments.threads)
                        )
                        for each in arguments.contenders
                        if each in there_are
                    ]
                    for contender in contenders * _WARMUP_ROUNDS:
                        contender.take_turn()
                except torch.OutOfMemoryError:
                    if batch_size == 1:
                        raise
                    batch_size //= 2
                    continue
                stack.enter_context(attempt.pop_all())
                return config, contenders

    def _matmul_peaks(self, arguments: argparse.Namespace, device: torch.device) -> dict[str, float]:
        """Operations a second, at best, of a product as large as the model's largest, and of a square one."""
        arch = self.config.arch
        tokens = self.config.global_batch_size * (self.facts.seq_len + arch.puzzle_emb_positions)
        square = _SQUARE[device.type] // (8 if arguments.quick else 1)
        shapes = (tokens, arch.hidden_size, 2 * inner_width(arch)), (square, square, square)
        dtype = getattr(torch, arch.forward_dtype)
        return {
            " x ".join(map(str, shape)): matmul_rate(
                *shape, dtype=dtype, device=device, rounds=2 + arguments.rounds
            )
            for shape in shapes
        }

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
        for other in ("published_compiled", FLASH_ATTENTION):
            if other in self.samples:
                result[f"speedup_over_{other}_{key}"] = self.speedup(best, over=other).median
        return result


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


if __name__ == "__main__":
    main()
