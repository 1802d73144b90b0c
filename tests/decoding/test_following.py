"""New commits of datastores reach an engine while it runs: unit tests of the follower, and whole engines."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_sources import always_draft

from rest_local import Engine
from rest_local.decoding.following import Follower, OpenDatastores
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.planning.auto import Auto
from rest_local.retrieval import Datastore, VocabularyId, build
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.staging import remove

TinyModel = Callable[..., Path]
TOY = VocabularyId("ab" * 32, 1000, "toy")
PROMPT = "for number in range(10): print(number)\n" * 3


class StubEngine:
    """What a follower sees of an engine; `take` is its next step."""

    def __init__(self, *paths: Path) -> None:
        self.model: Any = SimpleNamespace(vocabulary=SimpleNamespace(identity=TOY), options=SimpleNamespace(mmap=True))
        self.datastores = OpenDatastores([Datastore.open(path) for path in paths])

    def take(self) -> list[Datastore]:
        self.datastores.take()
        return self.datastores.in_use


def write(path: Path, name: str) -> None:
    """Commit one more document."""
    held: list[str] = []
    if path.exists():
        with Datastore.open(path, vocabulary_hash=TOY.hash) as store:
            held = store.document_names()
    build(path, [(each, np.array([1, 2, 3])) for each in (*held, name)], vocabulary=TOY)


def names(engine: StubEngine) -> list[list[str]]:
    return [sorted(store.document_names()) for store in engine.datastores.in_use]


def followed(path: Path) -> tuple[StubEngine, Follower]:
    """Return an engine, and a follower of its datastore that has looked once."""
    engine = StubEngine(path)
    follower = Follower(engine.model, engine.datastores)
    follower.look()
    return engine, follower


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(tmp_path / "code", "a")
    return tmp_path / "code"


def test_a_new_commit_is_used_from_the_next_step_on(store: Path) -> None:
    engine = StubEngine(store)
    (before,) = engine.datastores.in_use
    follower = Follower(engine.model, engine.datastores)
    follower.look()
    assert not engine.datastores.has_news, "nothing is new"
    write(store, "b")
    follower.look()
    assert names(engine) == [["a"]]
    assert before.segments, "a running lookup may still use it"
    engine.take()
    assert names(engine) == [["a", "b"]]
    assert before.segments
    follower.look()
    assert not before.segments, "closed outside of the engine's thread"


def test_commits_of_an_idle_engine_do_not_pile_up(store: Path) -> None:
    engine, follower = followed(store)
    opened = []
    for name in "bcd":
        write(store, name)
        follower.look()
        opened += [other for other in engine.datastores.current() if other not in opened]
    assert [bool(other.segments) for other in opened] == [False, False, True]
    engine.take()
    assert names(engine) == [["a", "b", "c", "d"]]


def test_a_damaged_commit_leaves_the_old_one_with_one_warning(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, follower = followed(store)
    good = (store / MANIFEST).read_bytes()
    (store / MANIFEST).write_bytes(good.replace(b'"toy"', b'"tox"'))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            follower.look()
            engine.take()
    assert names(engine) == [["a"]]
    assert len(engine.datastores.in_use[0].rows([1, 2], 4, 4)) == 1
    assert len(caplog.records) == 1
    assert "continuing with the version that was open" in caplog.text
    (store / MANIFEST).write_bytes(good)
    write(store, "b")
    follower.look()
    engine.take()
    assert names(engine) == [["a", "b"]]


def test_what_could_not_be_opened_is_tried_again_later(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause that is not in the manifest may go away without another commit."""
    engine, follower = followed(store)
    write(store, "b")
    (missing,) = store.glob("*.order.bin")
    kept = missing.with_name("kept")
    missing.rename(kept)
    follower.look()
    assert not engine.datastores.has_news
    kept.rename(missing)
    follower.look()
    assert not engine.datastores.has_news, "not at every look"
    clock = SimpleNamespace(monotonic=lambda: 1e12)  # not that of event loops, whose timers would never end
    monkeypatch.setattr("rest_local.decoding.following.time", clock)
    follower.look()
    engine.take()
    assert names(engine) == [["a", "b"]]


