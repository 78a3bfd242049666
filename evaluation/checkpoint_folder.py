"""A checkpoint on disk: its files, which is the newest of a run, and whether it is what was written."""

import json
import re
from pathlib import Path

from dataset.format import sha256_of

WEIGHTS_FILE = "weights.safetensors"
CONFIG_FILE = "config.yaml"
MANIFEST_FILE = "manifest.json"


def step_of(path: Path) -> int | None:
    """N of a path that is named step_<N>, else None."""
    match = re.fullmatch(r"step_(\d+)", path.absolute().name)
    return int(match[1]) if match else None


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    found = [path for path in run_folder.glob("step_*") if step_of(path) is not None]
    return max((path for path in found if (path / MANIFEST_FILE).is_file()), key=step_of, default=None)


def verify_checkpoint(folder: Path) -> None:
    """Reads every file once and compares it with the manifest.

    Raises ValueError, with the word "corrupt", where one differs.
    """
    try:
        files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
        for name, entry in files.items():
            path = folder / Path(name).name  # never outside the folder, whatever the manifest says
            if path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
                raise ValueError(f"{name} differs from the manifest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"checkpoint {folder} is corrupt ({error}): remove it, the one before is used"
        ) from None
