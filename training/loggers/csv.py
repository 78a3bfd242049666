"""Logs a run to metrics.csv, a table with one column for each metric."""

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.metrics_file import read_rows
from runtime.reading import read_lines
from runtime.writing import open_to_append, replace_file
from training.loggers import LoggedRun


class CsvFile:
    """Logger that writes metrics.csv into the run folder, with one column for each metric.

    When the run starts or resumes, the file is first written again from metrics.jsonl. If a metric appears
    for the first time, the complete file is written again with one more column.
    """

    name = "csv"

    def __init__(self, run: LoggedRun):
        self._path = run.folder / "metrics.csv"
        self._write([values for values, _ in read_rows(run.folder)])

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Adds a line to the file. Raises OSError if the disk is full. The line is then not written."""
        row = {"step": step, **metrics}
        if row.keys() <= set(self._columns):
            self._append(row)
        else:
            self._write([*csv.DictReader(read_lines(self._path)), row])

    def close(self, *, has_failed: bool) -> None:
        pass

    def _write(self, rows: list[Mapping[str, Any]]) -> None:
        columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        with replace_file(self._path) as file:
            file.write(_to_text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        self._columns = columns

    def _append(self, row: Mapping[str, Any]) -> None:
        line = _to_text(self._columns, [row]).encode()
        with open_to_append(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _to_text(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


LOGGER = CsvFile
