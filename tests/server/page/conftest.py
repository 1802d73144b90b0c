"""One browser for all tests of the page. They skip where none is installed.

The tests are a package, at whose end the browser is closed: Playwright leaves a loop of asyncio running in this thread,
and other tests run their own.
"""

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import FRESH, Open, Tabs
from live import Live

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (  # a browser under test connects only to the server, and needs no privileges
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def look_often(patch: pytest.MonkeyPatch) -> None:
    """`expect` looks again every hundredth of a second at first. By itself it would wait up to half a second after
    what it expects is there."""
    from playwright._impl.assertions import LocatorAssertions

    whole = LocatorAssertions._call_expect

    async def call(self: Any, expression: str, options: Any, title: str | None) -> Any:
        for _ in range(50):
            result = await whole(self, expression, {**options, "timeout": 1}, title)
            if result["matches"] != self._is_not:
                return result
            await asyncio.sleep(0.01)
        return await whole(self, expression, options, title)

    patch.setattr(LocatorAssertions, "_call_expect", call)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Yield a headless browser with a fresh profile."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    playwright.expect.set_options(timeout=30_000)
    with pytest.MonkeyPatch.context() as patch, playwright.sync_playwright() as running:
        look_often(patch)
        browser = running.chromium.launch(executable_path=found, headless=True, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def opened(browser: Any, tabs: Tabs) -> Iterator[Open]:
    """Return `opened(live, width=360)`, which opens the page in a new browser, or in a tab of `same_browser`.

    `script` runs before those of the page. At the end the browser must have logged no error but the one that the test
    provokes (`but="status of 401"`), and sent no request to another server.
    """
    pages: list[tuple[Live, Any, dict[str, Any], list[str], list[str], str]] = []

    def start(
        live: Live,
        *,
        width: int = 1200,
        height: int = 800,
        but: str = "",
        script: str = "",
        color_scheme: str = "light",
        same_browser: Any = None,
        **options: Any,
    ) -> Any:
        if script or options:
            page = browser.new_context(**options).new_page()
            page.add_init_script(script)
        else:
            page = tabs.new(same_browser=same_browser is not None)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=color_scheme)
        errors: list[str] = []
        asked: list[str] = []
        listeners = {
            "console": lambda line: errors.append(line.text) if line.type in ("error", "warning") else None,
            "pageerror": lambda error: errors.append(str(error)),
            "dialog": lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()),
            "request": lambda request: asked.append(request.url),
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(f"{live.url}/{FRESH if page == tabs.first else ''}")
        pages.append((live, page, listeners, errors, asked, but))
        return page

    yield start
    for _, page, *_ in pages:
        if not page.is_closed():
            page.unroute_all(behavior="wait")  # an answer that a test replaces may still be on its way
    for _, page, listeners, *_ in reversed(pages):
        if page.context != tabs.context:
            page.context.close()
        elif page != tabs.first:
            page.close()
        elif not page.is_closed():
            for event, listener in listeners.items():
                page.remove_listener(event, listener)
            page.evaluate("stop()")  # a server that stops would wait for its requests
    for live, _, _, errors, asked, but in pages:
        assert [error for error in errors if not but or but not in error] == []
        assert [url for url in asked if not url.startswith((f"{live.url}/", "data:", f"blob:{live.url}/"))] == []
