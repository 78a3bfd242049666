"""Configs of earlier versions and of the public programs: keys that have another name here."""

from typing import Any

_NEW_NAMES = {"eval_halting": "halting", "eval_raw": "raw", "eval_save_outputs": "save_outputs"}


def rename_override(override: str) -> str:
    """Returns an argument of the command line with the key's present name: eval_raw=true -> raw=true."""
    key, equals, value = override.partition("=")
    return _NEW_NAMES.get(key, key) + equals + value


def rename_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values under their keys' present names; one under an old name wins."""
    renamed = {_NEW_NAMES[key]: value for key, value in values.items() if key in _NEW_NAMES}
    return {key: value for key, value in values.items() if key not in _NEW_NAMES} | renamed
