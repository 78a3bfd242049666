"""How good a model is: evaluation of a test split, early exit, intervals, and the report."""
