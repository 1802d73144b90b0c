"""Fixtures and helpers for tests of the page in a real browser. They skip where no browser is installed."""

from __future__ import annotations

import json
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
    """`opened(live, width=360)`: the page; `beside=page`: in another tab of the same browser;
    `script`: run before those of the page. At the end: the browser logged no error but the one that the test
    provokes (`but="status of 401"`), and sent no request to another server."""
    pages: list[tuple[Live, Any, list[str], list[str], str]] = []

    def start(
        live: Live,
        *,
        width: int = 1200,
        height: int = 800,
        but: str = "",
        script: str = "",
        beside: Any = None,
        **options: Any,
    ) -> Any:
        context = (
            beside.context if beside else browser.new_context(viewport={"width": width, "height": height}, **options)
        )
        page = context.new_page()
        if script:
            page.add_init_script(script)
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
    for _, page, *_ in pages:
        if not page.is_closed():
            page.unroute_all(behavior="wait")  # an answer that a test replaces may still be on its way
    for live, page, errors, asked, but in pages:
        page.context.close()
        assert [error for error in errors if not but or but not in error] == []
        assert [url for url in asked if not url.startswith((f"{live.url}/", "data:", f"blob:{live.url}/"))] == []


def done(page: Any) -> None:
    """Waits until an answer has ended by itself."""
    from playwright.sync_api import expect

    expect(page.locator("#spoken p").last).to_have_text("Done")
    expect(page.locator("#status")).to_have_text("")


def answered(page: Any, chunks: list[dict[str, Any]]) -> None:
    """Answers every chat request of the page with these events."""
    lines = [json.dumps(each) for each in (*chunks, chunk({}, "stop"))]
    body = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """An event of a chat."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more}


def token(text: str, source: str = "datastore", **more: Any) -> dict[str, Any]:
    """A token of `rest_local.tokens`."""
    return {
        "text": text,
        "token": 1,
        "source": source,
        "file": "a.py",
        "line": 1,
        "match": 2,
        "probability": 0.5,
    } | more


def ask(page: Any, text: str) -> None:
    """Type a message and send it with the keyboard; the message field has the focus."""
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type(text)
    page.keyboard.press("Enter")
