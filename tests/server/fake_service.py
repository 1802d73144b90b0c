"""A service without a model: the test gives the pieces of its answers.

The vocabulary and the template are the demo model's own, so prompts, ids and log-probabilities have their real shapes.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from live import Live, served
from support.toy import demo_model

from rest_local.decoding.config import EngineConfig
from rest_local.decoding.engine import Engine
from rest_local.decoding.following import OpenDatastores
from rest_local.decoding.request import Predictions, Request
from rest_local.decoding.results import DraftStatistics, SourceCounts, Timings
from rest_local.decoding.stream import Piece, Result
from rest_local.errors import QueueFull, RestLocalError
from rest_local.llama.model import Model
from rest_local.llama.sampling_defaults import SamplingDefaults
from rest_local.server.app import Serving
from rest_local.server.settings import ServerSettings


@cache
def _model() -> Model:
    """Open the model once. A test changes attributes of its copy at most."""
    return Model.open(demo_model(), vocab_only=True)


class FakeEngine:
    """The part of an engine that the server reads."""

    tokenize, image_prompt = Engine.tokenize, Engine.image_prompt
    request = Engine.request

    def __init__(self, n_ctx: int = 512) -> None:
        self.model = copy(_model())
        self.n_ctx = n_ctx
        self.config, self.sampling = EngineConfig(), SamplingDefaults()
        self.datastores = OpenDatastores()
        self.projector = None
        self.decoder = SimpleNamespace(
            predictions=Predictions(self.model.vocabulary, n_ctx),
            generates=True,
            use_datastores=self.datastores.take,
        )

    def close(self) -> None:
        pass


class FakeStream:
    """A stream whose pieces and end come from the test."""

    def __init__(self, number: int, request: Request, vocabulary: Any, wake: Callable[[bool], None] | None) -> None:
        self.id, self.request = number, request
        self.result = Result()
        self.done, self.error = False, None
        self.cancelled = threading.Event()
        self.timings: dict[str, Any] = {}  # fields with other values than usual
        self._vocabulary, self._wake = vocabulary, wake or (lambda ended: None)
        self._pieces: deque[Piece] = deque()
        self._held = False

    def give(self, text: str, source: str = "target", origin: Any = None, **more: Any) -> None:
        tokens = tuple(self._vocabulary.tokenize(text).tolist())
        more["origins"] = (origin,) * len(tokens)
        self.result.text += text
        self.result.tokens += tokens
        self._pieces.append(Piece(text, tokens, (source,) * len(tokens), **more))
        self._wake(self.done)

    def end(self, reason: str = "stop", *, word: str = "", error: RestLocalError | None = None) -> None:
        if self.done:
            return
        usual = Timings(0, len(self.request.prompt), 1.0, len(self.result.tokens), 2.0, 7, 5)
        self.result.timings = replace(usual, **self.timings)
        self.result.finish_reason, self.result.stopping_word, self.error = reason, word, error
        self.result.draft = DraftStatistics(by_source={"prediction": SourceCounts(4, 3)})
        self.done = True
        self._wake(self.done)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let pieces that are given in the block arrive at its end, as from an engine faster than its reader."""
        self._held = True
        yield
        self._held = False
        self._wake(self.done)

    def poll(self) -> list[Piece]:
        pieces = []
        while self._pieces and not self._held:
            pieces.append(self._pieces.popleft())
        return pieces

    def cancel(self) -> None:
        self.cancelled.set()
        self.end("cancelled")


HELLO = ("Hello", " world")


class FakeService:
    """`answer`: the pieces of every answer, given at once; with None, the test gives them through `streams`."""

    def __init__(self, engine: FakeEngine, *, room: int = 64, answer: Iterable[str] | None = HELLO) -> None:
        self.engine, self.room, self.answer = engine, room, answer
        self.streams: list[FakeStream] = []
        self.closed = False
        self._news = threading.Condition()

    def forget(self, answer: Iterable[str] | None) -> None:
        """Forget everything for the next test, which gets this `answer`."""
        self.streams, self.answer = [], answer

    def submit_all(self, requests: Iterable[Request], wake: Callable[[bool], None] | None = None) -> list[FakeStream]:
        with self._news:
            if sum(not stream.done for stream in self.streams) >= self.room:
                raise QueueFull(self.room)
        return [self.submit(request, wake) for request in requests]

    def submit(self, request: Request, wake: Callable[[bool], None] | None = None) -> FakeStream:
        with self._news:
            stream = FakeStream(len(self.streams), request, self.engine.model.vocabulary, wake)
            self.streams.append(stream)
            self._news.notify_all()
        if self.answer is not None:
            for text in self.answer if request.max_tokens else ():
                stream.give(text)
            stream.end("stop" if request.max_tokens else "length")
        return stream

    def stream(self, number: int = 0) -> FakeStream:
        """Wait for the stream with this number, and return it."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.streams) > number, 30), "no such request came"
        return self.streams[number]

    def say(self, *texts: str, number: int = 0) -> None:
        """Answer the stream with this number whole."""
        for text in texts:
            self.stream(number).give(text)
        self.stream(number).end()

    def run(self, call: Callable[[Any], Any], timeout: float | None = None) -> Any:
        return call(self.engine)

    def slots(self) -> list[dict[str, Any]]:
        return [{"id": 0, "state": "idle", "n_past": 0, "request": None}]

    def statistics(self) -> dict[str, Any]:
        names = (
            "requests", "prompt_tokens", "predicted_tokens", "steps", "drafts", "drafted", "accepted", "lookups",
            "lookups_skipped", "cached_tokens", "longest", "passes",
        )  # fmt: skip
        more = {
            "prompt_seconds": 1.0, "predicted_seconds": 0.0, "running": 0, "waiting": 0, "cells_used": 0, "cells": 1,
        }  # fmt: skip
        return dict.fromkeys(names, 3) | more

    def close(self, drain_seconds: float = 0.0) -> None:
        self.closed = True
        for stream in self.streams:
            stream.cancel()


def origin(**fields: Any) -> Any:
    """Return the origin of a drafted token."""
    return SimpleNamespace(
        **{"source": "datastore", "probability": 0.5, "match": 4, "file": "a.py", "line": 3} | fields
    )


@contextlib.contextmanager
def scripted_server(
    *, room: int = 64, answer: Iterable[str] | None = HELLO, n_ctx: int = 512, drain_seconds: int = 5, **settings: Any
) -> Iterator[Live]:
    """Run a server with a scripted service."""
    made: list[FakeService] = []

    def service(engine: Any, queue: int) -> Any:
        made.append(FakeService(engine, room=room, answer=answer))
        return made[0]

    serving = Serving(
        replace(ServerSettings(port=0), **settings),
        "demo",
        lambda: FakeEngine(n_ctx),  # type: ignore[arg-type, return-value]
        start=service,
        drain_seconds=drain_seconds,
    )
    with served(serving) as live:
        assert serving.loaded.wait(60)
        live.service = made[0]
        yield live
