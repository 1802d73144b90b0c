"""Conversations of the page: kept in the browser, asked and answered anew, in several tabs, without storage."""

from typing import Any

import pytest
from browsing import Open, answered, ask, chunk, done, token
from live import Live, Scripted

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

NO_STORAGE = "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError') }"


def answers(page: Any) -> Any:
    return page.locator("#chat article .text")


def names(page: Any) -> Any:
    return page.locator("#conversations .name")


def told(page: Any, text: str) -> None:
    """Ask and wait for the answer."""
    expect(page.locator("#message")).to_be_focused()
    ask(page, text)
    done(page)


def prompt(live: Live, number: int) -> str:
    """Return the text that a request of the service is about."""
    pieces = live.service.engine.model.vocabulary.piece
    return "".join(pieces(each).decode("utf-8", "replace") for each in live.service.stream(number).request.prompt)


def stored(page: Any) -> list[dict[str, Any]]:
    """Return all messages in the browser's database."""
    found: list[dict[str, Any]] = page.evaluate(
        """async () => {
          const { store } = await import("/page/store.js");
          const request = await store.transact("readonly", (_, messages) => messages.getAll());
          return request.result;
        }"""
    )
    return found


def test_a_conversation_survives_a_reload(hello: Live, opened: Open) -> None:
    page = opened(hello)
    tokens = [token("Hello", "target", file=None), token("\n```\nx = 1"), token("\n```\nbye")]
    answered(page, [chunk({"content": "".join(each["text"] for each in tokens)}, rest_local={"tokens": tokens})])
    told(page, "greet me")
    before = answers(page).inner_text()
    page.reload()
    expect(answers(page)).to_contain_text("x = 1")
    assert answers(page).inner_text() == before
    expect(answers(page).locator(".code mark.datastore").first).to_have_text("x = 1")
    expect(page.locator("#chat .asked")).to_have_text("greet me")
    expect(page.locator("#title")).to_have_value("greet me")
    expect(names(page)).to_have_text(["greet me"])
    expect(page.locator("#message")).to_be_focused()
    page.locator(".code mark").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("a.py:1")
    page.unroute_all()
    told(page, "and again")
    assert [each in prompt(hello, 0) for each in ("greet me", "x = 1", "and again")] == [True] * 3


def test_conversations_are_separate(hello: Live, opened: Open) -> None:
    """Each has a system prompt of its own."""
    page = opened(hello)
    page.locator("#system").fill("Speak like a pirate.")
    page.locator("#message").focus()
    told(page, "about cats")
    page.get_by_role("button", name="New conversation").click()
    expect(answers(page)).to_have_count(0)
    expect(page.locator("#system")).to_have_value("")
    told(page, "about dogs")
    assert "cats" not in prompt(hello, 1)
    assert ["pirate" in prompt(hello, number) for number in (0, 1)] == [True, False]
    expect(names(page)).to_have_text(["about dogs", "about cats"])
    page.get_by_role("button", name="about cats").click()
    expect(page.locator("#chat .asked")).to_have_text("about cats")
    expect(page.locator("#system")).to_have_value("Speak like a pirate.")
    told(page, "more")
    assert "about cats" in prompt(hello, 2)
    expect(names(page)).to_have_text(["about cats", "about dogs"])


