"""Builds an ARC dataset (dataset/kinds/arc/build.py): python -m dataset.build_arc --help."""

from dataset.kinds.arc.build import main

if __name__ == "__main__":
    main()
