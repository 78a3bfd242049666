"""Helpers: environment, files, downloads, command lines, plugins, metrics. They import only each other."""
