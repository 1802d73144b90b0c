"""What one engine said, the next drafts from: per model, only where asked for, and never a fault of the answer."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_sources import always_draft

from rest_local import Engine, Sampling
from rest_local.decoding.opening import key_of
from rest_local.decoding.stream import Result
from rest_local.llama.model import Model
from rest_local.retrieval import Datastore, history_home, list_histories
from rest_local.retrieval import history as history_module

TinyModel = Callable[..., Path]
PROMPT = "for number in range(10): print(number)\n" * 3


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "history"


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", quant="Q8_0")


@pytest.fixture
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whatever there is, however little it promises."""
    always_draft(monkeypatch)


def load(model: Path, **options: object) -> Engine:
    return Engine.load(model, n_ctx=512, exact=True, **options)  # type: ignore[arg-type]


def finish(engine: Engine, n: int = 60, **options: object) -> Result:
    return engine.generate(PROMPT, max_tokens=n, **options).wait()  # type: ignore[arg-type]


def kept() -> list[list[int]]:
    (name,) = [listed.name for listed in list_histories()]
    with Datastore.open(history_home() / name) as store:
        return [tokens.tolist() for i in range(len(store.segments)) for _, tokens, _ in store.documents(i)]


@pytest.mark.usefixtures("keen")
def test_the_next_engine_drafts_from_earlier_answers(model: Path) -> None:
    with load(model, history=True) as engine:
        first = finish(engine)
        assert "history" not in first.draft.by_source
    assert kept() == [first.tokens]
    with load(model, history=True) as engine:
        second = finish(engine)
        assert second.tokens == first.tokens
        assert second.draft.by_source["history"].accepted > 20
        third = finish(engine, sampling=Sampling(temperature=0.9, seed=3))
    assert kept() == [first.tokens, third.tokens]
    with load(model, history=True) as engine:
        again = finish(engine, sampling=Sampling(temperature=0.9, seed=3))
        assert again.tokens == third.tokens
        assert again.draft.by_source["history"].accepted > 10


def test_nothing_is_kept_unless_asked_for(model: Path, home: Path) -> None:
    with load(model) as engine:
        finish(engine, 10)
    assert not home.exists()
    with load(model, history=True) as engine:
        assert finish(engine, 0).tokens == []
    assert not home.exists()


def test_a_cancelled_answer_is_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "COMMIT_TOKENS", 1)
    with load(model, history=True) as engine:
        stream = engine.generate(PROMPT, max_tokens=60)
        next(iter(stream))
        stream.cancel()
        whole = finish(engine, 20)
    assert kept() == [stream.result.tokens, whole.tokens]


def test_a_model_that_was_moved_keeps_its_history_and_another_has_its_own(
    model: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with load(model, history=True) as engine:
        finish(engine, 10)
    moved = tmp_path / model.name
    shutil.copy(model, moved)
    with Model.open(model) as here, Model.open(moved) as there, Model.open(tiny_model("qwen2", quant="Q8_0")) as other:
        assert key_of(here) == key_of(there)
        assert key_of(here) != key_of(other)
        assert [listed.name for listed in list_histories()] == [key_of(here)]
        (listed,) = list_histories()
        assert listed.model == here.name


@pytest.mark.usefixtures("keen")
def test_a_damaged_history_costs_one_warning_and_no_token(
    model: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(model, history=True) as engine:
        first = finish(engine)
    (folder,) = home.iterdir()
    (folder / "manifest.json").write_bytes(b"{}")
    with caplog.at_level(logging.WARNING), load(model, history=True) as engine:
        assert finish(engine).tokens == first.tokens
    assert [record.name for record in caplog.records] == ["rest_local.history"]
    assert all("set aside" in record.message for record in caplog.records)
