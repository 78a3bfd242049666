"""Searches hyper-parameters, for search.py: the space, a trial, the study, the loop."""
