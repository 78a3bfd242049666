"""The ladder of records: benchmark tasks (rungs), programs that run them, and their results."""
