"""The parts of search.py, the hyper-parameter search: space, trial, study and main loop."""
