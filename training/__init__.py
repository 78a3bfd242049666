"""Training of a model: data, state, step, evaluation, metrics, checkpoints and log of a run."""
