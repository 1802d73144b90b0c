"""Fixtures of the command line's tests: an engine that is not there, and a call of one command line."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_cli_engine import HELLO, FakeEngine, FakePiece
from support.command import call  # noqa: F401 - a fixture

from rest_local.cli import opening
from rest_local.decoding.config import EngineConfig
from rest_local.llama.sampling_defaults import SamplingDefaults


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeEngine]:
    """Return a function that puts a FakeEngine with the given scripts to every command."""

    def install(*scripts: list[FakePiece | BaseException], **fields: Any) -> FakeEngine:
        engine = FakeEngine([list(script) for script in scripts or (HELLO,)], **fields)

        def open_engine(config: EngineConfig, live: object = None) -> FakeEngine:
            engine.config, engine.closed, engine.sampling = config, False, SamplingDefaults(config.sampling)
            return engine

        monkeypatch.setattr(opening, "open_engine", open_engine)
        return engine

    return install


@pytest.fixture
def chat_engine(fake_engine: Callable[..., FakeEngine]) -> Callable[..., FakeEngine]:
    """Return `fake_engine` with a model that can chat."""

    def install(*scripts: list[FakePiece | BaseException], **fields: Any) -> FakeEngine:
        engine = fake_engine(*scripts, **fields)
        engine.model.chat_template = "fake"
        return engine

    return install
