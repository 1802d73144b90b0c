"""Images over HTTP. Formats, bombs and damage are in llama/test_picture.py, what an engine does with images in
decoding/test_images.py."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ollama
import pytest
from live import Live, served
from support.images import picture
from support.toy import demo_model

from models import tiny_mmproj
from rest_local.chat.images import part_of
from rest_local.decoding.engine import Engine
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
WIDTH = 512  # The demo model has this width.


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return []


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, engines: list[Engine]) -> Iterator[Live]:
    """Serve the demo model with a projector of random weights."""
    path = tiny_mmproj.write(tmp_path_factory.mktemp("projector") / "mmproj.gguf", WIDTH)

    def load() -> Engine:
        engines.append(Engine.load(demo_model(), slots=2, mmproj=path))
        return engines[0]

    serving = Serving(ServerSettings(port=0), "demo", load, drain_seconds=5)
    with served(serving) as live:
        assert serving.loaded.wait(300)
        yield live


def encoded(engines: list[Engine]) -> int:
    assert engines[0].projector is not None
    return engines[0].projector.encoded


def asking(*parts: Any, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8, "temperature": 0, **options}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def url(value: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": value}}


def test_an_image_is_part_of_the_prompt(seeing: Live) -> None:
    words, image = text("What is this?"), part_of(picture(101))
    without = seeing.post(CHAT, asking(words)).json()
    answered = seeing.post(CHAT, asking(words, image))
    assert answered.status_code == 200
    usage = answered.json()["usage"]
    assert usage["prompt_tokens"] == without["usage"]["prompt_tokens"] + 16
    assert answered.json()["choices"][0]["message"]["content"]


def test_requests_and_choices_with_one_image_encode_it_once(seeing: Live, engines: list[Engine]) -> None:
    before = encoded(engines)
    body = asking(text("What is this?"), part_of(picture(104)), n=3)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: seeing.post(CHAT, body).json(), range(4)))
    found = {choice["message"]["content"] for answer in answers for choice in answer["choices"]}
    assert len(found) == 1
    assert encoded(engines) == before + 1


def test_props_tell_whether_the_model_takes_images(seeing: Live, demo: Live) -> None:
    assert seeing.get("/props").json()["modalities"] == {"vision": True, "audio": False}
    assert demo.get("/props").json()["modalities"] == {"vision": False, "audio": False}


def refused(live: Live, body: dict[str, Any]) -> str:
    answer = live.post(CHAT, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "messages", "invalid_request_error")
    return str(error["message"])


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (url("file:///etc/passwd"), "no URL is fetched"),
        (url("data:image/png;base64," + base64.b64encode(b"no image").decode()), "no image"),
        (url("data:image/png;base64," + base64.b64encode(picture(1)[:200]).decode()), "cannot be decoded"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "'input_audio' are not supported"),
    ],
)
def test_what_is_no_image_is_refused(part: dict[str, Any], cause: str, seeing: Live) -> None:
    message = refused(seeing, asking(text("What is this?"), part))
    assert message.startswith("messages[0].content[1]")
    assert cause in message


def test_ids_of_images_are_no_tokens_of_other_calls(seeing: Live) -> None:
    for path, body in (
        ("/completion", {"prompt": [-1_073_741_824], "n_predict": 1}),
        ("/v1/completions", {"prompt": [-1_073_741_824], "max_tokens": 1}),
        ("/detokenize", {"tokens": [-1_073_741_824]}),
    ):
        assert seeing.post(path, body).status_code == 400


MESSAGES = "/v1/messages"


def block(data: bytes) -> dict[str, Any]:
    """Return Anthropic's block of an image."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def test_images_of_the_other_protocols_are_the_same_images(seeing: Live, engines: list[Engine]) -> None:
    data = base64.b64encode(picture(107)).decode()
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    before = encoded(engines)
    for path, body in {
        MESSAGES: asking(text("What is this?"), block(picture(107))),
        "/v1/responses": {"max_output_tokens": 4, "input": [{"role": "user", "content": [part]}]},
        "/api/chat": {
            "stream": False,
            "options": {"num_predict": 4},
            "messages": [{"role": "user", "content": "What is this?", "images": [data]}],
        },
    }.items():
        answer = seeing.post(path, body)
        assert answer.status_code == 200, (path, answer.text)
    assert encoded(engines) == before + 1


def test_images_of_ollama_are_part_of_the_prompt(seeing: Live, demo: Live) -> None:
    options = {"temperature": 0, "num_predict": 8}
    with ollama.Client(host=seeing.url) as client:
        plain = client.generate("demo", "What is this?", options=options)
        seen = client.generate("demo", "What is this?", images=[picture(1)], options=options)
        assert seen.prompt_eval_count == plain.prompt_eval_count + 16
        assert client.generate("demo", images=[picture(1)], options=options).done_reason != "load"
        assert "vision" in client.show("demo").capabilities
    with ollama.Client(host=demo.url) as blind:
        assert "vision" not in blind.show("demo").capabilities
        with pytest.raises(ollama.ResponseError, match="projector") as caught:
            blind.generate("demo", "What is this?", images=[picture(1)])
    assert caught.value.status_code == 400
