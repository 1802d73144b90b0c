"""Images in the messages of a conversation."""

import copy
from typing import Any

import pytest

from rest_local.chat.conversation import ChatTemplate
from rest_local.chat.images import MOST_IMAGES, part_of, take_images
from rest_local.errors import OptionError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_messages_without_images_are_as_they_were() -> None:
    messages = [{"role": "system", "content": "s"}, user(text("a")), {"role": "assistant", "content": None}]
    taken, images = take_images(messages)
    assert taken == messages
    assert not images


def test_the_mark_stands_where_the_image_was_and_nothing_is_changed_in_place() -> None:
    messages = [user(text("see"), part_of(b"1"), text("and"), part_of(b"2"))]
    before = copy.deepcopy(messages)
    taken, images = take_images(messages)
    assert messages == before
    first, second = images.data
    assert list(images.data.values()) == [b"1", b"2"]
    assert images.places == {
        first: ("messages", 0, "content", 1),
        second: ("messages", 0, "content", 3),
    }
    prompt = ChatTemplate(CHATML).render(taken)
    assert f"user\nsee{first}and{second}<|im_end|>" in prompt
    images.check_all_in(prompt)


def test_a_client_cannot_write_a_mark() -> None:
    (first,) = take_images([user(part_of(b"1"))])[1].data
    _, again = take_images([user(text(first), part_of(b"1"))])
    assert first not in again.data


def test_an_image_that_the_template_leaves_out_is_refused() -> None:
    taken, images = take_images([user(text("a"), part_of(b"1"))])
    with pytest.raises(OptionError, match=r"messages\[0\].content\[1\]: the model's chat template leaves out"):
        images.check_all_in(ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}").render(taken))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({}, "give an object with a url"),
        ({"image_url": None}, "give an object with a url"),
        ({"image_url": {}}, "give an object with a url"),
        ({"image_url": {"url": 3}}, "give an object with a url"),
        ({"image_url": {"url": ""}}, "give an object with a url"),
        ({"image_url": {"url": "https://example.org/a.png"}}, "no URL is fetched"),
        ({"image_url": {"url": "http://169.254.169.254/"}}, "no URL is fetched"),
        ({"image_url": {"url": "file:///etc/passwd"}}, "no URL is fetched"),
        ({"image_url": {"url": "data:image/png,%89PNG"}}, "no URL is fetched"),
        ({"image_url": {"url": "data:text/html;base64,AAAA"}}, "text/html is no image"),
        ({"image_url": {"url": "data:image/png;base64,"}}, "the image is empty"),
        ({"image_url": {"url": "data:image/png;base64,AAA"}}, "not valid base64"),
        ({"image_url": {"url": "data:image/png;base64,AA-_"}}, "not valid base64"),
        ({"image_url": {"url": "data:image/png;base64,ÄÖÜß"}}, "not valid base64"),
        ({"image_url": {"url": "data:" + "a" * 10**6}}, "no URL is fetched"),
    ],
)
def test_what_is_no_image_in_base64_is_refused_at_its_place(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(OptionError, match=r"^messages\[1\]\.content\[1\]\.image_url.*" + cause):
        take_images([user(text("a")), user(text("b"), {"type": "image_url", **given})])


def test_too_many_images_are_refused() -> None:
    with pytest.raises(OptionError, match=rf"messages\[0\].content\[{MOST_IMAGES}\]: more than {MOST_IMAGES} images"):
        take_images([user(*[part_of(b"1")] * (MOST_IMAGES + 1))])


def test_too_large_an_image_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rest_local.chat.images.MAX_BYTES", 30)
    with pytest.raises(OptionError, match="more than 30 bytes"):
        take_images([user(part_of(b"1" * 40))])
