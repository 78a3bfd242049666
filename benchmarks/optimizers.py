"""Times updates of the dense weights of HRM (27 M parameters) and of their moving average.

    python -m benchmarks.optimizers

Dense weights are all weights except puzzle embeddings. Compared implementations of AdamATan2 and of the
moving average:

    ours     our update
    eager    our AdamATan2 without torch.compile
    loop     one operation after another over the parameters, as the code that the authors of HRM published,
             without its CUDA kernel
    adamw    fused AdamW of torch
    traffic  an in-place operation that reads and writes the same number of bytes: the lower limit

A copy would be slower than `traffic` on a CPU, because a CPU reads memory before it overwrites it. On CUDA,
20 updates are timed together, so that kernel launches overlap as in training. The program first checks that
all variants of AdamATan2 give the same weights.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness import benchmark_parser, cells, measurement, parse, print_report, ratio, run_main
from benchmarks.worlds import TINY, Trainer, World, take_turns

_EMA_RATE = 0.999
_UPDATES = {"cpu": 1, "cuda": 20}  # number of updates that are timed together
_NUMBERS_MOVED = {"adam_atan2": 7, "average": 3}  # numbers read or written per weight
_CONTENDERS = (
    *("adam_atan2 ours", "adam_atan2 eager", "adam_atan2 loop", "adam_atan2 traffic", "adam_atan2 adamw"),
    *("average ours", "average loop", "average traffic"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("optimizers", description="Times updates of the weights.", rounds=30)
    options = parse(parser, argv)
    with World(options, _Updates, options) as world:
        (num_weights,) = world.call("count_weights")
        turns = {contender: (world, contender) for contender in _CONTENDERS}
        times = take_turns(turns, rounds=options.rounds, warmup_rounds=3)
    count = _UPDATES[options.device]
    times = {name: measurement(found.raw_times, repeats=count) for name, found in times.items()}
    rows, result = [], {}
    for name, found in times.items():
        kind = name.partition(" ")[0]
        over = [ratio(times[f"{kind} loop"], found), ratio(found, times[f"{kind} traffic"])]
        rows.append([name, *cells(found, digits=2), *(f"{quotient:.2f}" for quotient in over)])
        if name.endswith("ours"):
            result |= {f"{kind}_speedup_over_loop": over[0], f"{kind}_over_traffic": over[1]}
    print_report(
        "optimizers",
        options,
        header=["update", "median ms", "spread ms", "loop / this", "this / traffic"],
        rows=rows,
        notes=[f"{num_weights:,} weights."],
        result=result,
    )


class _Updates:
    """All compared implementations of the optimizer step and of averaging the weights.

    All implementations start with equal weights and gradients. The benchmark times the functions in the dict
    `turns`, {name of the implementation: function that runs many updates}. An implementation "... traffic"
    only reads and writes as many bytes.
    """

    def __init__(self, device: torch.device, options: argparse.Namespace):
        # In float32 our update moves the parameters; in bfloat16 master weights, which a gather casts later.
        overrides = (*(TINY if options.quick else ()), f"ema={_EMA_RATE}", "lr_warmup_steps=1", "lr=1e-3")
        overrides += ("arch.forward_dtype=float32",)
        trainers = [Trainer(device, *overrides, puzzles=1, compiles=compiles) for compiles in (True, False)]
        parameters = [list(trainer.state.model.parameters()) for trainer in trainers]
        draw = torch.Generator().manual_seed(0)
        for compiled, eager in zip(*parameters, strict=True):
            gradient = torch.randn(compiled.shape, generator=draw).to(device)
            for parameter in (compiled, eager):
                parameter.grad.copy_(gradient)
        self.num_weights = sum(parameter.numel() for parameter in parameters[0])
        self._config = trainers[0].config
        weights = [parameter.detach().clone() for parameter in parameters[0]]
        gradients = [parameter.grad.clone() for parameter in parameters[0]]
        updates = {
            "adam_atan2 ours": trainers[0].update_weights,
            "adam_atan2 eager": trainers[1].update_weights,
            "adam_atan2 loop": self._loop(weights, gradients),
            "adam_atan2 adamw": self._adamw([weight.clone() for weight in weights], gradients),
            "average ours": trainers[0].update_average,
            "average loop": self._average_loop(parameters[1]),
        }
        for name, count in _NUMBERS_MOVED.items():
            updates[f"{name} traffic"] = torch.ones(count * self.num_weights // 2, device=device).neg_
        for _ in range(3):
            for way in ("ours", "eager", "loop"):
                updates[f"adam_atan2 {way}"]()
        for looped, *ours in zip(weights, *parameters, strict=True):
            for parameter in ours:
                torch.testing.assert_close(parameter.detach(), looped, rtol=1e-4, atol=1e-5)
        count = _UPDATES[device.type]
        self.turns = {
            name: lambda update=update: [update() for _ in range(count)] for name, update in updates.items()
        }

    def count_weights(self) -> int:
        return self.num_weights

    def _loop(self, weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], None]:
        config, steps = self._config, itertools.count(1)
        first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))

        def update() -> None:
            step = next(steps)
            for p, g, m, v in zip(weights, gradients, first, second, strict=True):
                p.mul_(1 - config.lr * config.weight_decay)
                m.lerp_(g, 1 - config.beta1)
                v.lerp_(g * g, 1 - config.beta2)
                denominator = v.mul(1 / (1 - config.beta2**step)).sqrt_()
                p.add_(m.clone().atan2_(denominator), alpha=-config.lr / (1 - config.beta1**step))

        return update

    def _adamw(self, weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return torch.optim.AdamW(weights, lr=self._config.lr, fused=True).step

    def _average_loop(self, parameters: list[Tensor]) -> Callable[[], None]:
        averages = [parameter.detach().clone() for parameter in parameters]

        @torch.no_grad()
        def update() -> None:
            for index, parameter in enumerate(parameters):
                averages[index] = (1 - _EMA_RATE) * parameter + _EMA_RATE * averages[index]

        return update


if __name__ == "__main__":
    run_main(main)
