"""Names and paths on the command line: quoting for Hydra, and ~ and $NAME in paths.

Without quotes, Hydra's grammar would read 1234_51 as a number, and reject data/lr=3.
"""

import os
import re
import sys
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

import pydantic

_ITEM = re.compile(r"""\s*("(?:\\.|[^"])*"|'(?:\\.|[^'])*'|[^,]+?)\s*(?:,|$)""")
_QUOTED = re.compile(r"""(['"])(\\.|(?!\1).)*\1""", re.DOTALL)
_HOME = re.compile(r"(~[\w.-]*|\$\w+)(?=/|$)")
_CONTAINERS = (list, typing.Union, types.UnionType)


def text_keys(schema: type[pydantic.BaseModel]) -> set[str]:
    """Returns the keys of a config class that allow only texts, lists of texts, and None."""
    of_text, fields = {str, type(None)}, schema.model_fields.items()
    return {name for name, field in fields if _leaves(field.annotation) <= of_text}


def quoted(text: str) -> str:
    """Puts a text in single quotes, with escapes as needed, so that Hydra reads it unchanged."""
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), text) + "'"


def quote_value(typed: str) -> str:
    """Quotes the value of a text key on the command line, so that Hydra reads it as text, even 5 or true.

    In a list, quotes each item: "[a,5]" becomes "['a','5']". `null` and values in quotes stay unchanged.
    """
    if typed.startswith("[") and typed.endswith("]"):
        return f"[{','.join(map(quote_value, _ITEM.findall(typed[1:-1])))}]"
    return typed if typed == "null" or _QUOTED.fullmatch(typed) else quoted(typed)


def check_encoding(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError:
        names = [name for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)]
        locale = f"{names[0]}={os.environ[names[0]]}" if names else "LANG is not set"
        encoding = sys.getfilesystemencoding()
        raise ValueError(
            f"cannot read {argument!r} in the encoding {encoding} of the locale ({locale}). "
            "Set LC_ALL=C.UTF-8, and write the argument in UTF-8."
        ) from None


def expand_home(key: str, value: Any) -> Any:
    """Returns a path with ~ or ~USER replaced by a home directory, or $NAME by an environment variable.

    Only the start of the path is replaced. Raises ValueError if the user or the environment variable does not
    exist.

    key: Config key of the path, for the message. value: Path, a list of values, or a dict of values, such as
    a stage of the curriculum. Other values are returned unchanged.
    """
    if isinstance(value, dict):
        return {name: expand_home(f"{key}: {name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_home(key, item) for item in value]
    found = _HOME.match(value) if isinstance(value, str) else None
    if found is None:
        return value
    name = found[0]
    expanded = os.path.expanduser(name) if name[0] == "~" else os.environ.get(name[1:], name)
    if expanded == name:
        what = f"user {name[1:]}" if name[0] == "~" else f"environment variable {name[1:]}"
        raise ValueError(f"{key}={value}: {what} does not exist. For a folder of that name, set ./{value}.")
    return expanded + value[len(name) :]


def _leaves(annotation: Any) -> set[Any]:
    # Example: {str, NoneType} for `list[str] | None`.
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _leaves(members[0])
    inner: Iterable[Any] = members if origin in _CONTAINERS else ()
    return set().union(*map(_leaves, inner)) if inner else {annotation}
