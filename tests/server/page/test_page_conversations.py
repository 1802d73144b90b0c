"""Conversations of the page: kept in the browser, shared by its tabs, with branches, as files."""

import json
from pathlib import Path
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
        "store.transact('readonly', (_, messages) => settled(messages.getAll()))"
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
    expect(page.locator("#title")).to_have_text("greet me")
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


def test_edited_messages_and_new_answers_are_branches(quiet: Live, opened: Open) -> None:
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
    versions = page.locator("#chat article .place-of")
    expect(versions).to_have_text("2/2")
    page.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Another version of this message")
    expect(field).to_have_value("one")
    field.fill("uno")
    page.keyboard.press("Enter")
    answer(2, "primero")
    assert "uno" in prompt(quiet, 2)
    assert "first" not in prompt(quiet, 2)
    expect(page.locator("#chat .turn .place-of")).to_have_text("2/2")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator("#chat .asked")).to_have_text("one")
    expect(answers(page)).to_have_text("second")
    page.locator("#chat article").get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_have_text("first")
    expect(page.locator("#chat article").get_by_role("button", name="Next version")).to_be_focused()
    page.wait_for_function("() => !store.unsaved.conversations.size")  # text would be evaluated at every look
    page.reload()
    expect(answers(page)).to_have_text("first")
    page.locator("#message").focus()
    ask(page, "two")
    assert "first" in prompt(quiet, 3)
    assert "second" not in prompt(quiet, 3)
    answer(3, "last")
    page.locator("#chat .turn").first.get_by_role("button", name="Next version").click()
    expect(answers(page)).to_have_text("primero")
    assert len(stored(page)) == 7


# ---- Files -------------------------------------------------------------------------------------------------------


def saved(page: Any, name: str) -> Path:
    """Return the file that a button saves."""
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).click()
    return Path(waiting.value.path())


def test_what_is_exported_can_be_imported(hello: Live, opened: Open) -> None:
    page = opened(hello)
    page.locator("#system").fill("Be brief.")
    page.locator("#message").focus()
    told(page, "one")
    page.get_by_role("button", name="Regenerate").click()
    done(page)
    expect(page.locator("#chat article .place-of")).to_have_text("2/2")
    page.get_by_role("button", name="New conversation").click()
    told(page, "two")
    text = saved(page, "Export all").read_bytes()
    kept = stored(page)
    page.get_by_role("button", name="Delete all").click()
    expect(names(page)).to_have_count(0)
    files = [{"name": "all.json", "mimeType": "application/json", "buffer": text}]
    page.locator("#import-file").set_input_files(files)
    expect(names(page)).to_have_text(["two", "one"])
    again = stored(page)
    for fields in ("content", "role", "created", "steps", "reason"):
        assert sorted(json.dumps(each.get(fields)) for each in again) == sorted(
            json.dumps(each.get(fields)) for each in kept
        )
    page.get_by_role("button", name="one").first.click()
    expect(page.locator("#chat article .place-of")).to_have_text("2/2")
    expect(page.locator("#system")).to_have_value("Be brief.")
    page.locator("#import-file").set_input_files(files)
    expect(names(page)).to_have_count(4)


def test_one_conversation_is_saved_as_json_and_markdown(hello: Live, opened: Open) -> None:
    page = opened(hello)
    page.locator("#attach-file").set_input_files(
        [{"name": "a.py", "mimeType": "text/x-python", "buffer": b'"""```"""\n'}]
    )
    expect(page.locator("#attached li")).to_have_count(1)
    page.locator("#message").focus()
    told(page, "What is *this*?")
    text = saved(page, "Save as Markdown").read_text("utf-8")
    assert text == (
        '# What is *this*?\n\n## You\n\na.py:\n````py\n"""```"""\n````\n\nWhat is *this*?\n\n## demo\n\nHello world\n'
    )
    found = json.loads(saved(page, "Save as JSON").read_bytes())
    assert [each["content"] for each in found["conversations"][0]["messages"]] == ["What is *this*?", "Hello world"]


def conversation(**fields: Any) -> dict[str, Any]:
    message = {"id": "a", "parent": None, "role": "user", "content": "hi", **fields}
    return {
        "format": "rest-local conversations",
        "version": 1,
        "conversations": [{"title": "t", "messages": [message]}],
    }


