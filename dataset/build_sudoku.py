"""Builds a Sudoku dataset (dataset/kinds/sudoku/build.py): python -m dataset.build_sudoku --help."""

from dataset.kinds.sudoku.build import main

if __name__ == "__main__":
    main()
