"""The training step against the public code's: `python -m benchmarks.train_step`."""
