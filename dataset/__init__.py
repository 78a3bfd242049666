"""Datasets of puzzles: building, reading, drawing, and the order in which a run visits them."""
