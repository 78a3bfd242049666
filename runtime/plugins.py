"""Plugins: Python files of the user that add a model, a kind of puzzle, an optimizer or a logger.

The key `plugins` and the option --plugin name the files. A program imports no other file: if a checkpoint, a
dataset or a repository on the Hub names a plugin, the program only shows the name. docs/extend.md has
examples.
"""

import importlib.util
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# {global variable: attributes that it must have}
_PARTS = {"NETWORK": (), "KIND": ("name",), "OPTIMIZER": ("name", "check_options"), "LOGGER": ("name",)}
_loaded: dict[Path, ModuleType] = {}
_has_option = False  # whether the program has the option --plugin. If False, it has the key `plugins`


def load_plugins(paths: Sequence[str]) -> None:
    """Imports plugins, which are Python files of the user. Skips those that are already imported.

    Raises ValueError if a path is not a plugin, or if importing it fails.

    paths: Python files, or folders with an __init__.py.
    """
    for text in paths:
        path = Path(text).resolve()
        if path not in _loaded:
            _loaded[path] = _import(text, path)


def _import(text: str, path: Path) -> ModuleType:
    file = path / "__init__.py" if path.is_dir() else path
    name = f"plugin_{path.stem}"
    if not path.exists():
        raise ValueError(f"plugin {text} does not exist. Check the path.")
    if not file.is_file() or file.suffix != ".py" or not name.isidentifier():
        what = "a Python file or a folder with an __init__.py"
        other = "its name contains a character that is not a letter, a digit or _"
        raise ValueError(f"plugin {text} is not {what}, or {other}. Check the path and the name.")
    if any(module.__name__ == name for module in _loaded.values()):
        raise ValueError(f"plugin {text}: another plugin is called {path.stem} too. Rename one of them.")
    folders = [str(path)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"plugin {text}{_line_of(error, file)}: {type(error).__name__}: {error}") from error
    if not any(part in vars(module) for part in _PARTS):
        raise ValueError(f"plugin {text} defines none of {', '.join(_PARTS)} (docs/extend.md).")
    if ("NETWORK" in vars(module)) != ("Config" in vars(module)):
        raise ValueError(f"plugin {text}: a model needs both NETWORK and Config (docs/extend.md).")
    for part, attributes in _PARTS.items():
        for attribute in attributes if part in vars(module) else ():
            if not hasattr(vars(module)[part], attribute):
                raise ValueError(f"plugin {text}: {part} lacks {attribute}. Add it (docs/extend.md).")
    return module


def _line_of(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def choose_words(*, has_option: bool) -> None:
    """Sets whether `words_to_add` returns the option --plugin or the key `plugins`."""
    global _has_option
    _has_option = has_option


def words_to_add(paths: Sequence[str] = ("FILE",)) -> str:
    """Returns the words of a command line that import plugins, such as "--plugin mine/gru.py"."""
    if _has_option:
        return " ".join(f"--plugin {shlex.quote(path)}" for path in paths)
    key = f"plugins=[{','.join(paths)}]"
    return key if list(paths) == ["FILE"] else shlex.quote(key)


def paths_in(config: Mapping[str, Any]) -> list[str]:
    """Returns the plugins that a config names, also if its key `plugins` is not a list."""
    named = config.get("plugins") or []
    return [str(path) for path in (named if isinstance(named, list) else [named])]


def is_imported(path: str) -> bool:
    return Path(path).resolve() in _loaded


def plugin_paths() -> list[str]:
    return list(map(str, _loaded))


def defined(part: str) -> list[Any]:
    """Returns the values of a global variable, such as "KIND", in all imported plugins that define it."""
    return [vars(module)[part] for module in _loaded.values() if part in vars(module)]


def plugin_of(part: str, value: Any) -> ModuleType | None:
    """Returns the plugin whose global variable `part`, such as "KIND", is the object `value`.

    If there is none, for example for a kind of this repository, returns None.
    """
    return next((module for module in _loaded.values() if vars(module).get(part) is value), None)


def plugin_names(modules: Sequence[ModuleType | None]) -> list[str]:
    """Returns the names of the files or folders of these plugins, such as ["gru.py"]. Skips None."""
    return [path.name for path, module in _loaded.items() if module in modules]


def plugin_files() -> Iterator[tuple[str, Path]]:
    """Yields (name, path) of every Python file of the imported plugins.

    Example: ("plugin_tiles/tiles.py", Path("/home/me/tiles.py")). The name is the same on all machines.
    """
    for path, module in _loaded.items():
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            yield f"{module.__name__}/{file.relative_to(path.parent).as_posix()}", file
