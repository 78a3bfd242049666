"""Records: the rungs of a ladder, run by the real programs over several seeds, written down, and shown."""
