"""The metrics of training: from sums over ranks and steps to the numbers that are logged."""

from models.losses import LOSSES, METRICS

SUMMED = ("count", *METRICS, *LOSSES, "grad_norm")


def training_metrics(sums: dict[str, float], *, steps: int, global_batch_size: int) -> dict[str, float]:
    """Divides losses by all slots of all steps, the gradient norm by steps, the rest by slots that halted.

    A metric that has no data is left out.
    """
    metrics = {name: sums[name] / (steps * global_batch_size) for name in LOSSES if name in sums}
    if "grad_norm" in sums:
        metrics["grad_norm"] = sums["grad_norm"] / steps
    if sums["count"] > 0:
        metrics.update({name: sums[name] / sums["count"] for name in METRICS})
        metrics["count"] = sums["count"]
    return metrics
