"""The kinds of puzzles: all that sets Sudokus, mazes and ARC tasks apart, a module or a package each."""
