"""Helpers that import nothing of ours: environment, files, downloads, command lines, the log of metrics."""
