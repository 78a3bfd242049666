"""Mutations of files and texts: the accidents of disks and editors, and what somebody means ill writes."""

import json
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARKER = "FUZZ_MARKER"  # the environment variable with the path of a file that only executed bytes make

_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", " ", "x", "../../x", "/etc/passwd", "\x00", "\u202e", "1e9", "null"),
    *("${oc.env:HOME}", "${nope}", [], [[]], [None], {}, {"x": 1}, {"name": "x"}, "a\nb", "=", "é" * 999),
)
_WORDS = (
    *(
        "'",
        '"',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        "=",
        "\\",
        "~",
        "+",
        "@",
        "%",
        "$",
        "#",
        "!",
        "&",
        "*",
    ),
    *("\n", "\t", "\x00", "${", "${oc.env:HOME}", "!!python/object/apply:os.getcwd []", "null", "nan", "inf"),
    *("-1", "0", "1e999", "999999999999999999999", "--", "../", "???", "\ufeff", "\u2028", "- ", "<<: *x"),
)


class _Executed:
    """Makes the marker file where it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f'touch "${MARKER}"',)


def mutate_files(folder: Path, draw: random.Random) -> str:
    """Changes one file of a folder, and says what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(files)
    name = str(path.relative_to(folder))
    if draw.random() < 0.15:
        return f"{name}: {_replace(path, draw.choice(files), draw)}"
    content = path.read_bytes()
    if draw.random() < 0.5 and (changed := _mutate_json(content, draw)) is not None:
        content, what = changed
    else:
        content, what = mutate_bytes(content, draw)
    path.write_bytes(content)
    return f"{name}: {what}"


def _replace(path: Path, other: Path, draw: random.Random) -> str:
    kind = draw.choice(
        ("no file", "a folder", "empty", "another file", "a broken link", "a pickle", "YAML code")
    )
    content = other.read_bytes()
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "another file":
        path.write_bytes(content)
    elif kind == "a broken link":
        path.symlink_to("nowhere")
    elif kind == "a pickle":
        path.write_bytes(pickle.dumps(_Executed()))
    elif kind == "YAML code":
        path.write_text(f"x: !!python/object/apply:os.system ['touch \"${MARKER}\"']\n")
    return kind


def mutate_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Changes a few bytes; the beginning, where the headers are, is hit as often as all the rest."""
    size = len(content)
    begin = draw.randrange(max(1, min(size, 256) if draw.random() < 0.5 else size))
    end = min(size, begin + draw.choice((1, 1, 2, 4, 16, 256)))
    kind = draw.choice(("one bit", "zeros", "ones", "noise", "cut out", "twice", "cut off", "inserted"))
    if kind == "one bit" and size:
        middle = bytes([content[begin] ^ 1 << draw.randrange(8)])
        end = begin + 1
    elif kind == "cut out":
        middle = b""
    elif kind == "twice":
        middle = content[begin:end] * 2
    elif kind == "cut off":
        return content[:begin], f"cut off at {begin}"
    elif kind == "inserted":
        middle, end = draw.choice(_WORDS).encode(), begin
    else:
        middle = {"zeros": bytes(end - begin), "ones": b"\xff" * (end - begin)}.get(kind)
        middle = draw.randbytes(end - begin) if middle is None else middle
    return content[:begin] + middle + content[end:], f"{kind} at {begin}"


def _mutate_json(content: bytes, draw: random.Random) -> tuple[bytes, str] | None:
    """Puts another value, or none, in the place of one in JSON; of JSON lines in one of them."""
    lines = content.decode(errors="replace").splitlines() if content.count(b"\n") else []
    place = (
        draw.randrange(len(lines)) if lines and lines[0].startswith("{") and lines[0].endswith("}") else None
    )
    try:
        value = json.loads(content if place is None else lines[place])
    except ValueError:
        return None
    value, what = _mutate_value(value, draw)
    text = json.dumps(value)
    if place is not None:
        lines[place] = text
        text = "\n".join(lines) + "\n"
    return text.encode(), f"JSON {what}"


def _mutate_value(value: Any, draw: random.Random) -> tuple[Any, str]:
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.1:
        new = [] if draw.random() < 0.02 else draw.choice(_VALUES)
        if isinstance(new, list) and draw.random() < 0.2:
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


def mutate_words(words: Sequence[str], draw: random.Random) -> list[str]:
    """Changes one word of a command line, or leaves it out, or says it twice."""
    words = list(words)
    place = draw.randrange(len(words))
    key, sign, _ = words[place].partition("=")
    changed = {
        "value": lambda: f"{key}{sign}{draw.choice(_VALUES)}",
        "text": lambda: mutate_text(words[place], draw),
        "other": lambda: draw.choice(
            ("--help", "--cfg", "--cfg=job", "-x", "", "=", "==", "a=b=c", "~" + key)
        ),
        "nested": lambda: f"{key}.x{sign}1",
        "list": lambda: f"{key}{sign}" + "[" * draw.choice((1, 2, 50)) + "1",
    }
    words[place] = draw.choice(list(changed.values()))()
    if draw.random() < 0.1:
        words.insert(place, words[place])
    return [word.replace("\x00", "") for word in words]  # no command line can hold it


def mutate_text(text: str, draw: random.Random) -> str:
    """Changes a text at one place, as an editor could."""
    begin = draw.randrange(len(text) + 1)
    end = min(len(text), begin + draw.choice((0, 1, 1, 2, 8)))
    return text[:begin] + draw.choice((*_WORDS, "", text[end : end + 8], text)) + text[end:]
