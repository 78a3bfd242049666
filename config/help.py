"""The text of `--help`: every key with its value and its comment, out of the YAML files."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from config.architecture import architectures
from config.files import FOLDER

_WIDTH = 110
_COMMENT_COLUMN = 40
_KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: (?P<value>[^#]+?))?(?: *# (?P<comment>.*))?")
_COMMANDS = {
    "solve": ("python ", "solve.py"),
    "search": ("python ", "search.py"),
    "page": ("", "python -m share page"),
}  # of programs that are always one process
_NOT_KEYS = ("defaults", "name")  # name: the file's own, chosen by arch=...


def help_text(program: str) -> str:
    """Lists the keys of a program as its YAML groups them, then models and experiments."""
    path = FOLDER / f"{program}.yaml"
    launched, command = _COMMANDS.get(program, ("[torchrun --nproc-per-node N] ", f"{program}.py"))
    lines = [f"{launched}{command} [KEY=VALUE ...]", "", *_wrap(_title(path))]
    lines += _keys_of(path)
    if program == "pretrain":
        for name in architectures():
            file = FOLDER / "arch" / f"{name}.yaml"
            lines += ["", *_wrap(f"arch={name}: {_title(file)}"), *_keys_of(file, prefix="arch.")]
        for name in ("recursive", "tokens", "network"):
            file = FOLDER / "arch" / "shared" / f"{name}.yaml"
            lines += ["", _title(file), *_keys_of(file, prefix="arch.")]
        lines += [
            "",
            "Experiments: their files say the command, the data and the result; any key can be changed",
        ]
        for file in sorted((FOLDER / "experiment").glob("*.yaml")):
            lines += _row(f"experiment={file.stem}", _title(file))
    lines += ["", f"{command} --cfg job KEY=VALUE ... shows all values that a command means."]
    return "\n".join(lines)


def _title(path: Path) -> str:
    """Returns the first comment line of a file."""
    comments = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    return next(comment for comment in comments if not comment.startswith("@package"))


def _keys_of(path: Path, *, prefix: str = "") -> Iterator[str]:
    """Lists the keys of a file with value and comment; a comment on a line of its own is a heading."""
    sections: list[str] = []
    for line in path.read_text().splitlines()[1:]:
        if line.startswith("# "):
            yield from ("", line[2:])
        if not (found := _KEY.fullmatch(line)):
            continue
        del sections[len(found["indent"]) // 2 :]
        sections.append(found["key"])
        if found["value"] and sections[0] not in _NOT_KEYS:
            yield from _row(f"{prefix}{'.'.join(sections)}={found['value']}", found["comment"] or "")


def _row(left: str, right: str) -> list[str]:
    """Lays out two columns; a long first one has a line of its own."""
    lines = _wrap(right, indent=_COMMENT_COLUMN)
    if len(left) + 4 > _COMMENT_COLUMN:
        return [f"  {left}", *lines]
    return [f"  {left}".ljust(_COMMENT_COLUMN) + lines[0].lstrip(), *lines[1:]]


def _wrap(text: str, *, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent) or [""]
