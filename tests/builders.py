"""The dataset builders, run in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest


def refusal_of(main: Callable[[list[str]], None], folder: Path, capsys, *arguments) -> str:
    """The one line in which a builder refuses, without its name; checks that it left nothing behind."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(SystemExit) as exit_of:
        main(["--output-dir", str(folder), *map(str, arguments)])
    assert sorted(folder.parent.rglob("*")) == before
    message = exit_of.value.code  # a text: the interpreter prints it on stderr and exits with 1
    kind = main.__module__.split(".")[2]  # of dataset.kinds.<kind>.build
    start = f"build_{kind}: error: "
    assert message.startswith(start)
    assert "\n" not in message
    assert capsys.readouterr().out == ""
    return message.removeprefix(start)
