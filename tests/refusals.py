"""The one line in which a program refuses bad input, run in this process, and the table of such lines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dataset.build.__main__ import main as build

_TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def cases(section: str, *names: str):
    """Parametrizes a test by a section: the first columns, then the words that the message must have."""
    rows = [(*row[: len(names)], row[len(names) :]) for row in _TABLE[section]]
    ids = [" ".join(map(str, row))[:60] for row in rows]
    return pytest.mark.parametrize((*names, "words"), rows, ids=ids)


def check(message: str, words: list[str], **known: object) -> None:
    assert "\n" not in message
    for word in words:
        for name, value in known.items():
            word = word.replace(name, str(value))
        assert word in message, message


def refusal(main: Callable[[list[str]], None], name: str, *arguments: object) -> str:
    """The line, without the name of the program that it begins with."""
    with pytest.raises(SystemExit) as exit_of:
        main([str(argument) for argument in arguments])
    message = exit_of.value.code  # a text: the interpreter prints it on stderr and exits with 1
    assert message.startswith(f"{name}: error: ")
    assert "\n" not in message
    return message.removeprefix(f"{name}: error: ")


def refusal_of_builder(kind: str, folder: Path, capsys, *arguments: object) -> str:
    """The line of a builder of datasets; checks that it left nothing behind."""
    before = sorted(folder.parent.rglob("*"))
    message = refusal(build, f"build {kind}", kind, "--output-dir", folder, *arguments)
    assert sorted(folder.parent.rglob("*")) == before
    assert capsys.readouterr().out == ""
    return message
