"""Images by Ollama's API: base64 without a type, in messages and with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ollama
import pytest
from live import Live, served
from support.images import picture

from models import tiny_mmproj
from rest_local.decoding.engine import Engine
from rest_local.server.app import Serving
from rest_local.server.settings import Settings

SAME = {"temperature": 0, "num_predict": 8}
DEMO_WIDTH = 512


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    """Of a server with the demo model and a projector of random weights."""
    path = tiny_mmproj.write(tmp_path_factory.mktemp("projector") / "mmproj.gguf", DEMO_WIDTH)
    serving = Serving(Settings(port=0), "demo", lambda: Engine.load(slots=2, mmproj=path), drain_seconds=5)
    with served(serving) as live, ollama.Client(host=live.url) as client:
        assert serving.loaded.wait(300)
        yield client


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_part_of_a_message(client: ollama.Client, form: str) -> None:
    def counted(*images: bytes) -> int:
        message = {"role": "user", "content": "What is this?", "images": list(images)}
        return client.chat("demo", [message], options=SAME).prompt_eval_count or 0

    plain, one, two = counted(), counted(picture(1, form=form)), counted(picture(1, form=form), picture(2, form=form))
    assert one > plain + 4
    assert two - one == one - plain


def test_an_image_is_part_of_a_prompt(client: ollama.Client) -> None:
    plain = client.generate("demo", "What is this?", options=SAME)
    seen = client.generate("demo", "What is this?", images=[picture(1)], options=SAME)
    assert seen.prompt_eval_count > plain.prompt_eval_count
    assert plain.context is not None
    assert seen.context is None, "an image has no ids that could be sent back"
    assert client.generate("demo", images=[picture(1)], options=SAME).done_reason != "load"


def test_the_model_is_shown_to_see(client: ollama.Client) -> None:
    assert "vision" in client.show("demo").capabilities


def test_without_a_projector_images_are_400(demo: Live, scripted: Callable[..., Live]) -> None:
    for live in (demo, scripted()):
        with ollama.Client(host=live.url) as blind:
            assert "vision" not in blind.show("demo").capabilities
            with pytest.raises(ollama.ResponseError, match="projector") as caught:
                blind.generate("demo", "What is this?", images=[picture(1)])
            assert caught.value.status_code == 400
