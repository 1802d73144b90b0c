"""Conversations that come back after the server was stopped, and what a key finds of those of another."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live import Live, served

from rest_local.decoding.engine import Engine
from rest_local.kv_cache import sessions
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings

TEXT = "def first(values):\n    return values[0]\n\n\n" * 14
TWO = {"keys": (b"one", b"two")}  # Both are on the loopback.
Start = Callable[..., Live]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 256)


@pytest.fixture
def start(tiny_model: Callable[..., Path]) -> Iterator[Start]:
    """Return `start(slots=2, **settings)`, which starts a server with a tiny model."""
    with ExitStack() as stack:

        def begin(*, slots: int = 2, **options: Any) -> Live:
            engine: dict[str, Any] = {"slots": slots, "n_ctx": 1024, "sessions": 1 << 30, "policy": "off", "threads": 1}

            def load() -> Engine:
                return Engine.load(tiny_model("llama"), **engine)

            settings = replace(ServerSettings(port=0, aliases=("*",)), **options)
            serving = Serving(settings, "model", load, drain_seconds=5)
            live = stack.enter_context(served(serving))
            assert serving.loaded.wait(300)
            return live

        yield begin


def complete(live: Live, key: str, prompt: str = TEXT) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True}
    answer = live.post("/completion", body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_another_key_restores_nothing(start: Start) -> None:
    """No answer tells what was in memory."""
    options: dict[str, Any] = {**TWO, "allowed_hosts": ("example.org",), "slots": 1}
    live = start(**options)
    complete(live, "one")
    live.stop()

    def restored(key: str) -> int:
        live = start(**options)
        found = complete(live, key)
        engine = live.serving.state.engine
        assert engine is not None
        n = int(engine.statistics()["cached_tokens"])
        assert "cache_n" not in found["timings"]
        live.stop()
        return n

    assert restored("two") == 0
    assert restored("one") > 256
    assert restored("two") > 256, "its own"


def test_keys_are_other_users_on_the_loopback_too(start: Start) -> None:
    """A proxy on this machine may send the requests of others as its own."""
    live = start(**TWO)
    complete(live, "one")
    assert "cache_n" not in complete(live, "one")["timings"]
    assert all("n_past" not in slot for slot in live.get("/slots", headers={"x-api-key": "two"}).json())


def test_a_key_finds_nothing_of_another_in_memory(start: Start) -> None:
    """If counts are shown at all, they are those of the key."""
    live = start(**TWO, statistics=True)
    said = complete(live, "one")["content"]
    assert complete(live, "two")["timings"]["cache_n"] == 0
    assert complete(live, "two")["timings"]["cache_n"] > 256
    again = complete(live, "one")
    assert (again["content"], again["timings"]["prompt_n"]) == (said, 1)
    assert complete(live, "two", TEXT + "#")["timings"]["cache_n"] > 256, "its own"
