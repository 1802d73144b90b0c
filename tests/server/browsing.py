"""Fixtures and helpers for tests of the page in a real browser. They skip where no browser is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live import Live

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (  # a browser under test connects only to the server, and needs no privileges
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser with a fresh profile."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    playwright.expect.set_options(timeout=30_000)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, headless=True, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """`opened(live, width=360)`: the page. At the end: the browser logged no error but the one that the test
    provokes (`but="status of 401"`), and sent no request to another server."""
    pages: list[tuple[Live, Any, list[str], list[str], str]] = []

    def start(live: Live, *, width: int = 1200, height: int = 800, but: str = "", **options: Any) -> Any:
        page = browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(live.url)
        pages.append((live, page, errors, asked, but))
        return page

    yield start
    for live, page, errors, asked, but in pages:
        page.context.close()
        assert [error for error in errors if not but or but not in error] == []
        assert [url for url in asked if not url.startswith((f"{live.url}/", "data:"))] == []


@pytest.fixture
def quiet(scripted: Callable[..., Live]) -> Live:
    """A server whose answers the test gives, piece by piece."""
    live = scripted()
    live.service.answer = None
    return live


def ask(page: Any, text: str) -> None:
    """Type a message and send it with the keyboard; the message field has the focus."""
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type(text)
    page.keyboard.press("Enter")
