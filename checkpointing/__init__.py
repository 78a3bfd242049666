"""Checkpoints on disk: write, list, verify and read them. Training and evaluation use this package."""
