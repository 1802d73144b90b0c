"""The page in a real browser: input, display, accessibility, stop."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import FAULTS, Open, ask, done
from fake_service import origin
from live import Live, served
from support.toy import demo_model

from rest_local.decoding.engine import Engine
from rest_local.llama.sampling_defaults import SamplingDefaults
from rest_local.retrieval import VocabularyId, build
from rest_local.retrieval.datastore import Datastore
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


@pytest.fixture(scope="module")
def drafting() -> Iterator[Live]:
    """Serve the demo model with a policy that always drafts. `auto` drafts only if that is faster."""
    serving = Serving(
        ServerSettings(port=0), "demo", lambda: Engine.load(demo_model(), slots=2, policy="sam"), drain_seconds=5
    )
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


def pixels(page: Any) -> str:
    found: str = page.evaluate("document.getElementById('chart').toDataURL()")
    return found


def test_a_typed_message_is_answered_in_colours(drafting: Live, opened: Open) -> None:
    page = opened(drafting)
    expect(page.locator("#model")).to_contain_text("demo · 2,048 tokens of context")
    page.locator("#max-tokens").fill("120")
    page.locator("#message").focus()
    ask(page, "Repeat: one two three four, one two three four, one two three four")
    done(page)
    answer = page.locator("#chat article .text")
    tokens = answer.locator("[tabindex]")
    assert tokens.count() > 10
    assert answer.inner_text().strip()
    drafted = answer.locator("mark")
    assert drafted.count() > 0
    own = answer.locator("span.own").first
    colour = "each => getComputedStyle(each).backgroundColor"
    assert drafted.first.evaluate(colour) != own.evaluate(colour)
    expect(page.locator("#speed")).to_have_text(re.compile(r"^[\d,.]+$"))
    expect(page.locator("#mat")).to_have_text(re.compile(r"^[1-9]\d*\.\d\d$"))
    expect(page.locator("#chat article .foot")).to_contain_text("drafted tokens accepted")
    expect(page.locator("#message")).to_be_focused()


def test_only_chosen_datastores_are_drafted_from(scripted: Callable[..., Live], opened: Open, tmp_path: Path) -> None:
    live = scripted()
    paths, vocabulary = [tmp_path / "first", tmp_path / "second"], live.service.engine.model.vocabulary
    for path in paths:
        build(path, [("a.py", vocabulary.tokenize("a = 1\n" * 20))], vocabulary=VocabularyId(*vocabulary.identity))
    live.service.engine.datastores.in_use += [Datastore.open(path) for path in paths]
    page = opened(live)
    page.get_by_label("second").uncheck()
    page.locator("#message").focus()
    ask(page, "hello")
    assert live.service.stream().request.datastores == ("first",)
    done(page)


def test_what_no_setting_says_is_as_the_server_samples(scripted: Callable[..., Live], opened: Open) -> None:
    live = scripted()
    live.service.engine.sampling = SamplingDefaults({"top_k": 7}, {"temperature": 0.25})
    page = opened(live)
    ask(page, "hello")
    done(page)
    page.locator("#temperature").fill("0")
    page.locator("#message").focus()
    ask(page, "hello")
    done(page)
    samplings = [live.service.stream(number).request.sampling for number in (0, 1)]
    assert [(each.temperature, each.top_k) for each in samplings] == [(0.25, 7), (0.0, 7)]


def test_focus_on_a_token_shows_its_source(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    ask(page, "hello")
    stream = quiet.service.stream()
    stream.give("one")
    stream.give("two", "datastore", origin=origin(file="lib/argparse.py", line=812, match=4, probability=0.53))
    stream.give("three", "model", origin=origin(source="model", file=None, line=None, match=0))
    stream.end()
    done(page)
    page.keyboard.press("Alt+Shift+KeyA")
    tip = page.get_by_role("tooltip")
    expect(tip).to_contain_text("the model")
    page.keyboard.press("ArrowDown")
    expect(page.locator("mark.datastore").first).to_be_focused()
    expect(page.locator("mark.datastore").first).to_have_attribute("aria-describedby", "tip")
    for part in (
        "datastore",
        "lib/argparse.py:812",
        "The 4 tokens before it are the same there.",
        "0.53",
        "Step 2 of 3",
    ):
        expect(tip).to_contain_text(part)
    page.keyboard.press("End")
    expect(tip).to_contain_text("draft model")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.locator("mark.datastore").first.hover()
    expect(tip).to_contain_text("lib/argparse.py:812")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(FAULTS) == [], scheme


def test_the_files_that_most_tokens_came_from_are_listed(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    expect(page.locator("#found")).to_be_hidden()
    ask(page, "hello")
    stream = quiet.service.stream()
    for number in range(8):
        for _ in range(number + 1):
            stream.give(" a", "datastore", origin=origin(file=f"lib/{number}\u202e.py"))
    stream.end()
    done(page)
    rows = page.locator("#files li")
    expect(rows).to_have_count(7)
    expect(rows.first).to_have_text("lib/7[U+202E].py8 tokens")
    expect(rows.last).to_have_text("and 2 more files")
    page.reload()
    expect(rows).to_have_count(7)


def test_the_chart_changes_with_every_step(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    chart = page.locator("#chart")
    expect(chart).to_have_attribute("aria-label", "There are no steps yet.")
    seen = {pixels(page)}
    ask(page, "hello")
    stream = quiet.service.stream()
    for steps, (text, source) in enumerate([(" a", "target"), (" b c d", "context"), (" e f", "history")], 1):
        stream.give(text, source, origin=origin(source=source) if steps > 1 else None)
        expect(chart).to_have_attribute("aria-label", re.compile(f"^{steps} step"))
        seen.add(pixels(page))
    assert len(seen) == 4
    expect(page.locator("#mat")).to_have_text("2.00")
    expect(page.locator("#drafted")).to_have_text("83 %")
    expect(page.locator("#legend li", has_text="context")).to_contain_text("50 %")
    stream.end()


def test_stop_ends_the_request_and_frees_its_slot(scripted: Callable[..., Live], opened: Open) -> None:
    live = scripted(room=1, answer=None)
    page = opened(live)
    button, answer = page.get_by_role("button", name="Stop"), page.locator("#chat article .text").last
    for number, stop in enumerate((lambda: page.keyboard.press("Escape"), button.click)):
        ask(page, "hello")
        live.service.stream(number).give(f"begun {number}")
        expect(answer).to_have_text(f"begun {number}")
        stop()
        expect(page.locator("#spoken p").last).to_have_text("Stopped")
        expect(answer).to_have_text(f"begun {number}")
        expect(button).to_be_hidden()
        assert live.service.stream(number).cancelled.wait(30)


def test_the_end_stays_in_view_until_the_user_scrolls_back(quiet: Live, opened: Open) -> None:
    page = opened(quiet, width=360, height=740)
    ask(page, "hello")
    stream = quiet.service.stream()
    stream.give("\na" * 200)
    foot = page.locator("#chat article .foot")
    expect(foot).to_be_in_viewport()
    expect(page.get_by_role("button", name="Stop")).to_be_in_viewport()
    page.locator("#chat article .text").hover()
    page.mouse.wheel(0, -1500)
    expect(foot).not_to_be_in_viewport()
    stream.give("\na" * 10)
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("^420 steps"))
    expect(foot).not_to_be_in_viewport()
    stream.end()


def test_a_gap_is_filled_by_keyboard(drafting: Live, opened: Open) -> None:
    page = opened(drafting)
    page.locator("#max-tokens").fill("40")
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Fill a gap")).to_be_focused()
    expect(page.get_by_role("tab", selected=True)).to_have_text("Fill a gap")
    page.locator("#before").fill("def push(self, item):\n")
    page.locator("#after").fill("\n\ndef pop(self):\n    return 1\n")
    page.keyboard.press("Control+Enter")
    done(page)
    text = page.locator("#infill article .text")
    assert text.locator("[tabindex]").count() > 0
    shown = text.text_content()
    assert shown.startswith("def push(self, item):\n")
    assert shown.endswith("\n\ndef pop(self):\n    return 1\n")
    page.get_by_role("button", name="Add to the text").click()
    assert shown.startswith(page.locator("#before").input_value())
    expect(page.locator("#before")).to_have_value(re.compile("^def push.*\n."))


def test_drafting_is_compared_with_plain_decoding(drafting: Live, opened: Open) -> None:
    page = opened(drafting)
    page.locator("#max-tokens").fill("60")
    page.locator("#tab-complete").click()
    page.locator("#complete").get_by_role("button", name="Try an example").click()
    page.keyboard.press("Control+Enter")
    done(page)
    page.get_by_role("button", name="Run again without drafting").click()
    expect(page.locator(".versus p")).to_have_text(re.compile(r"^Drafting was [\d.]+ times as fast"))
    expect(page.locator(".race span")).to_have_text([re.compile(r"^[\d,.]+ tokens/s$")] * 2)
    assert page.locator(".versus .text [tabindex]").count() > 0
    assert page.locator(".versus mark").count() == 0, "plain decoding drafts nothing"


def test_dark_and_light(quiet: Live, opened: Open) -> None:
    """The page follows the browser."""
    page = opened(quiet, color_scheme="light")
    expect(page.locator("#chart")).to_have_attribute("aria-label", "There are no steps yet.")
    background = "getComputedStyle(document.body).backgroundColor"
    light, drawn = page.evaluate(background), pixels(page)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    page.wait_for_function("drawn => document.getElementById('chart').toDataURL() !== drawn", arg=drawn)
