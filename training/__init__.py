"""What a training run is made of beside its model: state, step, metrics, checkpoints, log."""
