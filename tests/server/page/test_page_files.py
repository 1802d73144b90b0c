"""The page: attached files, the choice of model and sampling, as they are sent."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from browsing import Open, answered, ask, chunk, done
from live import Live

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def file(name: str, content: bytes, kind: str = "text/plain") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": content}


def sent(page: Any, text: str = "look") -> Any:
    """Return the body of the request that a message becomes."""
    page.locator("#message").focus()
    with page.expect_request("**/v1/chat/completions") as waiting:
        ask(page, text)
    done(page)
    return json.loads(waiting.value.post_data)


def seeing(page: Any) -> None:
    """Make the server's model one that reads images."""

    def answer(route: Any) -> None:
        found = route.fetch().json()
        route.fulfill(json=found | {"modalities": {"vision": True, "audio": False}})

    page.route("**/props*", answer)
    page.evaluate("import('/page/server.js').then(({ connect }) => connect())")
    expect(page.locator("#model")).to_contain_text("reads images")
    expect(page.get_by_role("button", name="Attach files or images")).to_be_visible()


def test_a_text_file_is_sent_between_fences_with_its_name(hello: Live, opened: Open) -> None:
    page = opened(hello)
    files = [file("a.py", b"x = '''```'''\n"), file("removed.txt", b"a"), file("notes.txt", "Grüße".encode())]
    page.locator("#attach-file").set_input_files(files)
    page.get_by_role("button", name="Remove removed.txt").click()
    expect(page.get_by_role("button", name="Remove notes.txt")).to_be_focused()
    expect(page.locator("#attached li")).to_have_count(2)
    expect(page.locator("#attached")).to_contain_text("notes.txt 7 B")
    body = sent(page)
    content = "a.py:\n````py\nx = '''```'''\n````\n\nnotes.txt:\n```txt\nGrüße\n```\n\nlook"
    assert body["messages"] == [{"role": "user", "content": content}]
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#chat .turn .files")).to_contain_text("a.py")
    page.reload()
    expect(page.locator("#chat .turn .files li")).to_have_count(2)


WRONG = [
    (file("a.bin", b"\x00\x01"), "a.bin is not attached: it is not text"),
    (file("latin.txt", b"\xe9\xe8"), "latin.txt is not attached: it is not text"),
    (file("long.txt", b"a" * 2_000_001), "2.0 MB is the limit"),
    (file("a.png", PNG, "image/png"), "does not read images"),
]


def test_a_file_that_is_refused_is_named(hello: Live, opened: Open) -> None:
    page = opened(hello)
    expect(page.locator("#model")).to_contain_text("tokens of context")
    for count, (wrong, why) in enumerate(WRONG, 1):
        page.locator("#attach-file").set_input_files([wrong, file(f"right{count}.txt", b"right")])
        expect(page.get_by_role("alert")).to_contain_text(why)
        expect(page.locator("#attached li")).to_have_count(count)
        expect(page.locator("#attached li").last).to_contain_text(f"right{count}.txt")


def test_images_are_sent_to_a_model_that_reads_them(hello: Live, opened: Open) -> None:
    """Those of other kinds as JPEG."""
    page = opened(hello)
    seeing(page)
    answered(page, [chunk({"content": "a dot"})])
    page.locator("#attach-file").set_input_files([file("dot.png", PNG, "image/png")])
    expect(page.get_by_role("img", name="Image dot.png")).to_be_visible()
    (message,) = sent(page)["messages"]
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "look"},
    ]
    bitmap = (
        b"BM:\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\1\0\0\0\1\0\0\0\1\0\x18\0\0\0\0\0\4\0\0\0" + bytes(16) + b"\0\0\xff\0"
    )
    page.locator("#attach-file").set_input_files(
        [file("broken.png", b"not an image", "image/png"), file("dot.bmp", bitmap, "image/bmp")]
    )
    expect(page.get_by_role("alert")).to_contain_text("broken.png is not attached: the browser cannot read it")
    expect(page.locator("#attached li")).to_have_count(1)
    message = sent(page)["messages"][-1]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    page.reload()
    expect(page.locator("#chat .turn").get_by_role("img", name="Image dot.png")).to_be_visible()


def test_a_body_that_is_too_large_is_said_in_words(scripted: Callable[..., Live], opened: Open) -> None:
    page = opened(scripted(max_body=2000), but="status of 413")
    page.locator("#message").fill("x" * 3000)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("more than the server takes")
    expect(page.locator("#message")).to_have_value("x" * 3000)


def test_a_model_is_chosen_and_remembered(scripted: Callable[..., Live], opened: Open) -> None:
    page = opened(scripted(aliases=("coder", "other")))
    choice = page.get_by_role("combobox", name="Model")
    expect(choice).to_have_value("coder")
    assert sent(page)["model"] == "coder"
    with page.expect_request("**/props?model=other"), page.expect_request("**/datastores?model=other"):
        choice.select_option("other")
    assert sent(page)["model"] == "other"
    expect(page.locator("#chat article .foot").last).to_contain_text("other")
    page.reload()
    expect(choice).to_have_value("other")


def test_sampling_is_sent_where_it_is_set(hello: Live, opened: Open) -> None:
    page = opened(hello)
    expect(page.locator("#model")).to_contain_text("demo · 512 tokens of context")
    expect(page.get_by_role("combobox", name="Model")).to_be_hidden()
    expect(page.locator("#top-k")).to_have_attribute("placeholder", "40")
    body = sent(page)
    assert "model" not in body, "one model needs no choice"
    assert not body.keys() & {"top_p", "top_k", "min_p", "repeat_penalty"}
    sampling = {"temperature": 0.5, "max_tokens": 33, "seed": 7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    sampling |= {"repeat_penalty": 1.1}
    for name, value in sampling.items():
        page.locator(f"#{name.replace('_', '-')}").fill(str(value))
    page.locator("#prediction").fill("likely")
    page.locator("#policy").select_option("off")
    body = sent(page)
    assert {name: body[name] for name in sampling} == sampling
    request = hello.service.stream(1).request
    assert (request.policy, request.origins, len(request.prediction) > 0) == ("off", True, True)
    page.reload()
    expect(page.locator("#temperature")).to_have_value("0.5")