WRONG = [  # no two that follow each other are refused in the same words
    ("{", "not JSON"),
    ("[]", "holds no conversations"),
    (conversation() | {"version": 2}, "newer version"),
    ({"format": "other", "conversations": []}, "holds no conversations"),
    (conversation(parent="b"), "not in the file"),
    (conversation(role="system"), "no role"),
    (conversation(parent="a"), "in a circle"),
    (conversation(content=None), "no role or no content"),
    (conversation(files=[{"kind": "image", "name": "x", "url": "https://example.org/x.png"}]), "neither text nor"),
    (conversation(files="x"), "no list"),
]


def test_a_wrong_file_is_not_imported(hello: Live, opened: Open) -> None:
    page = opened(hello)
    for content, why in WRONG:
        text = content if isinstance(content, str) else json.dumps(content)
        page.locator("#import-file").set_input_files(
            [{"name": "w.json", "mimeType": "application/json", "buffer": text.encode()}]
        )
        expect(page.get_by_role("alert")).to_contain_text(why)
        assert stored(page) == [], why
        expect(names(page)).to_have_count(0)


# ---- Several tabs ------------------------------------------------------------------------------------------------


def test_two_tabs_show_the_same(hello: Live, opened: Open) -> None:
    one = opened(hello)
    two = opened(hello, same_browser=one)
    told(one, "from the first tab")
    expect(names(two)).to_have_text(["from the first tab"])
    two.get_by_role("button", name="from the first tab").click()
    expect(answers(two)).to_have_text("Hello world")
    told(two, "from the second")
    expect(answers(one)).to_have_count(2)
    one.get_by_role("button", name="Rename").click()
    one.keyboard.type("both")
    one.keyboard.press("Enter")
    expect(two.locator("#title")).to_have_text("both")
    two.locator("#delete").click()
    expect(names(one)).to_have_count(0)
    expect(one.locator("#status")).to_contain_text("deleted in another tab")
    two.get_by_role("button", name="Undo").click()
    expect(names(one)).to_have_text(["both"])


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
    for page in (one, two):
        expect(page.locator("#chat .turn .place-of")).to_have_text("2/2" if page is two else "1/2")
    one.reload()
    expect(answers(one)).to_have_count(2)
    said = sorted(each["content"] for each in stored(one))
    assert said == ["answer of the first tab", "answer of the second tab", "begin", "begun", "left", "right"]


def test_a_conversation_that_is_still_written_is_not_lost(quiet: Live, opened: Open) -> None:
    one = opened(quiet)
    ask(one, "begin")
    quiet.service.stream(0).give("half")
    two = opened(quiet, same_browser=one)
    two.get_by_role("button", name="begin").first.click()
    two.locator("#delete").click()
    expect(names(one)).to_have_count(0)
    expect(answers(one)).to_have_text("half")
    quiet.service.say(" and whole")
    done(one)
    expect(names(two)).to_have_text(["begin"])
    assert sorted(each["content"] for each in stored(two)) == ["begin", "half and whole"]


def test_what_there_is_of_an_answer_survives_its_tab(quiet: Live, opened: Open) -> None:
    one = opened(quiet)
    one.clock.install()
    two = opened(quiet, same_browser=one)
    ask(one, "begin")
    two.get_by_role("button", name="begin").first.click()
    for _ in range(2):
        quiet.service.stream(0).give("part ")
        expect(answers(one)).to_contain_text("part")
        one.clock.fast_forward(2000)  # parts are kept so often
    quiet.service.stream(0).give("part ")
    expect(answers(two)).to_contain_text("part part")
    one.close()
    two.reload()
    expect(answers(two)).to_contain_text("part part")
    expect(two.locator("#chat article .foot")).to_contain_text("unfinished")
    two.get_by_role("button", name="Regenerate").click()
    quiet.service.say("whole", number=1)
    done(two)
    expect(two.locator("#chat article .place-of")).to_have_text("2/2")


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
    found = json.loads(saved(page, "Export all").read_bytes())
    assert len(found["conversations"]) == 2
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
