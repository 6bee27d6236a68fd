"""One server, one kernel and one browser for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pages import Page
from playwright.sync_api import BrowserContext, expect, sync_playwright
from servers import Server

_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
_SOON_MS = 30_000
"""Longer than the first import of torch takes on a busy machine."""

Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """JupyterLab and Notebook."""
    running = Server()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    """Chromium as the system has it."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None and "CI" not in os.environ:
        pytest.skip("there is no Chromium: apt-get install chromium")
    assert executable, "there is no Chromium: apt-get install chromium"
    expect.set_options(timeout=_SOON_MS)
    with tempfile.TemporaryDirectory(prefix="oomdoctor-browser-") as folder, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder,
            executable_path=executable,
            headless=True,
            args=list(_ARGUMENTS),
            viewport={"width": 1200, "height": 1000},
        )
        context.set_default_timeout(_SOON_MS)
        yield context
        context.close()


@contextmanager
def opening(server: Server, browser: BrowserContext) -> Iterator[Opener]:
    """Open notebooks, given by their cells or whole, and close them at the end."""
    opened: list[Page] = []

    def open_one(name: str, *cells: str, whole: Any = None, trusted: bool = False, **options: Any) -> Page:
        path = server.write(name, whole or cells)
        if trusted:
            server.trust(path)
        opened.append(Page(browser, server, name, **options))
        return opened[-1]

    try:
        yield open_one
    finally:
        for page in opened:
            page.page.close()


@pytest.fixture
def open_notebook(server: Server, browser: BrowserContext) -> Iterator[Opener]:
    """Open a notebook of these cells: ``open_notebook("name", *cells, interface="lab")``."""
    with opening(server, browser) as open_one:
        yield open_one


@pytest.fixture(scope="module")
def open_for_all(server: Server, browser: BrowserContext) -> Iterator[Opener]:
    """Open a notebook that the tests of a module look at in turn."""
    with opening(server, browser) as open_one:
        yield open_one
