"""A redesign computes what the tree before it computed.

    TRACE_FILE=/tmp/trace.json pytest tests/test_trace.py

records where the file is not there yet, and compares where it is. Without it, a run is compared with itself.
"""

import json
import os
from pathlib import Path

import pytest

from tests.trace import CASES, record_trace


@pytest.mark.slow
def test_the_trace_is_the_recorded_one(sudoku_folder, tmp_path):
    path = Path(os.environ.get("TRACE_FILE", tmp_path / "trace.json"))
    names = list(CASES) if "TRACE_FILE" in os.environ else ["hrm deferred"] * 2
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        folder.mkdir()
        recorded = json.loads(path.read_text()) if path.exists() else {}
        trace = record_trace(name, data=sudoku_folder, folder=folder)
        assert len(trace["metrics"]) == 20, name
        assert recorded.setdefault(name, trace) == trace, name
        path.write_text(json.dumps(recorded, indent=1))
