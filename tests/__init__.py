"""The tests. `tests.ranks` runs functions and programs on several real processes."""
