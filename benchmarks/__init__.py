"""Benchmarks, one program each: they time contenders in turns, and print a table and a line of JSON."""
