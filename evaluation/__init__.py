"""Measures how good a model is: passes over a test split, early halting, test-time compute, and results."""
