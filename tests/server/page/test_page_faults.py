"""The page in a real browser when a model writes markup, and when the server cannot or will not answer."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from browsing import Open, answered, ask, chunk, done, token
from live import Live, served
from support.toy import demo_model

from rest_local.decoding.engine import Engine
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def test_what_a_model_says_is_never_markup(quiet: Live, opened: Open) -> None:
    """That holds with and without origins of its tokens."""
    page = opened(quiet)
    more: dict[str, Any]
    for count, more in enumerate(({}, {"rest_local": {"tokens": [token(MARKUP, file=MARKUP)]}}), 1):
        answered(page, [chunk({"content": MARKUP}, **more)])
        page.locator("#message").fill(MARKUP)
        page.keyboard.press("Enter")
        expect(page.locator("#chat article .text")).to_have_text([MARKUP] * count)
        expect(page.locator("#chat .asked")).to_have_text([MARKUP] * count)
        done(page)
    page.locator("mark").hover()
    expect(page.get_by_role("tooltip")).to_contain_text(f"{MARKUP}:1")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1, "the page's own"


def test_text_is_shown_once(quiet: Live, opened: Open) -> None:
    """A step of reasoning and answer is two chunks, of which the first has the tokens of both."""
    page = opened(quiet)
    tokens = [token("<think>so</think>"), token("yes")]
    first = chunk({"reasoning_content": "so"}, rest_local={"tokens": tokens})
    answered(page, [first, chunk({"content": "yes"})])
    ask(page, "hello")
    done(page)
    expect(page.locator("#chat article .text")).to_have_text("<think>so</think>yes")
    expect(page.locator("#withheld")).to_be_hidden()


def test_markup_could_not_run_if_it_got_in(quiet: Live, opened: Open) -> None:
    policy = quiet.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    page = opened(quiet, but="requires 'TrustedHTML' assignment")
    attempt = "text => { try { document.body.innerHTML = text; return 'set' } catch (error) { return error.name } }"
    assert page.evaluate(attempt, MARKUP) == "TypeError"


def test_the_page_waits_for_a_loading_server(opened: Open) -> None:
    ready = threading.Event()

    def load() -> Engine:
        assert ready.wait(60)
        return Engine.load(demo_model(), slots=1)

    serving = Serving(ServerSettings(port=0), "demo", load, drain_seconds=5)
    with served(serving) as live:
        try:
            page = opened(live, but="status of 503")
            expect(page.get_by_role("alert")).to_contain_text("The model is being loaded")
        finally:
            ready.set()
        assert serving.loaded.wait(300)
        expect(page.locator("#model")).to_contain_text("tokens of context")
        expect(page.get_by_role("alert")).to_be_hidden()


def test_a_key_is_requested_and_kept_in_this_tab(scripted: Callable[..., Live], opened: Open) -> None:
    """Other machines reach the server, which withholds its statistics."""
    live = scripted(host="0.0.0.0", keys=(b"right",))
    page = opened(live, but="status of 401", http_credentials={"username": "", "password": "right"})
    page.locator("#key").fill("wrong")
    page.locator("#message").focus()
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("asks for an API key")
    expect(page.locator("#key")).to_be_focused()
    page.locator("#key").fill("right")
    page.locator("#message").focus()
    page.locator("#message").fill("")
    ask(page, "hello")
    expect(page.locator("#chat article .text")).to_have_text("Hello world")
    assert page.evaluate("Object.values(localStorage).join()").count("right") == 0
    assert page.evaluate("sessionStorage['rest-local-key']") == "right"
    expect(page.locator("#withheld")).to_contain_text("--share-statistics")
    expect(page.locator("#chart")).to_be_hidden()


def test_a_model_without_a_template_completes(scripted: Callable[..., Live], opened: Open) -> None:
    live = scripted()
    live.service.forget(None)
    live.service.engine.model.chat_template = None
    page = opened(live)
    expect(page.get_by_role("tab", selected=True)).to_have_text("Complete")
    expect(page.locator("#text")).to_be_focused()
    page.locator("#tab-chat").click()
    expect(page.locator("#no-template")).to_contain_text("no chat template")
    expect(page.locator("#message")).to_be_hidden()
    page.get_by_role("button", name="Go to Complete").click()
    page.locator("#text").fill("a = ")
    page.keyboard.press("Control+Enter")
    live.service.say("1")
    expect(page.locator("#complete article .text")).to_have_text("a = 1")


def test_the_page_reconnects_to_a_server(quiet: Live, opened: Open) -> None:
    page = opened(quiet, but="net::ERR_FAILED")
    expect(page.locator("#model")).to_contain_text("tokens of context")
    page.route("**/*", lambda route: route.abort())
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(page.locator("#message")).to_have_value("hello")
    page.unroute_all()
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_page_that_connects_late_keeps_the_notice(scripted: Callable[..., Live], opened: Open) -> None:
    page = opened(scripted(room=0), but="status of 503")
    expect(page.locator("#model")).to_contain_text("tokens of context")
    held: list[Any] = []
    page.route("**/datastores", lambda route: held.append(route))
    with page.expect_request("**/datastores"):
        page.evaluate("import('/page/server.js').then(({ connect }) => { connected = connect() })")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The server is full")
    held.pop().continue_()
    page.evaluate("connected")
    expect(page.get_by_role("alert")).to_contain_text("The server is full")
