"""Builds a dataset from pairs (dataset/kinds/pairs/build.py): python -m dataset.build_pairs --help."""

from dataset.kinds.pairs.build import main

if __name__ == "__main__":
    main()
