"""Datasets of puzzles: building, reading, drawing, and the order in which a run visits them."""

import runtime  # noqa: F401 - the first import, so that Ctrl-C prints one line also while NumPy loads
