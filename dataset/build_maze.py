"""Builds a maze dataset (dataset/kinds/maze/build.py): python -m dataset.build_maze --help."""

from dataset.kinds.maze.build import main

if __name__ == "__main__":
    main()
