"""The code of a run: the commit, and what differs from it here."""

import functools
import os
import subprocess

from parallel.launch import NOT_RUN, REPOSITORY

CHANGES = "+changes"  # behind the commit where the code differs from it
_MOST_BYTES = 2**20  # of a recorded diff
_CODE = ("*.py", "*.yaml", *(f":(exclude){folder}" for folder in sorted(NOT_RUN)))


@functools.cache
def git_commit() -> str | None:
    """Returns the commit of this repository, `<commit>+changes` where the code of runs differs from it.

    Where it is no repository, or there is no git, CODE_COMMIT of the environment (an image has it), or None.
    """
    commit = git("rev-parse", "HEAD").strip()
    return commit + (CHANGES if code_diff() else "") if commit else os.environ.get("CODE_COMMIT") or None


@functools.cache
def code_diff() -> str:
    """Returns the diff from the commit to the code here, with new files, cut off after 1 MiB of text."""
    parts = [git("diff", "--no-ext-diff", "HEAD", "--", *_CODE)]
    for name in git("ls-files", "-z", "--others", "--exclude-standard", "--", *_CODE).split("\0"):
        if name and sum(map(len, parts)) <= _MOST_BYTES:
            parts.append(git("diff", "--no-ext-diff", "--no-index", "--", "/dev/null", name))
    diff = "".join(parts)
    return diff if len(diff) <= _MOST_BYTES else diff[:_MOST_BYTES] + "\n(cut off here)\n"


def git(*words: str) -> str:
    """Returns what git says in this repository; nothing where there is none, or git fails."""
    try:
        options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 10}
        return subprocess.run(["git", *words], cwd=REPOSITORY, **options).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
