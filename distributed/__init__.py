"""Distributed training: launch, process groups, collectives, sums of gradients, sharding, watchdog, logs."""
