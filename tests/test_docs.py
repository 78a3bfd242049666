"""README and docs: links resolve, and commands name programs, modules, targets and keys that exist."""

import itertools
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.compose import compose_overrides, parse_overrides
from config.programs import EvaluateConfig, PageConfig, SearchConfig, SolveConfig
from config.schema import PretrainConfig
from tests.own_files import write_plugins
from tests.ranks import REPOSITORY

_MADE = ("checkpoints/", "data/", "outputs/", "mine/")  # by commands, or by the reader
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_OTHERS = [REPOSITORY / name for name in ("CONTRIBUTING.md", "benchmarks/RESULTS.md")]
_OTHERS += sorted((REPOSITORY / "records").glob("*.md"))
_SCHEMAS = {
    "pretrain.py": PretrainConfig,
    "evaluate.py": EvaluateConfig,
    "solve.py": SolveConfig,
    "search.py": SearchConfig,
    "share": PageConfig,
}
_THEIRS = ("http", "torch")  # modules that are not ours
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|make|sbatch|launch/hosts\.sh) \S.*")
_LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|href)="([^"]+)\"""")


def _code_blocks(text: str) -> Iterator[str]:
    """Yields the indented code of a page, a block at a time."""
    for block in re.findall(r"(?:^ {4,}.*\n(?:\n(?= {4}))?)+", text, re.MULTILINE):
        yield block.replace("\\\n", " ")


def commands(path: Path) -> list[str]:
    """Returns the command lines in the code of a page, without comments."""
    lines = [line for block in _code_blocks(path.read_text()) for line in block.splitlines()]
    words = (" ".join(re.sub(r"\s# .*", "", line).split()) for line in lines)
    return [line for line in words if _COMMAND.fullmatch(line)]


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*PAGES, *_OTHERS], ids=lambda path: path.name)
def test_what_is_linked_and_named_exists(path):
    for target in ("".join(groups) for groups in _LINK.findall(path.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target
    names = re.findall(r"`([\w-]+/[\w./-]*\.(?:py|yaml|md|sh|sbatch|svg|jinja))`", path.read_text())
    missing = [name for name in names if not name.startswith(_MADE) and not (REPOSITORY / name).exists()]
    assert not missing


def test_pages_that_code_and_config_name_exist():
    tops = [each for each in REPOSITORY.glob("[a-z]*") if not f"{each.name}/".startswith(_MADE)]
    files = [path for each in tops for path in each.rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".yaml", ".sh", ".jinja")]
    names = {name for path in files for name in re.findall(r"\b(?:docs|records)/\w+\.md", path.read_text())}
    assert names
    assert not [name for name in names if not (REPOSITORY / name).exists()]


def test_no_command_stands_in_two_pages():
    pages = Counter(command for path in PAGES for command in set(commands(path)))
    assert not [command for command, count in pages.items() if count > 1]


def test_commands_fit_on_a_screen_and_there_are_22_pages_at_most():
    texts = [re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL) for path in PAGES]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("    ")]
    assert not [line for line in lines if len(line) > 110]
    assert len(PAGES) <= 1 + 22


def test_the_cache_of_uv_is_where_it_can_be_written(tmp_path):
    for home, is_moved in (("/proc/1", True), (str(tmp_path), False)):
        environment = {"HOME": home, "PATH": os.environ["PATH"]}
        command = ["make", "-pn", "help"]
        said = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        assert ("UV_CACHE_DIR = $(CURDIR)/.venv/cache" in said.stdout) == is_moved


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_name_what_exists(path):
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for command in commands(path):
        words = shlex.split(command)
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[0] == "make":
            assert words[1] in targets, command
        for flag, word in itertools.pairwise(words):
            if flag == "-m" and word.partition(".")[0] not in _THEIRS:
                module = REPOSITORY / word.replace(".", "/")
                assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), command
        for word in words:
            if word.endswith((".py", ".sh", ".sbatch")) and "=" not in word:
                assert (REPOSITORY / word).exists() or f"`{word}`" in text, command  # or the page shows it


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_keys_of_commands_are_real(path, tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    for command in commands(path):
        words = shlex.split(command)
        name = next((word for word in words if word in _SCHEMAS), None)
        if name is None or {"--help", "push", "keep", "open"} & set(words):
            continue
        overrides = [word for word in words[words.index(name) + 1 :] if re.match(r"~?[\w.]+=", word)]
        if name == "search.py":
            own = [word for word in overrides if word.partition("=")[0] in SearchConfig.model_fields]
            compose_overrides(SearchConfig, own)
            overrides = [word for word in overrides if word not in own]
            parsed = parse_overrides(PretrainConfig, overrides)
            overrides = [each.input_line for each in parsed if not each.is_sweep_override()]
            name = "pretrain.py"
        folder = ["--config-dir=mine"] if "--config-dir" in words else []
        compose_overrides(_SCHEMAS[name], [*overrides, *folder])
