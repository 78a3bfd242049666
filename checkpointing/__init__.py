"""Checkpoints on disk, for training and evaluation alike: names, manifest, verification, writing, reading."""
