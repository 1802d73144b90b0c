"""What stands around the text: the progress of a prompt, statistics that fold away."""

import re
from typing import Any

import pytest
from browsing import Open, ask, done
from live import Live

from rest_local.decoding.results import Timings
from rest_local.decoding.stream import Piece, Progress

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


# ---- The progress of a prompt ------------------------------------------------------------------------------------


def read(stream: Any, processed: int, elapsed_ms: float) -> None:
    """Report a prompt of 5 000 tokens, of which 1 000 were there before."""
    progress = Progress(5000, processed, elapsed_ms, Timings(cached_tokens=1000))
    stream._pieces.append(Piece("", (), (), progress=progress))
    stream._wake(False)


def test_a_long_prompt_shows_how_far_it_is_read(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    status, bar = page.locator("#status"), page.get_by_role("progressbar")
    for number, mode in enumerate(("chat", "complete", "infill")):
        page.locator(f"#tab-{mode}").click()
        page.locator(f"#{mode} textarea").first.fill("hello")
        page.locator(f"#{mode} .send").click()
        expect(status).to_have_text("Waiting for the first token")
        stream = quiet.service.stream(number)
        assert stream.request.progress
        read(stream, 1000, 0.0)
        expect(status).to_have_text("Reading the prompt: 1,000 of 5,000 tokens")
        read(stream, 3000, 4000.0)
        expect(status).to_have_text("Reading the prompt: 3,000 of 5,000 tokens, about 4 s left")
        expect(bar).to_be_visible()
        assert bar.evaluate("each => each.position") == 0.6
        stream.give("text")
        expect(status).to_have_text("Answering")
        expect(bar).to_have_count(0)
        stream.end()
        done(page)


def test_only_what_takes_long_is_said_of_a_prompt(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    state = """async progress => {
      const { Answer, CHAT, stateOf } = await import("/page/answer.js");
      return stateOf(Object.assign(new Answer({ path: CHAT, body: {} }), { progress }));
    }"""
    for progress, said in (
        ({"total": 5000, "cache": 4701, "processed": 4800, "time_ms": 9000}, "Waiting for the first token"),
        ({"total": 299, "cache": 0, "processed": 100, "time_ms": 9}, "Waiting for the first token"),
        ({"total": 5000, "cache": 0, "processed": 0, "time_ms": 0}, "Reading the prompt: 0 of 5,000 tokens"),
        ({"total": 5000, "cache": 0, "processed": 500, "time_ms": 900}, "Reading the prompt: 500 of 5,000 tokens"),
        (
            {"total": 5000, "cache": 1000, "processed": 2000, "time_ms": 20_000},
            "Reading the prompt: 2,000 of 5,000 tokens, about 60 s left",
        ),
        ({"total": 5000, "cache": 0, "processed": 5000, "time_ms": 9000}, "Reading the prompt: 5,000 of 5,000 tokens"),
    ):
        assert page.evaluate(state, progress) == said


# ---- Statistics --------------------------------------------------------------------------------------------------


def test_statistics_and_settings_fold_away_and_stay_folded(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    switch, side = page.get_by_role("button", name="Settings and statistics"), page.locator("#side")
    width = "document.querySelector('.work').clientWidth"
    narrow = page.evaluate(width)
    expect(switch).to_have_attribute("aria-expanded", "true")
    switch.click()
    expect(side).to_be_hidden()
    expect(switch).to_have_attribute("aria-expanded", "false")
    assert page.evaluate(width) > narrow + 250, "the text has the room"
    page.reload()
    expect(side).to_be_hidden()
    expect(switch).to_have_attribute("aria-expanded", "false")
    page.locator("#message").focus()
    ask(page, "hello")
    stream = quiet.service.stream()
    for text in ("one", " two"):
        stream.give(text)
        expect(page.locator("#chat article .text")).to_contain_text(text)
    expect(page.locator("#live")).to_contain_text("tokens/s")
    expect(page.locator("#live")).to_be_visible()
    stream.end()
    done(page)
    page.keyboard.press("Alt+Shift+KeyS")
    expect(page.locator("#system")).to_be_focused()
    page.get_by_text("Newest answer", exact=True).click()
    expect(page.locator("#chart")).to_be_hidden()
    page.wait_for_function("() => localStorage.getItem('rest-local-statistics') === 'folded'")  # the event comes later
    page.reload()
    expect(page.locator("#temperature")).to_be_visible()
    expect(page.locator("#chart")).to_be_hidden()
    page.locator("#message").focus()
    ask(page, "hello")
    quiet.service.say("text", number=1)
    done(page)
    page.get_by_text("Newest answer", exact=True).click()
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("^1 step,"))
    bars = """() => {
      const chart = document.getElementById("chart"), { width, height } = chart, brush = chart.getContext("2d");
      return [...brush.getImageData(0, 0, width, height).data].some(Boolean);
    }"""
    expect(page.locator("#chart")).to_be_visible()
    assert page.evaluate(
        f"new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame)).then({bars})"
    )


# ---- The text field ----------------------------------------------------------------------------------------------


def test_one_visible_button_attaches_text_and_images(quiet: Live, opened: Open) -> None:
    page = opened(quiet, width=360, height=740)
    with page.expect_file_chooser() as waiting:
        page.get_by_role("button", name="Attach files or images").click()
    assert waiting.value.is_multiple()
    waiting.value.set_files([{"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"}])
    expect(page.locator("#attached li")).to_contain_text("a.txt")
    expect(page.get_by_label("Message", exact=True)).to_have_attribute("placeholder", "Message")
    seen = [each for each in page.get_by_text("Message", exact=True).all() if each.bounding_box()["width"] > 1]
    assert seen == [], "the placeholder is enough"
