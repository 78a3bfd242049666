"""Changes files at random, as faulty disks, editors and attackers may do."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VICTIM = "victim"  # beside the folder: a file that nothing may write
MARKER = "FUZZ_MARKER"  # the environment variable with the path of a file that only executed bytes make

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", " ", "x", "../../x", "/etc/passwd", "\x00", "\u202e", "1e9", "null"),
    *("${oc.env:HOME}", "${nope}", [], [[]], [None], {}, {"x": 1}, {"name": "x"}, "a\nb", "=", "é" * 999),
    *("\x1b[2J\x9b31m", "`x` <b>$(touch y)</b>", "```\n# x", 10**400, [1] * 50, "x" * 10**6),
)
_SNIPPETS = (
    *"'\"{}[](),:=\\~+@%$#!&*-0\n\t\x00\ufeff\u2028",
    *("${", "${oc.env:HOME}", "!!python/object/apply:os.getcwd []", "null", "nan", "inf", "-1", "1e999"),
    *("999999999999999999999", "--", "../", "???", "<<: *x", "\x1b[2J", "[" * 1000, '{"a":' * 50),
)
_ALIASES = "a: &a [x]\n" + "".join(f"b{n}: &a [{'*a, ' * 9}]\n" for n in range(9))


class _Executed:
    """An object that creates the marker file if it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f'touch "${MARKER}"',)


def mutate_files(folder: Path, draw: random.Random) -> str:
    """Changes one file of a folder. Returns a description of the change."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(files)
    content, name = path.read_bytes(), path.relative_to(folder)
    if draw.random() < 0.03:
        shutil.copy(path, path.with_name(f"{path.stem}_0_of_999999999{path.suffix}"))
        return f"{name}: promised 999999999 times"
    if draw.random() < 0.2:
        return f"{name}: {_replace(folder, path, draw.choice(files).read_bytes(), draw)}"
    changed = _mutate_json(content, draw) if draw.random() < 0.5 else None
    content, what = changed or mutate_bytes(content, draw)
    path.write_bytes(content)
    return f"{name}: {what}"


def _replace(folder: Path, path: Path, other: bytes, draw: random.Random) -> str:
    victim = folder.with_name(VICTIM)
    ways: dict[str, Callable[[], object]] = {
        "no file": lambda: None,
        "a folder": path.mkdir,
        "empty": path.touch,
        "another file": lambda: path.write_bytes(other),
        "a broken link": lambda: path.symlink_to("nowhere"),
        "a link out": lambda: victim.write_bytes(other) and path.symlink_to(victim),
        "a link to zeros": lambda: path.symlink_to("/dev/zero"),
        "a FIFO": lambda: os.mkfifo(path),
        "deep JSON": lambda: path.write_text('{"a": ' * 100_000),
        "aliases": lambda: path.write_text(_ALIASES),
        "a hole": lambda: path.write_bytes(b"") or os.truncate(path, 2**31),
        "a pickle": lambda: path.write_bytes(pickle.dumps(_Executed())),
        "YAML code": lambda: path.write_text(f"x: !!python/object/apply:os.system ['touch \"${MARKER}\"']\n"),
    }
    way = draw.choice(list(ways))
    path.unlink()
    ways[way]()
    return way


def mutate_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Changes a few bytes, or removes the end. Returns (new content, description).

    In half of the cases, the change is in the first 256 bytes, because file headers are there.
    """
    size = len(content)
    begin = draw.randrange(max(1, min(size, 256) if draw.random() < 0.5 else size))
    end = min(size, begin + draw.choice((1, 1, 2, 4, 16, 256)))
    ways = {
        "one bit": (bytes([content[begin] ^ 1 << draw.randrange(8)]) if size else b"\0")
        + content[begin + 1 : end],
        "zeros": bytes(end - begin),
        "ones": b"\xff" * (end - begin),
        "noise": draw.randbytes(end - begin),
        "cut out": b"",
        "twice": content[begin:end] * 2,
        "inserted": draw.choice(_SNIPPETS).encode() + content[begin:end],
        "cut off": None,
    }
    way = draw.choice(list(ways))
    rest = b"" if ways[way] is None else ways[way] + content[end:]
    return content[:begin] + rest, f"{way} at {begin}"


def _mutate_json(content: bytes, draw: random.Random) -> tuple[bytes, str] | None:
    """Replaces, removes or renames one value in JSON or in one of several lines of JSON.

    Returns (new content, description). Returns None if the content is not JSON.
    """
    lines = content.decode(errors="replace").splitlines() if content.count(b"\n") else []
    is_lines = bool(lines) and lines[0].startswith("{") and lines[0].endswith("}")
    number = draw.randrange(len(lines)) if is_lines else 0
    try:
        value, what = _mutate_value(json.loads(lines[number] if is_lines else content), draw)
    except ValueError:
        return None
    text = json.dumps(value)
    if is_lines:
        lines[number] = text
        text = "\n".join(lines) + "\n"
    return text.encode(), f"JSON {what}"


def _mutate_value(value: Any, draw: random.Random) -> tuple[Any, str]:
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.1:
        new = draw.choice(VALUES)
        if draw.random() < 0.01:
            for _ in range(500):  # deep
                new = [new]
        return new, f"{str(value)[:40]!r} -> {str(new)[:40]!r}"
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key, changed = draw.choice(keys), value.copy()
    if draw.random() < 0.1:
        del changed[key]
        return changed, f"without {key}"
    if isinstance(changed, dict) and draw.random() < 0.05:
        changed[draw.choice(("x", "", "__class__", "_target_"))] = changed.pop(key)
        return changed, f"{key} renamed"
    changed[key], what = _mutate_value(value[key], draw)
    return changed, f"{key}: {what}"


def mutate_text(text: str, draw: random.Random) -> str:
    """Changes a text in one position, as an editor could."""
    begin = draw.randrange(len(text) + 1)
    end = min(len(text), begin + draw.choice((0, 1, 1, 2, 8)))
    return text[:begin] + draw.choice((*_SNIPPETS, "", text[end : end + 8], text)) + text[end:]
