"""The update rules of the dense weights. `optimizer=NAME` selects a file of this folder."""
