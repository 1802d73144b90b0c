"""Colours of code on the page: they are painted over the text, which stays as it is."""

import json
import random
from typing import Any

import pytest
from browsing import Open, answered, ask, chunk, done, token
from live import Live

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

CODE = "class Queue:\n    '''of\n    items'''\n    def put(self, item=1):  # comment\n        return None\n"
FENCED = f"Look:\n\n```python\n{CODE}```\nThat's it: `def`."

PAINTED = """() => {
  const texts = {};
  for (const [name, ranges] of CSS.highlights) {
    texts[name] = [...ranges].filter(each => each.startContainer.isConnected).map(each => {
      const range = new Range();
      range.setStart(each.startContainer, each.startOffset);
      range.setEnd(each.endContainer, each.endOffset);
      return range.toString();
    });
  }
  return texts;
}"""
COLOUR = """([selector, name]) => {
  const each = document.querySelector(selector);
  return [getComputedStyle(each, `::highlight(${name})`).color, getComputedStyle(each).color];
}"""
CONTRAST = """([selector, name]) => {
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = colours => {
    for (const colour of ["#fff", ...colours]) { brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1) }
    const [r, g, b] = [...brush.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const each = document.querySelector(selector), layers = [];
  for (let up = each; up; up = up.parentElement) layers.unshift(getComputedStyle(up).backgroundColor);
  const under = paint(layers), ink = paint([...layers, getComputedStyle(each, `::highlight(${name})`).color]);
  return (Math.max(ink, under) + .05) / (Math.min(ink, under) + .05);
}"""


def painted(page: Any) -> dict[str, list[str]]:
    """Return the texts that each colour is painted over."""
    found: dict[str, list[str]] = page.evaluate(PAINTED)
    return {name: texts for name, texts in found.items() if texts}


def told(page: Any, text: str, parts: list[str] | None = None) -> None:
    """Ask, and get this text in these parts."""
    events = [chunk({"content": part}, rest_local={"tokens": [token(part)]}) for part in parts or [text]]
    answered(page, events)
    ask(page, "hello")
    done(page)
    page.unroute_all()


def test_code_is_coloured_by_the_language_of_its_fence(quiet: Live, opened: Open) -> None:
    """The colours can be read."""
    page = opened(quiet)
    told(page, FENCED)
    assert painted(page) == {
        "keyword": ["class", "def", "return"],
        "title": ["Queue", "put"],
        "string": ["'''of\n    items'''"],
        "number": ["1", "None"],
        "comment": ["# comment"],
    }
    assert page.locator("#chat article .text").text_content() == FENCED
    assert page.locator("#chat article .code > *").evaluate_all("all => all.map(each => each.tagName)") == ["MARK"] * 5
    shown, own = page.evaluate(COLOUR, [".code mark", "keyword"])
    assert shown != own
    names = json.loads(page.evaluate("JSON.stringify([...CSS.highlights.keys()])"))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name in names:
            for selector in (".code mark", ".fence"):  # One is on the colour of a source, and one next to it.
                assert page.evaluate(CONTRAST, [selector, name]) >= 4.5, (scheme, name, selector)
    page.get_by_role("button", name="Plain text").click()
    shown, own = page.evaluate(COLOUR, [".code mark", "keyword"])
    assert shown == own, "plain text is plain"


def test_colours_do_not_depend_on_where_the_text_is_cut(quiet: Live, opened: Open) -> None:
    page, rng = opened(quiet), random.Random(5)
    told(page, FENCED)
    whole = painted(page)
    for _ in range(3):
        page.get_by_role("button", name="New conversation").click()
        cuts = sorted(rng.sample(range(1, len(FENCED)), 30))
        told(page, FENCED, [FENCED[a:b] for a, b in zip([0, *cuts], [*cuts, len(FENCED)], strict=True)])
        assert painted(page) == whole


def test_a_language_that_is_not_known_has_no_colours(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    fences = ("```", "```no-such-language", "```__proto__", "```constructor", "~~~ {.x")
    text = "".join(f"{fence}\n{CODE}{fence[:3]}\n" for fence in fences)
    told(page, text)
    assert painted(page) == {}
    assert page.locator("#chat article .text").text_content() == text


@pytest.mark.parametrize("mode", ["complete", "infill"])
def test_completed_code_is_coloured_and_prose_is_not(quiet: Live, opened: Open, mode: str) -> None:
    page = opened(quiet)
    page.locator(f"#tab-{mode}").click()
    prose = "It is not for us\nand not for you,\nwhile it is in the class\nif that is all."
    for number, (given, more, found) in enumerate(
        [
            (CODE, "    def get(self):\n        return 1\n", ["class", "def", "return", "def", "return"]),
            (prose, " Or?", []),
        ]
    ):
        page.locator(f"#{mode} textarea").first.fill(given)
        page.locator(f"#{mode} .send").click()
        quiet.service.say(more, number=number)
        done(page)
        assert page.locator(f"#{mode} article .text").text_content() == given + more
        assert painted(page).get("keyword", []) == found
        assert page.locator(".line").count() == 0, "it is no Markdown"


def test_only_what_is_shown_is_painted(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    told(page, FENCED)
    first = painted(page)
    count = "() => [...CSS.highlights.values()].reduce((sum, each) => sum + each.size, 0)"
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#chat article")).to_have_count(0)
    assert page.evaluate(count) == 0, "nothing is kept of a conversation that is closed"
    page.get_by_role("button", name="hello").click()
    expect(page.locator("#chat article")).to_have_count(1)
    assert painted(page) == first
    page.reload()
    expect(page.locator("#chat article")).to_have_count(1)
    assert painted(page) == first


def test_ones_own_message_is_shown_as_it_was_typed(hello: Live, opened: Open) -> None:
    page = opened(hello)
    typed = "# not a heading\ndef f(*args, **kw):\n    return a*b*c\n- `x` **y**\n```python\ndef g(): pass\n```\n"
    page.locator("#message").fill(typed)
    page.keyboard.press("Enter")
    done(page)
    asked = page.locator("#chat .asked")
    lines = asked.locator(".line:not(.fence)")
    families = "all => all.map(each => getComputedStyle(each).fontFamily + getComputedStyle(each).fontSize)"
    (family,) = {*lines.evaluate_all(families)}
    assert "mono" in family
    asked.evaluate("each => getSelection().selectAllChildren(each)")
    seen = page.evaluate("getSelection().toString()")  # This is what would be copied.
    assert seen.startswith("# not a heading\ndef f(*args, **kw):\n    return a*b*c\n- `x` **y**\n")
    assert "def g(): pass" in seen
    assert painted(page) == {"keyword": ["def", "pass"], "title": ["g"]}
