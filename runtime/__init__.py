"""Helpers: environment, files, downloads, command lines, plugins, metrics. They import only each other.

After the import of this package, a program of this repository that Ctrl-C ends prints no traceback. Rank 0
prints the line "interrupted" instead. The exit status of the program stays 130.
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
