"""Distributed training: launch, process groups, collectives, strategies, sharding, watchdog, logs."""
