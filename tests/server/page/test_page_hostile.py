"""The page when a model, a file or a server sends what is meant to deceive or to block it."""

from typing import Any

import pytest
from browsing import Open, answered, ask, chunk, done, token
from live import Live

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

STATE = "import('/page/state.js')"
HIDDEN = {
    "bidi override": "\u202e", "isolate": "\u2066", "mark": "\u200f", "zero width": "\u200b", "joiner": "\u200d",
    "byte order mark": "\ufeff", "soft hyphen": "\xad", "tag": "\U000e0041", "selector": "\U000e0101",
    "escape": "\x1b", "filler": "\u3164",
}  # fmt: skip


def test_characters_that_cannot_be_seen_are_written_out(quiet: Live, opened: Open) -> None:
    """The answer has origins of its tokens, or has none."""
    text = "".join(f"a{character}b\n" for character in HIDDEN.values())
    wanted = " ".join(f"a[U+{ord(character):04X}]b" for character in HIDDEN.values())
    page = opened(quiet)
    for tokens in ({}, {"rest_local": {"tokens": [token(text[:5]), token(text[5:], file="x\u202ey")]}}):
        answered(page, [chunk({"content": text}, **tokens)])
        page.locator("#message").fill("my\u202eown")
        page.keyboard.press("Enter")
        done(page)
        expect(page.locator("#chat article .text").last).to_have_text(wanted)
        expect(page.locator("#chat .asked").last).to_have_text("my[U+202E]own")
        assert not set(page.locator("body").inner_text()) & set(HIDDEN.values())
    expect(page.locator("#title")).to_have_value("my[U+202E]own")
    expect(page.locator("#conversations .name")).to_have_text("my[U+202E]own")
    assert "\u202e" not in page.title()
    page.locator("mark").last.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("x[U+202E]y:1")
    assert not set(page.locator("body").inner_text()) & set(HIDDEN.values())


def test_joiners_that_mean_something_stay(quiet: Live, opened: Open) -> None:
    """They may be tokens of their own or not."""
    page = opened(quiet)
    text = "👨‍👩‍👧 👩🏽‍💻 ❤️‍🔥 می‌خواهم क्‍ष"
    for count, parts in enumerate((text, text.split(" ")), 1):
        tokens = [token(part if len(parts) > 5 else f"{part} ") for part in parts]
        answered(page, [chunk({"content": text}, rest_local={"tokens": tokens})])
        ask(page, "hello")
        expect(page.locator("#chat article .text")).to_have_text([text] * count)
        done(page)


def test_only_addresses_of_the_web_are_links(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    text = (
        "[a](javascript:alert(1)) data:text/html,x file:///etc/passwd ftp://example.org vbscript:x JAVASCRIPT:x\n"
        "<a href='https://x.example/1'>b</a> [c](https://example.org/2) `https://example.org/code` //example.org\n"
        "https://example.org/3?q=(1)&b=2, http://user:pass@example.org:99/4. https:// https://\u202eexample.org\n"
    )
    answered(page, [chunk({"content": text}, rest_local={"tokens": [token(text)]})])
    ask(page, "hello")
    done(page)
    found = page.locator("#chat article a").evaluate_all(
        "all => all.map(a => [a.textContent, a.getAttribute('href'), a.rel, a.target])"
    )
    links = (
        "https://x.example/1",
        "https://example.org/2",
        "https://example.org/3?q=",
        "http://user:pass@example.org:99/4",
    )
    assert found == [[link, link, "noopener noreferrer", "_blank"] for link in links]
    page.unroute_all()
    parts = ["See https", "://exam", "ple.org", "/a_b_c", "/x. And"]
    answered(page, [chunk({"content": "".join(parts)}, rest_local={"tokens": [token(part) for part in parts]})])
    ask(page, "and of several tokens?")
    done(page)
    one = page.locator("#chat article").last.locator("mark > a")
    assert {link.get_attribute("href") for link in one.all()} == {"https://example.org/a_b_c/x"}
    assert "".join(one.all_inner_texts()) == "https://example.org/a_b_c/x"


@pytest.mark.parametrize("many", [True, False], ids=["tokens", "one part"])
def test_a_giant_line_is_shown_in_part_and_copied_whole(quiet: Live, opened: Open, many: bool) -> None:
    """It may begin with anything and come in one part or many. 20 000 characters of a line are shown."""
    page = opened(quiet)
    answer, copy = page.locator("#chat article .text"), page.get_by_role("button", name="Copy this answer")
    for begin in ("```\n", "| a | ", "> **")[: 3 if many else 1]:
        page.get_by_role("button", name="New conversation").click()
        text = f"{begin}{'word* `x ' * 10_000}\nthe end"
        parts = [text[at : at + 200] for at in range(0, len(text), 200)] if many else [text]
        answered(page, [chunk({"content": part}, rest_local={"tokens": [token(part)]}) for part in parts])
        ask(page, "hello")
        done(page)
        expect(answer).to_contain_text("more in this line")
        expect(answer).to_contain_text("the end")
        assert len(answer.text_content()) < 25_000
        assert answer.locator("*").count() < 10_000
        copy.click()
        expect(copy).to_have_attribute("data-says", "Copied")
        assert page.evaluate("navigator.clipboard.readText()") == text
        page.unroute_all()
    page.reload()
    expect(answer).to_contain_text("more in this line")
    assert page.evaluate(f"{STATE}.then(({{ state }}) => state.talk.messages.length)") == 2


def test_a_giant_message_and_a_giant_answer_are_shown_in_part(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    text = "a line of an answer that does not end\n" * 6_000
    answered(page, [chunk({"content": text})])
    page.locator("#message").fill("y" * 30_000)
    page.keyboard.press("Enter")
    done(page)
    expect(page.locator("#chat .asked")).to_contain_text("which the model gets too")
    assert len(page.locator("#chat .asked").text_content()) < 21_000
    expect(page.locator("#chat article")).to_contain_text("more are not shown")
    assert len(page.locator("#chat article .text").text_content()) < 210_000
    assert page.evaluate(f"{STATE}.then(({{ state }}) => state.talk.messages.at(-1).content.length)") == len(text)


def test_names_of_others_are_only_text(quiet: Live, opened: Open) -> None:
    markup = "<img src=x onerror=alert(1)>\u202e"
    page = opened(quiet)
    rows = [{"id": "one"}, {"id": markup}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": rows}))
    stores = [{"name": markup, "open": True, "tokens": 5}]
    page.route("**/datastores*", lambda route: route.fulfill(json={"data": stores}))
    page.evaluate("import('/page/server.js').then(({ connect }) => connect())")
    expect(page.locator("#model-choice option")).to_have_text(["one", "<img src=x onerror=alert(1)>[U+202E]"])
    expect(page.locator("#datastores label")).to_contain_text("onerror=alert(1)>[U+202E]")
    tokens = [token(markup, source="__proto__", file=markup)]
    answered(page, [chunk({"content": markup}, model=markup, rest_local={"tokens": tokens})])
    page.locator("#message").focus()
    ask(page, markup)
    done(page)
    expect(page.locator("#chat article .text")).to_have_text("<img src=x onerror=alert(1)>[U+202E]")
    assert page.locator("img").count() == 0


def test_an_error_of_the_server_is_only_text(quiet: Live, opened: Open) -> None:
    page = opened(quiet, but="status of 400")
    error: dict[str, Any] = {"error": {"message": "<b>wrong</b>\u202e" + "x" * 5000, "code": "invalid"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    ask(page, "hello")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("<b>wrong</b>[U+202E]xxx")
    assert len(alert.text_content()) < 1100
