"""Images on the command line: `/image`, and the projector of `serve`."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cli_engine import HELLO, FakeEngine
from support.images import picture
from support.toy import demo_model

from rest_local.chat.images import part_of
from rest_local.cli.chat.commands import perform
from rest_local.cli.chat.talk import Talk, TalkOptions
from rest_local.cli.indexer import ASLEEP
from rest_local.cli.serve import Named, choice
from rest_local.decoding.config import AUTO_PROJECTOR, EngineConfig
from rest_local.errors import OptionError


class FakeProjector:
    """A projector that takes what begins as a PNG does."""

    def image(self, data: bytes) -> None:
        if not data.startswith(b"\x89PNG"):
            raise OptionError("the data is no image")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    return FakeEngine([list(HELLO)], projector=FakeProjector())


@pytest.fixture
def talk(engine: Any) -> Iterator[Talk]:
    with Talk(engine, TalkOptions({}, 100), interactive=True) as talk:
        yield talk


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "my image.png"
    path.write_bytes(picture(1))
    return path


def parts(talk: Talk) -> Any:
    return talk.conversation.messages[0]["content"]


def test_an_image_goes_with_the_next_message_alone(talk: Talk, engine: FakeEngine, image: Path, capsys: Any) -> None:
    perform(talk, f"/image '{image}'")
    assert capsys.readouterr().err == "my image.png goes with the next message\n"
    perform(talk, "What is this?")
    assert parts(talk) == [{"type": "text", "text": "What is this?"}, part_of(image.read_bytes())]
    assert base64.b64decode(parts(talk)[1]["image_url"]["url"].partition(",")[2]) == image.read_bytes()
    perform(talk, "And now?")
    assert talk.conversation.messages[2]["content"] == "And now?"
    assert len(engine.messages[-1]) == 3


def test_without_a_projector_the_option_is_named(talk: Talk, engine: FakeEngine, image: Path, capsys: Any) -> None:
    engine.projector = None
    perform(talk, f"/image {image}")
    assert "the model has no projector here, so it takes no images; give its --mmproj" in capsys.readouterr().err


def test_the_process_of_a_model_gets_a_path_that_does_not_depend_on_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Named("demo", demo_model(), True)
    for given, expected in (
        (Path("mmproj.gguf"), tmp_path / "mmproj.gguf"),
        (AUTO_PROJECTOR, AUTO_PROJECTOR),
        (None, None),
    ):
        made: Any = choice(model, EngineConfig(mmproj=given), ASLEEP, ())
        config = made.load.args[0]
        assert config.mmproj == expected
