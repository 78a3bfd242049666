"""Training of a model: data, state, strategy, step, evaluation, metrics, checkpoints and log of a run."""
