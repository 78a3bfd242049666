"""The ladder of records: benchmark tasks (rungs), the programs that run them, their records and pages."""
