"""Benchmark programs. Each times contenders in turns, and prints a table and a line of JSON."""
