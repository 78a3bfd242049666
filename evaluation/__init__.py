"""How good a model is: passes over a test split, early exit, test-time compute, intervals, and results."""
