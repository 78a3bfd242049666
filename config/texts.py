"""Names and paths: texts as they are typed, on the command line and in YAML files.

YAML and Hydra's grammar would take 1234_51 for a number, and could not read data/lr=3.
"""

import os
import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

import pydantic
import yaml

_ITEM = re.compile(r"""\s*("(?:\\.|[^"])*"|'(?:\\.|[^'])*'|[^,]+?)\s*(?:,|$)""")
_HOME = re.compile(r"(~[\w.-]*|\$\w+)(?=/|$)")
_CONTAINERS = (list, typing.Union, types.UnionType)
_NULL, _STRING = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"


def text_keys(*schemas: type[pydantic.BaseModel]) -> set[str]:
    """Returns the keys with a text as value, or a list of texts."""
    fields = [item for schema in schemas for item in schema.model_fields.items()]
    return {name for name, field in fields if _leaves(field.annotation) <= {str, type(None)}}


def parse_text(typed: str) -> str | list[str] | None:
    """Parses a value as it is typed: a text, perhaps in quotes, [a list] of texts, or null."""
    if typed == "null":
        return None
    if typed.startswith("[") and typed.endswith("]"):
        return [_without_quotes(each) for each in _ITEM.findall(typed[1:-1])]
    return _without_quotes(typed)


def quoted(text: str) -> str:
    """Returns a text as Hydra's grammar has it in quotes."""
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), text) + "'"


def retype(key: str, value: str | list[str] | None) -> str:
    """Writes a text, or a list of texts, as an override of Hydra's grammar."""
    if isinstance(value, list):
        return f"{key}=[{','.join(map(quoted, value))}]"
    return f"{key}=null" if value is None else f"{key}={quoted(value)}"


def expand_home(key: str, value: Any) -> Any:
    """Replaces a leading ~ or $NAME of a path. ValueError where there is no such user or variable."""
    if isinstance(value, list):
        return [expand_home(key, each) for each in value]
    found = _HOME.match(value) if isinstance(value, str) else None
    if found is None:
        return value
    name = found[0]
    expanded = os.path.expanduser(name) if name[0] == "~" else os.environ.get(name[1:], name)
    if expanded == name:
        what = "no such user" if name[0] == "~" else f"the environment has no {name[1:]}"
        raise ValueError(f"{key}={value}: {what}; a folder of that very name is ./{value}")
    return expanded + value[len(name) :]


def quote_texts(document: str, keys: set[str]) -> str:
    """Returns a YAML document with quotes around the values of these keys, at any level."""
    root = yaml.compose(document, yaml.SafeLoader)
    if root is None:
        return document
    nodes = [root]
    while nodes:
        node = nodes.pop()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in keys:
                for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(each, yaml.ScalarNode) and each.tag != _NULL:
                        each.tag, each.style = _STRING, "'"
            nodes.append(value)
        nodes += node.value if isinstance(node, yaml.SequenceNode) else ()
    return yaml.serialize(root, allow_unicode=True)


def _without_quotes(text: str) -> str:
    """Reads a text that may be in quotes, with \\ before quotes inside."""
    found = re.fullmatch(r"""(['"])((?:\\.|(?!\1).)*)\1""", text)
    return text if found is None else re.sub(r"(\\+)(['\"]|$)", _half_of_escapes, found[2])


def _half_of_escapes(end: re.Match[str]) -> str:
    return end[1][: len(end[1]) // 2] + end[2]


def _leaves(annotation: Any) -> set[Any]:
    """Returns the types in a type, without the containers around them."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _leaves(members[0])
    inner: Iterable[Any] = members if origin in _CONTAINERS else ()
    return set().union(*map(_leaves, inner)) if inner else {annotation}
