"""Helpers: environment, files, downloads, command lines, plugins, metrics. They import only each other.

If Ctrl-C ends a program of this repository, it prints the line "interrupted" instead of a traceback, from the
import of this package on. Its exit status stays 130.
"""

import os
import sys
from pathlib import Path
from types import TracebackType

_REPOSITORY = Path(__file__).resolve().parents[1]
_hook_before = sys.excepthook


def print_interrupted() -> None:
    if os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr)


def _excepthook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "/")  # a notebook has no file
    is_ours = _REPOSITORY in path.resolve().parents or sys.argv[0] == "-m"  # "-m": a package is imported
    if is_ours and issubclass(kind, KeyboardInterrupt):
        print_interrupted()
    else:
        _hook_before(kind, raised, trace)


sys.excepthook = _excepthook
