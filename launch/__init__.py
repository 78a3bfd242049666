"""Scripts that launch a run on many machines, and a check of the machines before a run."""
