"""HTML reports of a run, of a comparison of runs, and of a hyper-parameter search."""
