"""A redesign computes what the tree before it computed.

    TRACE_FILE=/tmp/trace.json pytest tests/test_trace.py [-k diloco]

records the cases that the file lacks, in one process, and compares the others. Without it, one case is
recorded, and compared with a trace that differs.
"""

import json
import os
from pathlib import Path

import pytest

from tests.trace import CASES, record_trace, write_data

_FILE = os.environ.get("TRACE_FILE")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("trace"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES if _FILE else ["hrm deferred"])
def test_the_trace_is_the_recorded_one(name, data, tmp_path):
    path, trace = Path(_FILE or tmp_path / "trace.json"), record_trace(name, data=data, folder=tmp_path)
    assert trace["metrics"][-1]["step"] >= 20
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if name in recorded:
        assert _differences(trace, recorded[name]) == []
    else:
        path.write_text(json.dumps({**recorded, name: trace}, indent=1))
    if not _FILE:
        loss = trace["metrics"][3].pop("train/lm_loss")
        recorded = json.loads(path.read_text())[name]
        assert _differences(trace, recorded) == [f"/metrics/3/train/lm_loss: None, was {loss}"]


def _differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """Lists what is not equal, as '<path>: <ours>, was <theirs>'."""
    ours, theirs = dict(_leaves(json.loads(json.dumps(ours)))), dict(_leaves(theirs))
    names = sorted(ours.keys() | theirs.keys())
    return [
        f"{name}: {ours.get(name)}, was {theirs.get(name)}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _leaves(value: object, path: str = ""):
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, each in entries:
        yield from _leaves(each, f"{path}/{key}")
    if not isinstance(value, dict | list):
        yield path, value
