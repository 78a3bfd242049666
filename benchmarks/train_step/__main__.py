"""Times the training step of HRM and TRM against the public code's, and where its time goes.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --device cuda --published-sizes

published: `published`, eager. ours: `training.step`, on a state as a run builds it, with `q_target: exact`;
ours_compiled: with compiled blocks and optimizer; ours_deferred: with `q_target: deferred`, where there is a
q_continue. published_flash_attention, of HRM: with torch's attention also on a CPU, where the code has plain
products (see `published_network`); published_compiled, where asked for: compiled as a whole, as the public
code is on CUDA. All begin with the same weights and with slots at every step of their puzzles, and take turns
on the same random batches, two steps each, of which the second counts; a speedup is the median over rounds of
published over ours in the same round, and `speedup_<model>` the best of those with the default q_target.

Each contender lives in a process of its own, as a run does; ours keeps freed memory, as a run does.
Compilation is the first step less the second, with an empty cache for the first that compiles, but for
torch's headers, which stay compiled elsewhere; memory is the most that the process had until then, on a CPU
with the 0.3 GiB of torch itself. Parts come from further rounds, in which clocks around the step's own calls
wait for the device. data: the batch on its way to the device (reading is the question of
`benchmarks.dataset`). forward: with the loss; what is left of a step, such as the carry's slicing, is `rest`.

Of peak: the operations of `flops` in the median step, over those a second of the best plain matrix
product in the same dtype: one with the shape of the largest of the model, and a square one.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Sequence
from unittest import mock

import torch

from benchmarks.harness import benchmark_parser, open_device, parse, positive, print_report
from benchmarks.train_step.comparison import DTYPES, Comparison
from benchmarks.train_step.contenders import CONTENDERS, FLASH_ATTENTION, OURS, PARTS, contenders_of
from benchmarks.trainee import METADATA
from parallel.process_group import set_cpu_threads

_SIZES = {"hidden": 128, "heads": 4, "layers": 2, "batch": 32}
_QUICK_SIZES = {"hidden": 32, "heads": 2, "layers": 1, "batch": 2}
_PUBLISHED_SIZES = {"hidden": 512, "heads": 8, "batch": 768}  # layers: 4 of HRM's levels, 2 of TRM's


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "train_step", description="The training step against the public code's.", rounds=20
    )
    parser.add_argument("--arch", choices=("hrm", "trm", "both"), default="both", help="default: %(default)s")
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both", help="default: %(default)s")
    parser.add_argument(
        "--contenders",
        choices=CONTENDERS,
        nargs="+",
        default=["published", FLASH_ATTENTION, *OURS.values()],
        help="default: %(default)s",
    )
    for name, default in _SIZES.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=f"default: {default}")
    parser.add_argument(
        "--length", type=positive, default=METADATA.seq_len, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--published-sizes",
        action="store_true",
        help="hidden 512, 8 heads, 4 (+ 4) layers of HRM and 2 of TRM, batch 768, or what fits of it",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="default: OMP_NUM_THREADS, else cores")
    parser.set_defaults(processes=1)
    arguments = parse(parser, words)
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
    device = open_device(arguments.device)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        measure(arguments, device)


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    archs = ("hrm", "trm") if arguments.arch == "both" else (arguments.arch,)
    dtypes = tuple(DTYPES) if arguments.dtype == "both" else (arguments.dtype,)
    rows, notes, samples, result = [], [], {}, {"compile_seconds": 0.0}
    for name, dtype in itertools.product(archs, dtypes):
        comparison = Comparison(name, dtype, arguments, device)
        rows += comparison.rows()
        notes += comparison.notes()
        samples |= {f"{comparison.label} {key}": sample for key, sample in comparison.samples.items()}
        result |= comparison.result()
        result["compile_seconds"] += sum(comparison.compile_seconds.values())
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


if __name__ == "__main__":
    main()
