"""Reads what an offline W&B run wrote, by W&B's own `leet inspect`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a `run-*.wandb` file, in order; `type` names the key of their content."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged, row by row."""
    return [record["history"]["item"] for record in records if record["type"] == "history"]
