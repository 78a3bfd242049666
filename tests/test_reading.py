"""What strangers wrote is bounded before it is used; what is written is there whole, or as it was."""

import os
import re
import stat
from pathlib import Path

import pytest

from runtime.reading import parse_json, read_bytes, read_json, read_text, read_yaml
from runtime.writing import open_to_append, remove_unfinished_files, replace_file, write_json, write_text
from tests.ranks import REPOSITORY

_NO_VALUES = ("!!bool maybe", "!!int ''", "!!timestamp soon", "!!map [1]")  # which do not fit their tags


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_json, b"", "not valid JSON"),
        (read_json, b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (read_json, b'{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice"),
        (read_json, b"[" * 41 + b"]" * 41, "levels"),
        (read_json, b"[" * 1_000_000, "not valid JSON"),
        (read_json, b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "not valid JSON"),
        (read_json, b"1" * 5000, "not valid JSON"),
        (read_json, b'{"a": [1, %d]}' % (2**64 + 1), "a has a number of more than 64 bits"),
        (read_json, b"\xff\xfe", "not valid JSON"),
        (read_yaml, b"a: &a [1, 2]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases"),
        (read_yaml, b"a: 1\nb: 2\na: 3\n", "the key 'a' occurs twice"),
        (read_yaml, b"a: {b: 1, b: 2}\n", "the key 'b' occurs twice"),
        (read_yaml, b"a: " + b"[" * 41 + b"]" * 41, "levels"),
        (read_yaml, b"a: " + b"[" * 20_000, "not valid YAML"),
        (read_yaml, b"? [1, 2]\n: 3\n", "not valid YAML"),
        (read_yaml, b"a: !!python/object/apply:os.system ['echo']", "not valid YAML"),
        *((read_yaml, f"a: {value}\n".encode(), "not valid YAML") for value in _NO_VALUES),
        (read_yaml, b"- 1\n", "does not contain a config"),
        (read_yaml, b"a: 1\n" + b" " * 2**18, "too large for such a file"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(tmp_path, read, content, message):
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{message}") as refused:
        read(path)
    assert len(str(refused.value).splitlines()) == 1


def test_what_is_right_is_read(tmp_path):
    path = tmp_path / "given"
    path.write_bytes('\ufeff{"a": [1, "\u00e9"]}'.encode())
    assert read_json(path) == {"a": [1, "\u00e9"]}
    assert parse_json("[" * 40 + "]" * 40, where="here")
    path.write_text("a: 1\nb: {c: [x, 2.5, null]}\n")
    assert read_yaml(path) == {"a": 1, "b": {"c": ["x", 2.5, None]}}


def test_only_regular_files_of_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    for name, message in {
        "fifo": "not a regular file",
        ".": "is a folder",
        "none": "is missing",
        "large/in": "is missing",
        "large": "too large",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_bytes(tmp_path / name)
    with pytest.raises(ValueError, match="too large"):
        read_bytes(Path("/proc/cpuinfo"), most=10)  # whose size the system does not know
    (tmp_path / "text").write_text("1234567890")
    assert read_text(tmp_path / "text", most=10) == "1234567890"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_text(path, "first")
    with pytest.raises(TypeError), replace_file(path) as file:
        file.write(b"second")
    assert path.read_text() == "first"
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_umask_says_who_may_read(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "")
        open_to_append(tmp_path / "log").close()
    finally:
        os.umask(before)
    for name in ("file", "log"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_what_a_kill_left_is_removed(tmp_path):
    child = os.fork()
    if child == 0:
        with replace_file(tmp_path / "file"):
            os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    remove_unfinished_files(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_text_file_has_the_encoding_of_the_system():
    """It may be another one than UTF-8. Rule PLW1514 of ruff finds only a third of such calls."""
    opens = r"(?:\.(?:read|write)_text|(?<![\w.])open|(?<!os)(?<!tarfile)\.open)\("
    packages = [path.parent for path in REPOSITORY.glob("*/__init__.py") if path.parent.name != "tests"]
    paths = [*REPOSITORY.glob("*.py"), *(path for folder in packages for path in folder.rglob("*.py"))]
    found = []
    for path in paths:
        calls = re.findall(rf"{opens}(?![^()]*(?:encoding=|\wb\")).*", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(REPOSITORY)}: {call}" for call in calls]
    assert [each for each in found if "open(os.open(path, _FLAGS | os.O_APPEND" not in each] == []
