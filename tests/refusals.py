"""Runs programs with wrong input in the process of a test, and checks the one line of their error message.

The file mistakes.yaml contains wrong inputs, and words that each message must contain.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dataset.build.__main__ import main as build

_TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def cases(section: str, *names: str):
    """Parametrizes a test with the rows of a section of mistakes.yaml.

    The first columns of a row become the parameters `names`. The other columns become the parameter `words`.
    """
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
    """Runs a program that must fail. Returns its error message without "<name>: error: " at the start."""
    with pytest.raises(SystemExit) as exit_of:
        main([str(argument) for argument in arguments])
    message = exit_of.value.code  # a text: the interpreter prints it on stderr and exits with 1
    assert message.startswith(f"{name}: error: ")
    assert "\n" not in message
    return message.removeprefix(f"{name}: error: ")


def refusal_of_builder(kind: str, folder: Path, capsys, *arguments: object) -> str:
    """Runs a builder of datasets that must fail. Returns its error message.

    Raises AssertionError if the builder printed text to stdout or left files behind.
    """
    before = sorted(folder.parent.rglob("*"))
    message = refusal(build, f"build {kind}", kind, "--output-dir", folder, *arguments)
    assert sorted(folder.parent.rglob("*")) == before
    assert capsys.readouterr().out == ""
    return message
