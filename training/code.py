"""The version of a run's code: the git commit, and the diff of uncommitted changes."""

import functools
import os
import subprocess

from distributed.launch import NOT_RUN, REPOSITORY
from runtime.plugins import plugin_files

CHANGES = "+changes"  # suffix of the commit if there are uncommitted changes
_MOST_CHARACTERS = 2**20  # maximum size of a recorded diff
_CODE = ("*.py", "*.yaml", *(f":(exclude){folder}" for folder in sorted(NOT_RUN)))


@functools.cache
def git_commit() -> str | None:
    """Returns the hash of the git commit of this repository, such as "30f8c8...".

    Adds "+changes" if the code has uncommitted changes. Without git, returns the environment variable
    CODE_COMMIT, or None if it is not set.
    """
    commit = git("rev-parse", "HEAD").strip()
    return commit + (CHANGES if code_diff() else "") if commit else os.environ.get("CODE_COMMIT") or None


@functools.cache
def code_diff() -> str:
    """Returns the uncommitted changes of the code as a git diff. "" without changes.

    A new file that git does not track is included if it is in a package of this repository, or in the same
    folder as pretrain.py. Plugins are not included. The diff is cut off after 2^20 characters.
    """
    parts = [git("diff", "--no-ext-diff", "HEAD", "--", *_CODE)]
    for name in git("ls-files", "-z", "--others", "--exclude-standard", "--", *_CODE).split("\0"):
        if name and _is_code(name) and sum(map(len, parts)) <= _MOST_CHARACTERS:
            parts.append(git("diff", "--no-ext-diff", "--no-index", "--", "/dev/null", name))
    diff = "".join(parts)
    return diff if len(diff) <= _MOST_CHARACTERS else diff[:_MOST_CHARACTERS] + "\n(cut off here)\n"


def _is_code(name: str) -> bool:
    folder, is_inside, _ = name.partition("/")
    is_imported = (REPOSITORY / folder / "__init__.py").is_file() if is_inside else name.endswith(".py")
    return is_imported and REPOSITORY / name not in {path for _, path in plugin_files()}


def git(*arguments: str) -> str:
    """Runs a git command in this repository, such as git("diff", "HEAD"), and returns its stdout.

    Returns "" if the command cannot run, or takes more than 10 s.
    """
    try:
        options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 10}
        # git refuses a repository of another user, unless the command line declares it as safe.
        command = ["git", "-c", f"safe.directory={REPOSITORY}", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, **options).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
