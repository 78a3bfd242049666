"""Benchmark programs. Each compares several implementations, its contenders.

Most programs measure the contenders alternately: A B C, A B C, ... They print a table and a line of JSON.
"""
