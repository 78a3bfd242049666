"""Optimizers of the dense weights and of the puzzle embeddings, their averages, and the learning rates."""
