"""One architecture in one dtype, trained by several contenders that take turns on the same batches."""

import argparse
import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Sample
from benchmarks.train_step.contenders import FLASH_ATTENTION, OURS, PARTS, contenders_of
from benchmarks.train_step.flops import inner_width, matmul_rate, step_flops
from benchmarks.train_step.process import ContenderProcess
from benchmarks.trainee import CONFIG, METADATA, build_config, read_config

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
DEFAULT_TARGET = read_config(CONFIG / "arch" / "hrm.yaml")["q_target"]
_WARMUP_ROUNDS = 2
_PART_ROUNDS = 5  # at most
_SQUARE = {"cpu": 2048, "cuda": 8192}


class Comparison:
    """The comparison: starts its contenders, lets them take turns, and says what came out.

    label: such as `hrm bf16`.
    """

    def __init__(self, name: str, dtype: str, arguments: argparse.Namespace, device: torch.device):
        self.label = f"{name} {DTYPES[dtype]}"
        self.metadata = SimpleNamespace(**vars(METADATA) | {"seq_len": arguments.length})
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
    ) -> tuple[SimpleNamespace, list[ContenderProcess]]:
        """Returns the config with the largest batch that all have room for, and its contenders, warm.

        `stack` ends the contenders. The batch is halved until it fits, on CUDA.
        """
        batch_size = arguments.batch
        while True:
            config = _config(name, dtype, arguments, batch_size=batch_size)
            existing = contenders_of(name, no_ACT_continue=config.arch.no_ACT_continue)
            with contextlib.ExitStack() as attempt:
                try:
                    contenders = [
                        attempt.enter_context(
                            ContenderProcess(
                                each, config, self.metadata, device=device, threads=arguments.threads
                            )
                        )
                        for each in arguments.contenders
                        if each in existing
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
        """Measures operations a second of a product as large as the model's largest, and of a square one."""
        arch = self.config.arch
        tokens = self.config.global_batch_size * (self.metadata.seq_len + arch.puzzle_emb_positions)
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
        return step_flops(
            self.config.arch,
            is_deferred="deferred" in contender,
            vocab_size=self.metadata.vocab_size,
            seq_len=self.metadata.seq_len,
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
            f"{self.label}: batch {self.config.global_batch_size}, {self.metadata.seq_len} + "
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
        exact = [kind for kind in speedups if "deferred" not in OURS[kind]]
        if exact and not self.config.arch.no_ACT_continue:
            result[f"speedup_{key}_exact"] = max(speedups[kind] for kind in exact)
        for other in ("published_compiled", FLASH_ATTENTION):
            if other in self.samples:
                result[f"speedup_over_{other}_{key}"] = self.speedup(best, over=other).median
        return result


def _config(name: str, dtype: str, arguments: argparse.Namespace, *, batch_size: int) -> SimpleNamespace:
    layers = arguments.layers or {"hrm": 4, "trm": 2}[name]
    sizes = {
        "hidden_size": arguments.hidden,
        "num_heads": arguments.heads,
        "H_layers": layers if name == "hrm" else 0,
        "L_layers": layers,
        "forward_dtype": dtype,
    }
    return build_config(name, global_batch_size=batch_size, sizes=sizes)
