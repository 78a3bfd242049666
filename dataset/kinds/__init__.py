"""The kinds of puzzles. Each is a module or a package with all code that is specific to the kind."""