def test_a_datastore_that_is_built_later_is_opened_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later"
    engine = StubEngine()
    follower = Follower(engine.model, engine.datastores, [path])
    follower.look()
    build(path, [("x", np.arange(5))], vocabulary=VocabularyId("cd" * 32, 1000, "other"))
    follower.look()
    assert not engine.datastores.has_news, "its first commit is for another vocabulary"
    assert not caplog.records
    build(path, [("a", np.arange(5))], vocabulary=TOY)
    follower.look()
    engine.take()
    assert names(engine) == [["a"]]
    write(path, "b")
    follower.look()
    engine.take()
    assert names(engine) == [["a", "b"]]


def test_a_removed_datastore_is_closed_and_used_again_when_it_is_back(store: Path) -> None:
    engine, follower = followed(store)
    remove(store)
    follower.look()
    assert engine.take() == []
    write(store, "new")
    follower.look()
    engine.take()
    assert names(engine) == [["new"]]


@pytest.fixture
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    monkeypatch.setattr(Auto, "learn", lambda self, drafted, tokens, done: None)


@pytest.fixture
def following(tmp_path: Path, tiny_model: TinyModel) -> Iterator[Engine]:
    """Yield an engine that follows a datastore without anything to draft."""
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, exact=True) as engine:
        identity = engine.model.vocabulary.identity
        build(tmp_path / "live", [("nothing", np.array([5, 6, 7]))], vocabulary=identity)
    with Engine.load(
        tiny_model("llama", quant="Q8_0"), n_ctx=512, exact=True, datastores=[tmp_path / "live"], follow=True
    ) as engine:
        yield engine


def save(engine: Engine, tokens: list[int]) -> None:
    """Write a document into the datastore of the engine, as another process would."""
    (path,) = engine.config.datastores
    build(path, [("saved", np.array(tokens))], vocabulary=VocabularyId(*engine.model.vocabulary.identity))


@pytest.mark.usefixtures("keen")
def test_a_saved_file_is_drafted_from_while_the_request_runs(following: Engine) -> None:
    engine = following
    plain = engine.generate(PROMPT, max_tokens=120, policy="off").wait()
    said = plain.tokens
    stream = engine.generate(PROMPT, max_tokens=120)
    pieces = iter(stream)
    while len(stream.result.tokens) < 20:
        next(pieces)
    assert "datastore" not in stream.result.draft.by_source
    cached = engine.decoder.slots[0].n_past
    save(engine, [*engine.tokenize(PROMPT), *said])
    assert engine.follower is not None
    engine.follower.look()
    list(pieces)
    assert stream.result.tokens == said
    assert stream.result.draft.by_source["datastore"].accepted > 20
    assert cached <= engine.decoder.slots[0].n_past, "the cells stay"


def test_a_datastore_that_is_not_there_yet_can_be_awaited(tmp_path: Path, tiny_model: TinyModel) -> None:
    path = tmp_path / "later"
    with Engine(_config(tiny_model, path), lambda name, error, model: False) as engine, Service(engine) as service:
        assert engine.datastores.in_use == []
        build(path, [("a", np.arange(1, 9))], vocabulary=engine.model.vocabulary.identity)
        assert engine.follower is not None
        engine.follower.look()
        stream = service.submit(Request(engine.tokenize(PROMPT), max_tokens=3, datastores=("later",)))
        assert stream.wait(60).tokens
        assert [store.path for store in engine.datastores.in_use] == [path]
    shutil.rmtree(path)


def _config(tiny_model: TinyModel, path: Path) -> Any:
    from rest_local.decoding.config import EngineConfig

    return EngineConfig(model=tiny_model("llama", quant="Q8_0"), n_ctx=256, datastores=(path,), follow=True)
