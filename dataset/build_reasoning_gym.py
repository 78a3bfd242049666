"""Builds a dataset from reasoning-gym (dataset/kinds/pairs/reasoning_gym.py); --help lists the options."""

from dataset.kinds.pairs.reasoning_gym import main

if __name__ == "__main__":
    main()
