"""Learning rate of every step: linear warm-up, then cosine decay to a fraction of the peak."""

import math

from config.schema import PretrainConfig


def scheduled_lr(step: int, *, base: float, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Returns the learning rate of a training step: linear warm-up, then cosine decay.

    The rate rises to `base` at step `warmup_steps`, then falls to base * min_ratio at step `total_steps`.
    """
    if step < warmup_steps:
        return base * step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return base * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def learning_rates(config: PretrainConfig, step: int, *, total_steps: int) -> dict[str, float]:
    """Returns the learning rates of training step `step` (from 1): {"lr": ..., "puzzle_emb_lr": ...}."""
    shape = {"warmup_steps": config.lr_warmup_steps, "min_ratio": config.lr_min_ratio}
    return {
        name: scheduled_lr(step, base=peak, total_steps=total_steps, **shape)
        for name, peak in peak_learning_rates(config).items()
    }


def peak_learning_rates(config: PretrainConfig) -> dict[str, float]:
    """Returns the highest value of each learning rate: {"lr": ..., "puzzle_emb_lr": ...}.

    Each value of the config is multiplied by a factor. With the ratio r = global_batch_size /
    lr_reference_batch_size, config.lr_scaling selects the factor: "none" is 1, "linear" is r (arXiv
    1706.02677), and "sqrt" is the square root of r (for optimizers like Adam, arXiv 2205.10287).
    """
    ratio = config.global_batch_size / config.lr_reference_batch_size
    factor = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[config.lr_scaling]
    return {"lr": config.lr * factor, "puzzle_emb_lr": config.puzzle_emb_lr * factor}
