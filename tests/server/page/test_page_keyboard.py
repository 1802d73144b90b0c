"""The page without a mouse and without a screen: keys, focus, what is read aloud; and its panels in every width."""

from typing import Any

import pytest
from browsing import FAULTS, Open, answered, ask, chunk, done, token
from live import Live

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

FOCUSED = """() => {
  const each = document.activeElement, style = getComputedStyle(each), box = each.getBoundingClientRect();
  const name = each.getAttribute("aria-label") || (each.labels && each.labels[0] || each).textContent.trim();
  return { id: each.id, name, ring: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    shown: box.width > 0 && box.height > 0 && box.bottom > 0 && box.top < innerHeight
      && box.right > 0 && box.left < innerWidth, body: each === document.body };
}"""
CODE = "Look. This is it:\n\n```python\nx = 1\ny = 2\n```\n\n- one\n- two! And"


def focused(page: Any) -> Any:
    return page.evaluate(FOCUSED)


def tab_to(page: Any, name: str) -> None:
    """Press Tab until an element with this name has the focus."""
    for _ in range(80):
        if focused(page)["name"] == name:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab never reaches {name!r}")


def test_a_conversation_is_marked_before_the_list_is_read_again(hello: Live, opened: Open) -> None:
    page = opened(hello)
    ask(page, "one")
    done(page)
    page.keyboard.press("Alt+Shift+KeyN")
    ask(page, "two")
    expect(page.locator("#conversations button")).to_have_count(2)
    expect(page.locator("#chat article")).to_contain_text("Hello world")
    page.evaluate("import('/page/store.js').then(({ store }) => { store.list = () => new Promise(() => undefined) })")
    for key in ("Alt+Shift+KeyL", "End", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#title")).to_have_value("one")
    page.keyboard.press("Alt+Shift+KeyL")
    expect(page.locator("#conversations [aria-current]")).to_contain_text("one")
    expect(page.locator("#conversations [aria-current]")).to_be_focused()


def test_a_whole_session_by_keyboard(hello: Live, opened: Open) -> None:
    page = opened(hello)
    press, write = page.keyboard.press, page.keyboard.type
    write("one")
    press("Enter")
    done(page)
    expect(page.locator("#message")).to_be_focused()
    press("Alt+Shift+KeyA")
    assert page.evaluate("import('/page/markdown.js').then(({ told }) => told.has(document.activeElement))")
    press("Escape")
    tab_to(page, "Regenerate")
    press("Enter")
    done(page)
    press("Alt+Shift+KeyE")
    expect(page.get_by_label("Another version of this message")).to_be_focused()
    press("Control+A")
    write("uno")
    press("Enter")
    expect(page.locator("#chat .asked")).to_have_text("uno")
    done(page)
    press("Alt+Shift+KeyR")
    done(page)
    press("Alt+Shift+KeyN")
    expect(page.locator("#message")).to_be_focused()
    write("two")
    press("Enter")
    done(page)
    for key in ("Alt+Shift+KeyL", "End", "Enter"):
        press(key)
    expect(page.locator("#title")).to_have_value("one")
    press("Alt+Shift+KeyL")
    expect(page.locator("#conversations [aria-current]")).to_be_focused()
    press("F2")
    expect(page.get_by_label("Title of the conversation")).to_be_focused()
    write("eins")
    press("Enter")
    expect(page.locator("#conversations [aria-current]")).to_contain_text("eins")
    press("Alt+Shift+KeyL")
    press("Home")
    press("Delete")
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    expect(page.locator("#conversations button")).to_have_count(1)
    press("Enter")
    expect(page.locator("#conversations button")).to_have_count(2)
    press("Alt+Shift+KeyK")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_hidden()
    press("Alt+Shift+KeyS")
    expect(page.locator("#system")).to_be_focused()


@pytest.mark.parametrize("width", [360, 1200])
def test_the_focus_is_always_seen_and_in_order(hello: Live, opened: Open, width: int) -> None:
    page = opened(hello, width=width)
    answered(page, [chunk({"content": CODE}, rest_local={"tokens": [token(CODE)]})])
    ask(page, "hello")
    done(page)
    page.evaluate("document.activeElement.blur()")
    page.locator(".skip").focus()
    names: list[str] = []
    for _ in range(80):
        found = focused(page)
        if found["body"] or found["name"] in names[1:2]:
            break
        assert found["ring"], found
        assert found["shown"], found
        names.append(found["name"])
        page.keyboard.press("Tab")
    wanted = ["Skip to the text field", "Chat", "Title of the conversation", "Delete", "Copy this message", "Edit"]
    wanted += ["Copy this code", "Copy this answer", "Regenerate", "Message", "Send", "Attach files or images"]
    if width == 1200:
        wanted = [wanted[0], "Plain text", "Keyboard", "New conversation", *wanted[1:], "Temperature", "Top p"]
        wanted += ["API key (kept until this tab is closed)"]
    places = [names.index(name) for name in wanted]
    assert places == sorted(places)
    for tab, field in (("chat", "message"), ("infill", "before")):
        page.locator(f"#tab-{tab}").click()
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#{field}")).to_be_focused()


def test_an_answer_is_read_aloud_in_whole_sentences(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    page.evaluate(
        """() => {
          heard = [];
          const texts = change => [...change.addedNodes].map(node => node.textContent);
          const listen = changes => heard.push(...changes.flatMap(texts));
          new MutationObserver(listen).observe(document.getElementById("spoken"), { childList: true });
        }"""
    )
    ask(page, "hello")
    stream = quiet.service.stream()
    for character in CODE:
        stream.give(character)
    expect(page.locator("#spoken")).to_contain_text("two!")
    expect(page.locator("#spoken")).not_to_contain_text("And")
    stream.end()
    done(page)
    heard = page.evaluate("heard")
    assert heard == [
        "Look.", "This is it:", "Code in python.", "End of the code, 2 lines.", "one", "two!", "And", "Done",
    ]  # fmt: skip
    spoken = page.locator("#spoken")
    expect(spoken).to_have_attribute("aria-live", "polite")
    assert page.locator("[aria-live] [aria-live], [role=log]").count() == 0, "nothing else reads the answer"


def test_enter_is_a_new_line_where_a_finger_types(hello: Live, opened: Open) -> None:
    """A phone's keyboard has no Shift+Enter; the button sends."""
    page = opened(hello, has_touch=True, is_mobile=True)
    page.locator("#message").click()
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    expect(page.locator("#message")).to_have_value("one\ntwo")
    page.locator("form[data-mode=chat] .send").click()
    done(page)
    expect(page.locator("#chat")).to_contain_text("two")


def test_every_width_and_theme(hello: Live, opened: Open) -> None:
    page = opened(hello)
    text = f"{CODE}\n\n| a | {'b' * 200} |\n|---|---|\n| c | d |\n\n> quoted \u202e\nhttps://example.org/{'x' * 300}\n"
    tokens = [token(text[:40]), token(text[40:], "context")]
    answered(page, [chunk({"content": text}, rest_local={"tokens": tokens})])
    page.locator("#attach-file").set_input_files(
        [{"name": f"{'long' * 40}.txt", "mimeType": "text/plain", "buffer": b"a"}]
    )
    expect(page.locator("#attached li")).to_have_count(1)
    page.locator("#message").fill("w" * 400)
    page.keyboard.press("Enter")
    done(page)
    for width in (360, 1000, 1920):  # There are no, one, and two panels next to the text.
        page.set_viewport_size({"width": width, "height": 800})
        page.reload()
        expect(page.locator("#chat article .foot")).to_contain_text("ended by itself")
        nothing_is_cut_off(page, width)


def nothing_is_cut_off(page: Any, width: int) -> None:
    """Check that nothing is cut off with each of the panels, while a message is edited, and with the list of keys."""

    def check() -> None:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(FAULTS) == [], scheme

    check()
    for name, inline in (("list", width >= 1200), ("side", width >= 960)):
        switch = page.locator(f"#open-{name}")
        assert switch.is_visible() != (inline and name == "list")
        if not inline:
            switch.click()
            expect(switch).to_have_attribute("aria-expanded", "true")
        expect(page.locator(f"#{name}")).to_be_visible()
        check()
        if not inline:
            page.keyboard.press("Escape")
            expect(page.locator(f"#{name}")).to_be_hidden()
            expect(switch).to_be_focused()
    page.get_by_role("button", name="Edit").click()
    check()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+Shift+KeyK")
    check()


def test_the_speed_is_said_in_words(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    words, factor = page.locator("#words"), page.locator("#factor")
    expect(words).to_contain_text("speed of the next answer")
    draft = {"draft": {"plain_step_ms": 50.0}}
    timings = {"predicted_n": 4, "predicted_per_second": 60.0, "draft_n": 2, "draft_n_accepted": 2}
    parts = [token("a", "target"), token(" b"), token(" c"), token(" d", "target")]
    first = chunk({"content": "a b c d"}, model="demo", rest_local={"tokens": parts, "steps": [1, 3]})
    answered(page, [first, chunk({}, rest_local=draft, timings=timings)])
    ask(page, "hello")
    done(page)
    expect(factor).to_have_text("3.0 \N{MULTIPLICATION SIGN}")
    expect(words).to_have_text(
        "On average, a step of the model gave 2.0 tokens. Without drafting it gives 1. "
        "The text came about 3.0 times as fast as without drafting."
    )
    page.reload()
    expect(factor).to_have_text("3.0 \N{MULTIPLICATION SIGN}")
    page.locator("#message").focus()
    ask(page, "once more")
    done(page)
    page.unroute_all()
    ask(page, "again")  # compared while it is written with what the server said last
    stream = quiet.service.stream()
    for text in (" one", " two", " three"):  # Each has an event of its own, because the first alone has no speed.
        stream.give(text, "context")
        expect(page.locator("#chat article .text").last).to_contain_text(text)
    expect(factor).to_contain_text("\N{MULTIPLICATION SIGN}")
    expect(words).to_contain_text("a step of the model gives")
    stream.end()
    done(page)
