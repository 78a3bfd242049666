"""The kinds of puzzles, a module or a package each, with all that differs between kinds."""
