"""Light Markdown on the page: a style for every character, and every token keeps its place."""

import json
import random
import re
from typing import Any

import pytest
from browsing import FAULTS, Open, ask, done
from fake_service import origin
from live import Live

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

TEXT = """# Queue **of** `items`

It has **two methods**, `put` and ``a`b``; 2 ** 3 ** 4 stays, and `un closed
- first **item
  * second**
10. tenth
```python
# no heading **here** `nor` code
- x
````
```
~~~
```
~~~
#no heading
"""
WORST = ["**", "`", "``", "```", "\n", "a", " ", "# ", "- ", "~~~", "\\", "<b>", "&amp;", "1. "]

LOOKS = """async ([texts, whole]) => {
  const { Answer } = await import("/page/answer.js");
  const answer = new Answer({ path: "/v1/chat/completions", body: {} });
  const token = text => ({ text, source: "context", probability: 0.5 });
  if (whole) answer.write(texts.join(""));
  else answer.addSteps(texts.map(token));
  const looks = [];
  for (const line of answer.text.querySelectorAll(".line")) {
    for (const each of line.children) {
      if (each === answer.end) continue;
      const style = each.className.replace("context", "").trim();
      for (const character of each.textContent) looks.push([character, line.className, style]);
    }
  }
  return JSON.stringify(looks); // playwright takes 1 s for as many lists
}"""


def looks(page: Any, texts: list[str], whole: bool = False) -> list[tuple[str, str, str]]:
    """Return of every character: itself, the class of its line, its own style."""
    found = json.loads(page.evaluate(LOOKS, [texts, whole]))
    return [(character, line.removeprefix("line").strip(), own) for character, line, own in found]


def styled(found: list[tuple[str, str, str]], style: str) -> list[str]:
    """Return the runs of characters that have a style."""
    runs, last = [], False
    for character, _, own in found:
        now = style in own.split()
        if now and last:
            runs[-1] += character
        elif now:
            runs.append(character)
        last = now
    return runs


def test_markdown_is_styled(quiet: Live, opened: Open) -> None:
    found = looks(opened(quiet), [TEXT], whole=True)
    assert "".join(each[0] for each in found) == TEXT
    kinds = [kind for character, kind, _ in found if character == "\n"]
    assert kinds[:6] == ["head h1", "blank", "", "item", "item", "item"]
    assert kinds[6:] == [
        "fence open", "code", "code", "fence close", "fence open", "code", "fence close", "fence open", "code",
    ]  # fmt: skip
    assert styled(found, "bold") == ["of", "two methods"]
    assert styled(found, "inline") == ["items", "put", "a`b"]
    assert "# " in styled(found, "syntax")
    assert "10. " in styled(found, "bullet")


def test_styles_do_not_depend_on_where_the_text_is_cut(quiet: Live, opened: Open) -> None:
    page, rng = opened(quiet), random.Random(3)
    for number in range(40):
        text = TEXT if number < 10 else "".join(rng.choices(WORST, k=40))
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, 25)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert looks(page, parts) == looks(page, [text], whole=True), parts


WRITES = """async parts => {
  const { Answer } = await import("/page/answer.js"), { matchAll } = String.prototype;
  const answer = new Answer({ path: "/v1/chat/completions", body: {} });
  let looked = 0;  // characters of text that was searched; a line is searched up to three times for its looks
  String.prototype.matchAll = function(pattern) { looked += this.length; return matchAll.call(this, pattern) };
  try {
    answer.addSteps(parts.map(text => ({ text, source: "context", probability: 0.5 })));
  } finally {
    String.prototype.matchAll = matchAll;
  }
  return [looked, answer.text.textContent];
}"""


def test_a_long_line_is_not_parsed_again_for_each_token(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    for begin in ("{", "- **a** {", "```\n{"):
        parts = [begin, *(f'"k{number}": `{number}`, ' for number in range(1250)), "}\n", "end"]
        text = "".join(parts)
        looked, shown = page.evaluate(WRITES, parts)
        assert shown.startswith(text)
        assert 0 < looked < 130 * len(text), begin
        assert looks(page, parts) == looks(page, [text], whole=True)


def test_every_token_keeps_its_source(quiet: Live, opened: Open) -> None:
    """Its text may be in two lines or two styles, and its line may change its style."""
    page = opened(quiet)
    ask(page, "hello")
    stream = quiet.service.stream()
    for text in ("# A", " title\n", "see **bo", "ld** `code`", "\n```\n", "x = 1", "\n```\n", "end"):
        stream.give(text, "datastore", origin=origin(file="a.py", line=3))
    stream.end()
    done(page)
    answer = page.locator("#chat article .text")
    expect(answer).to_have_text("# A title\nsee **bold** `code`\n```\nx = 1\n```\nend")
    assert answer.locator("mark").count() == answer.locator(".line > mark.datastore").count() > 8
    answer.locator("mark.bold").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("a.py:3")
    assert answer.locator("[tabindex='0']").count() == 1
    page.keyboard.press("Alt+Shift+KeyA")
    page.keyboard.press("End")
    expect(page.locator("mark", has_text="end")).to_be_focused()


def test_every_style_has_a_name_and_enough_contrast(quiet: Live, opened: Open) -> None:
    page = opened(quiet, width=375)
    ask(page, "hello")
    stream = quiet.service.stream()
    for source in ("target", "context", "datastore", "history", "prediction", "model", "grammar", "edit"):
        stream.give(TEXT, source, origin=None if source == "target" else origin(source=source))
        stream.give("~~~\n")
    stream.end()
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(FAULTS) == [], scheme


def test_plain_text_can_be_chosen_and_is_remembered(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    ask(page, "hello")
    quiet.service.say("# Title\n- one\n```\nx\n```\n")
    done(page)
    size = "each => getComputedStyle(each).fontSize"
    display = "each => getComputedStyle(each).display"
    head, item = page.locator(".line.head"), page.locator(".line.item")
    assert head.evaluate(size) != item.evaluate(size)
    assert head.evaluate(display) == "block"
    switch = page.get_by_role("button", name="Plain text")
    switch.click()
    expect(switch).to_have_attribute("aria-pressed", "true")
    assert head.evaluate(size) == item.evaluate(size)
    assert head.evaluate(display) == "inline"
    assert page.locator("#chat article .text").inner_text().strip() == "# Title\n- one\n```\nx\n```"
    page.reload()
    expect(switch).to_have_attribute("aria-pressed", "true")
    switch.click()
    page.reload()
    expect(switch).to_have_attribute("aria-pressed", "false")


def test_steps_of_one_event_are_separate(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    ask(page, "hello")
    stream = quiet.service.stream()
    with stream.together():
        for text in (" a", " b c d", " e f"):
            stream.give(text, "context", origin=origin(source="context"))
    stream.end()
    expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile("^3 steps, .* has 4\\.$"))
