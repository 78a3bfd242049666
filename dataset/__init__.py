"""Puzzles on disk, and the order in which a run visits them."""
