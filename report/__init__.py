"""Reports as HTML pages: of a run, of several runs compared, and of a hyper-parameter search."""
