"""How the weights move: rules of the dense weights, the puzzle table, the learning rates of both."""
