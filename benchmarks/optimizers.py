"""Times one update of all dense weights of HRM with 27 M parameters: AdamATan2, and the average of weights.

    python -m benchmarks.optimizers --threads 2
    python -m benchmarks.optimizers --device cuda

Against the loops over parameters, op by op, that public code has where it has no kernel; against torch's own
fused AdamW; and against the traffic: one in-place op that reads and writes as many bytes, which is as fast as
any update can be. (A copy is slower on a CPU, which first reads what it is about to overwrite.)
On CUDA several updates follow one another, as in training their launch is hidden behind the step before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from benchmarks.harness import (
    Sample,
    add_threads,
    benchmark_parser,
    now,
    parse,
    print_report,
    time_rounds,
    timed,
)
from benchmarks.processes import run
from benchmarks.trainee import METADATA, TINY, build_config
from models import build_model
from models.compilation import COMPILER_OPTIONS
from models.network import Network
from optimizers import AdamATan2
from parallel.division import Division
from parallel.flat import FlatParameters
from training.average import EMA

OPTIONS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
RATE = 0.999
_UPDATES = {"cpu": 1, "cuda": 20}  # in a turn
_NUMBERS_MOVED = {"adam_atan2": 7, "ema": 3}  # read or written, for each weight


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("optimizers", description="The dense optimizer and the average.", rounds=30)
    add_threads(parser)
    parser.set_defaults(processes=1)
    run(measure, parse(parser, words))


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    arch = build_config(global_batch_size=1, sizes=TINY if arguments.quick else None).arch
    updates, network = build_updates(arch, device)
    num_weights = count_weights(network)

    begin = now(device)
    updates["adam_atan2", "ours"]()
    compile_seconds = now(device) - begin

    count = _UPDATES[device.type]
    turns = [timed(" ".join(key), _repeated(update, count), device) for key, update in updates.items()]
    seconds = time_rounds(turns, rounds=arguments.rounds, warmup_rounds=3)
    samples = {key: Sample.of(seconds[" ".join(key)] / count) for key in updates}

    def over(first: tuple[str, str], second: tuple[str, str]) -> float:
        return samples[first].median / samples[second].median

    rows = []
    for kind, way in sorted(updates):
        rows.append(
            [
                f"{kind} {way}",
                *samples[kind, way].cells(digits=2),
                f"{over((kind, 'loop'), (kind, way)):.2f}",
                f"{over((kind, way), (kind, 'traffic')):.2f}",
            ]
        )
    print_report(
        "optimizers",
        header=["update", "median ms", "spread ms", "loop / it", "it / traffic"],
        rows=rows,
        notes=[
            f"{num_weights:,} weights in {len(list(network.parameters()))} tensors. "
            f"The first compiled update took {compile_seconds:.1f} s.",
        ],
        result={
            "adam_atan2_over_loop": over(("adam_atan2", "loop"), ("adam_atan2", "ours")),
            "adam_atan2_eager_over_loop": over(("adam_atan2", "loop"), ("adam_atan2", "ours, eager")),
            "adam_atan2_over_traffic": over(("adam_atan2", "ours"), ("adam_atan2", "traffic")),
            "ema_over_loop": over(("ema", "loop"), ("ema", "ours")),
            "ema_over_traffic": over(("ema", "ours"), ("ema", "traffic")),
            "loop_over_traffic": {kind: over((kind, "loop"), (kind, "traffic")) for kind in _NUMBERS_MOVED},
            "compile_seconds": compile_seconds,
        },
        samples={" ".join(key): sample for key, sample in samples.items()},
        arguments=arguments,
    )


def build_updates(
    arch: SimpleNamespace, device: torch.device
) -> tuple[dict[tuple[str, str], Update], Network]:
    """Builds the update of every contender, and of the bare traffic, by (kind, way), each of its own network.

    Returns one of the networks too.
    """
    updates = {}
    for (kind, way), build in WAYS.items():
        torch.manual_seed(0)
        network = build_model(arch, METADATA).network.to(device)
        updates[kind, way] = build(network)
    for kind, count in _NUMBERS_MOVED.items():
        updates[kind, "traffic"] = torch.ones(count * count_weights(network) // 2, device=device).neg_
    return updates, network


def count_weights(network: Network) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# ------------------------------------------------------------------------------------------------ contenders
# Each takes a network that it trains in place, draws gradients, and returns an update.
Update = Callable[[], None]


def build_ours(network: Network, *, compiles: bool = True) -> Update:
    compiler_options = COMPILER_OPTIONS if compiles else None
    flat = FlatParameters(network.named_parameters())
    gradients = draw_gradients(network)
    for name, view in flat.views(flat.gradients).items():
        view.copy_(gradients[name])
    return AdamATan2(Division(flat), **OPTIONS, compiler_options=compiler_options).step


def build_eager(network: Network) -> Update:
    return build_ours(network, compiles=False)


def build_loop(network: Network) -> Update:
    """Takes the ops of adam-atan2-pytorch with the published formula, nothing fused, tensor by tensor."""
    lr, b1, b2 = (OPTIONS[name] for name in ("lr", "beta1", "beta2"))
    weights = [parameter.detach() for parameter in network.parameters()]
    gradients = draw_gradients(network).values()
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    step = 0

    def update() -> None:
        nonlocal step
        step += 1
        for p, g, m, v in zip(weights, gradients, first, second, strict=True):
            p.mul_(1 - lr * OPTIONS["weight_decay"])
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            denominator = v.mul(1 / (1 - b2**step)).sqrt_()
            p.add_(m.clone().atan2_(denominator), alpha=-lr / (1 - b1**step))

    return update


def build_adamw(network: Network) -> Update:
    for parameter, gradient in zip(network.parameters(), draw_gradients(network).values(), strict=True):
        parameter.grad = gradient
    betas = (OPTIONS["beta1"], OPTIONS["beta2"])
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=OPTIONS["lr"],
        betas=betas,
        weight_decay=OPTIONS["weight_decay"],
        fused=True,
    )
    return optimizer.step


def build_ema(network: Network) -> Update:
    ema = EMA(network, FlatParameters(network.named_parameters()), rate=RATE)
    return lambda: ema.update(step=1)


def build_ema_loop(network: Network) -> Update:
    """Makes a new average for each parameter."""
    averages = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}

    @torch.no_grad()
    def update() -> None:
        for name, parameter in network.named_parameters():
            averages[name] = (1 - RATE) * parameter + RATE * averages[name]

    return update


def _repeated(update: Update, count: int) -> Update:
    def updates() -> None:
        for _ in range(count):
            update()

    return updates


WAYS = {
    ("adam_atan2", "ours"): build_ours,
    ("adam_atan2", "ours, eager"): build_eager,
    ("adam_atan2", "loop"): build_loop,
    ("adam_atan2", "fused AdamW"): build_adamw,
    ("ema", "ours"): build_ema,
    ("ema", "loop"): build_ema_loop,
}


def draw_gradients(network: Network) -> dict[str, torch.Tensor]:
    """Draws a gradient for each parameter, by name, the same for every contender."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(parameter.device)
        for name, parameter in network.named_parameters()
    }


if __name__ == "__main__":
    main()
