"""A training of hours on a machine that goes wrong."""