def test_deleting_can_be_undone(hello: Live, opened: Open) -> None:
    page = opened(hello)
    told(page, "keep me")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(answers(page)).to_have_count(0)
    expect(names(page)).to_have_count(0)
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    undo.click()
    expect(names(page)).to_have_text(["keep me"])
    expect(answers(page)).to_have_text("Hello world")
    page.get_by_role("button", name="Delete all").click()
    expect(names(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_role("button", name="Delete all")).to_be_disabled()
    assert stored(page) == []


def test_an_answer_of_a_deleted_conversation_is_not_kept(quiet: Live, opened: Open) -> None:
    page = opened(quiet)
    ask(page, "hello")
    quiet.service.stream().give("begun")
    expect(answers(page)).to_have_text("begun")
    page.get_by_role("button", name="Delete", exact=True).click()
    assert quiet.service.stream().cancelled.wait(30)
    expect(page.locator("#stop")).to_be_hidden()
    expect(names(page)).to_have_count(0)
    page.reload()
    expect(page.locator("#model")).to_contain_text("tokens of context")
    assert stored(page) == []


def test_an_edited_message_and_a_new_answer_replace_the_old_ones(quiet: Live, opened: Open) -> None:
    page = opened(quiet)

    def answer(number: int, text: str) -> None:
        quiet.service.say(text, number=number)
        expect(answers(page).last).to_have_text(text)
        done(page)

    ask(page, "one")
    answer(0, "first")
    page.get_by_role("button", name="Regenerate").click()
    answer(1, "second")
    assert prompt(quiet, 0) == prompt(quiet, 1)
    expect(answers(page)).to_have_text(["second"])
    page.locator("#message").focus()
    ask(page, "two")
    answer(2, "third")
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    page.get_by_role("button", name="Edit").first.click()
    expect(page.locator("#chat .turn").first).to_contain_text("replaces this message and everything below it")
    field = page.get_by_label("Another version of this message")
    expect(field).to_have_value("one")
    field.fill("uno")
    page.keyboard.press("Enter")
    answer(3, "primero")
    assert [each in prompt(quiet, 3) for each in ("uno", "second", "two")] == [True, False, False]
    expect(answers(page)).to_have_text(["primero"])
    page.reload()
    expect(page.locator("#chat .asked")).to_have_text(["uno"])
    expect(answers(page)).to_have_text(["primero"])
    assert sorted(each["content"] for each in stored(page)) == ["primero", "uno"]


def test_what_gets_no_answer_replaces_nothing(quiet: Live, opened: Open) -> None:
    page = opened(quiet, but="status of 503")
    ask(page, "one")
    quiet.service.say("first")
    done(page)
    full = {"error": {"message": "full", "code": "busy"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=full))
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_contain_text("The server is full")
    expect(answers(page)).to_have_text(["first"])
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text("uno")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Another version of this message")).to_have_value("uno")
    expect(answers(page)).to_have_text(["first"])
    page.reload()
    expect(page.locator("#chat .asked")).to_have_text(["one"])
    expect(answers(page)).to_have_text(["first"])


# ---- Several tabs ------------------------------------------------------------------------------------------------


def test_another_tab_lists_what_was_written_when_it_has_the_focus(hello: Live, opened: Open) -> None:
    one = opened(hello)
    two = opened(hello, same_browser=one)
    told(one, "from the first tab")
    two.evaluate("dispatchEvent(new Event('focus'))")
    expect(names(two)).to_have_text(["from the first tab"])
    two.get_by_role("button", name="from the first tab").click()
    expect(answers(two)).to_have_text("Hello world")


def test_two_tabs_that_answer_at_once_lose_nothing(quiet: Live, opened: Open) -> None:
    one = opened(quiet)
    ask(one, "begin")
    quiet.service.say("begun")
    done(one)
    two = opened(quiet, same_browser=one)
    two.get_by_role("button", name="begin").first.click()
    expect(answers(two)).to_have_text("begun")
    expect(two.locator("#message")).to_be_focused()
    ask(one, "left")
    quiet.service.stream(1)
    ask(two, "right")
    for number, text in ((2, "answer of the second tab"), (1, "answer of the first tab")):
        quiet.service.say(text, number=number)
    done(one)
    done(two)
    one.reload()
    expect(answers(one)).to_have_count(3)
    said = sorted(each["content"] for each in stored(one))
    assert said == ["answer of the first tab", "answer of the second tab", "begin", "begun", "left", "right"]


def test_what_there_is_of_an_answer_survives_its_tab(quiet: Live, opened: Open) -> None:
    one = opened(quiet)
    one.clock.install()
    two = opened(quiet, same_browser=one)
    ask(one, "begin")
    for _ in range(2):
        quiet.service.stream(0).give("part ")
        expect(answers(one)).to_contain_text("part")
        one.clock.fast_forward(2000)  # parts are kept so often
    quiet.service.stream(0).give("part ")
    expect(answers(one)).to_contain_text("part part part")
    one.close()
    two.reload()
    two.get_by_role("button", name="begin").first.click()
    expect(answers(two)).to_contain_text("part part")
    expect(two.locator("#chat article .foot")).to_contain_text("unfinished")
    two.get_by_role("button", name="Regenerate").click()
    quiet.service.say("whole", number=1)
    done(two)
    expect(answers(two)).to_have_text(["whole"])


# ---- Storage -----------------------------------------------------------------------------------------------------


def test_without_storage_the_page_says_so_and_goes_on(hello: Live, opened: Open) -> None:
    page = opened(hello, script=NO_STORAGE)
    expect(page.locator("#model")).to_contain_text("tokens of context")
    expect(page.get_by_role("alert")).to_contain_text("stores nothing")
    told(page, "one")
    expect(page.get_by_role("alert")).to_contain_text("stores nothing")
    page.get_by_role("button", name="New conversation").click()
    told(page, "two")
    expect(names(page)).to_have_text(["two", "one"])
    page.get_by_role("button", name="one").first.click()
    expect(page.locator("#chat .asked")).to_have_text("one")
    told(page, "three")
    assert "one" in prompt(hello, 2)
    page.locator("#delete").click()
    expect(names(page)).to_have_text(["two"])
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_have_count(2)


def test_a_full_storage_is_said_and_used_again_when_there_is_room(hello: Live, opened: Open) -> None:
    page = opened(hello, script="'in a profile of its own'")
    browser = page.context.new_cdp_session(page)
    browser.send("Storage.overrideQuotaForOrigin", {"origin": hello.url, "quotaSize": 1})
    told(page, "one")
    expect(page.get_by_role("alert")).to_contain_text("storage is full")
    page.get_by_role("button", name="New conversation").click()
    told(page, "two")
    page.get_by_role("button", name="one").first.click()
    expect(page.locator("#chat .asked")).to_have_text("one")
    told(page, "three")
    assert "one" in prompt(hello, 2)
    assert stored(page) == []
    browser.send("Storage.overrideQuotaForOrigin", {"origin": hello.url})  # Restore the quota.
    told(page, "four")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.reload()
    expect(names(page)).to_have_text(["one", "two"])
    expect(answers(page)).to_have_count(3)


# ---- Failures ----------------------------------------------------------------------------------------------------


def test_what_came_before_an_error_is_kept(hello: Live, opened: Open) -> None:
    page = opened(hello)
    answered(page, [chunk({"content": "so far"}), {"error": {"message": "the model ended", "code": "model_ended"}}])
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("the model ended")
    expect(answers(page)).to_have_text("so far")
    expect(page.locator("#chat article .foot")).to_contain_text("failed")
    page.reload()
    expect(answers(page)).to_have_text("so far")
    page.unroute_all()
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_text("Hello world")


def test_a_refused_message_is_kept_and_leaves_no_conversation(scripted: Scripted, opened: Open) -> None:
    page = opened(scripted(room=0), but="status of 503")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The server is full")
    assert page.locator("#chat article, #chat .asked").count() == 0
    expect(page.locator("#message")).to_have_value("hello")
    expect(names(page)).to_have_count(0)
    assert stored(page) == []
