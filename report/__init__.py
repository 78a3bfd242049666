"""The report of a run: one page that shows how it learned and how its model thinks; and runs side by side."""
