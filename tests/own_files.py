"""Writes the plugins that docs/extend.md shows to files outside of the repository."""

import re
from pathlib import Path

from tests.ranks import REPOSITORY


def write_plugins(folder: Path) -> Path:
    """Writes each plugin of docs/extend.md into the folder `folder`/mine. Returns the path `folder`/mine."""
    page = (REPOSITORY / "docs" / "extend.md").read_text()
    blocks = re.findall(r"```(?:python|yaml)\n# (mine/\S+)\n(.*?)```", page, re.DOTALL)
    names = "mine/gru.py mine/arch/gru.yaml mine/jigsaw.py mine/lion.py mine/spoken.py"
    assert [name for name, _ in blocks] == names.split()
    for name, text in blocks:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "mine"
