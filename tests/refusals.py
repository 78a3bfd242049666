"""The one line in which a program with --options refuses bad input, run in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dataset.build.__main__ import main as build


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
