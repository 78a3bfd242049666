"""How good a model is: passes over a test split, and checkpoints of every origin to judge."""
