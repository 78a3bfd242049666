"""Scripts that start a run on one machine or many, and a check of the machines before a run."""
