"""Fixtures for tests of the whole system: a browser and emulated machines. Some machines have neither."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.system.machines import Machines, emulate

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class Visit:
    """A page in a browser, and what it requested and reported.

    Attributes:
        page: playwright's Page.
        requests: Addresses that the page requested, except those of its own server or file.
        errors: Console errors and uncaught exceptions.
    """

    def __init__(self, page, own: str):
        self.page, self.requests, self.errors = page, [], []
        page.on("request", lambda request: self._asked(request.url, own))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))

    def _asked(self, url: str, own: str) -> None:
        if not url.startswith((own, "data:", "blob:")):
            self.requests.append(url)


@pytest.fixture
def machines(tmp_path) -> Iterator[Machines]:
    with emulate(2, tmp_path / "machines") as emulated:
        yield emulated


@pytest.fixture(scope="session")
def chromium():
    """The headless Chromium of this machine. Without Chromium or playwright, skips the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if program is None:
        pytest.skip("there is no chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium) -> Iterator[Callable[..., Visit]]:
    """A function (address or file, **options) that opens a page in a new browser context.

    The options are those of playwright's new_context.
    """
    with ExitStack() as opened:

        @contextmanager
        def context(options: dict):
            made = chromium.new_context(**options)
            yield made
            made.close()

        def open_page(where: str | Path, **options) -> Visit:
            url = where.absolute().as_uri() if isinstance(where, Path) else where
            page = opened.enter_context(context(options)).new_page()
            own = url if isinstance(where, Path) else "/".join(url.split("/")[:3])
            visited = Visit(page, own)
            page.goto(url)
            return visited

        yield open_page
