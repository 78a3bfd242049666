"""The learning rate of every update: linear warm-up, then a cosine down to a fraction of the peak."""

import math


def scheduled_lr(step: int, *, base: float, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """The rate of update `step` = 1, 2, ..., total_steps.

    At the last one it is base * min_ratio, unless all is warm-up.
    """
    if step < warmup_steps:
        return base * step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return base * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)
