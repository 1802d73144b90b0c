"""The demo's datastore is built once and again if it is wrong; other datastores are not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from rest_local.bench import demo
from rest_local.llama.model import Model
from rest_local.paths import demo_model
from rest_local.retrieval import Datastore, VocabularyId
from rest_local.retrieval.building.indexing import build_datastore


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    folder = tmp_path / "library"
    (folder / "test").mkdir(parents=True)
    for name in ("queue.py", "csv.py", "test/unit.py"):  # csv is held out
        (folder / name).write_text(f"import os  # {name}\n")
    monkeypatch.setattr(demo, "standard_library", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def vocabulary() -> VocabularyId:
    with Model.open(demo_model(), vocab_only=True) as model:
        return VocabularyId(*model.vocabulary.identity)


def test_it_holds_the_library_and_is_built_once(library: Path, vocabulary: VocabularyId) -> None:
    messages: list[str] = []
    path = demo.ensure(demo_model(), messages.append)
    assert path.name == f"demo-stdlib-{vocabulary.hash[:12]}"
    with Datastore.open(path) as store:
        assert store.document_names() == [str(library / "queue.py")]
    assert demo.ensure(demo_model(), messages.append) == path
    assert len(messages) == 1
    assert path.name in messages[0]


@pytest.mark.parametrize("wrong", ["damaged", "of another interpreter"])
def test_a_wrong_datastore_of_the_demo_is_built_again(library: Path, wrong: str) -> None:
    path = demo.ensure(demo_model())
    if wrong == "damaged":
        (path / "manifest.json").write_text("{}")
    else:
        with Model.open(demo_model(), vocab_only=True) as model:
            recipe = {"kind": demo.KIND, "python": "2.7"}
            build_datastore(path, [library], vocabulary=model.vocabulary, recipe=recipe)
    messages: list[str] = []
    demo.ensure(demo_model(), messages.append)
    assert len(messages) == 1
    with Datastore.open(path) as store:
        assert store.check() > 0
        assert store.manifest.recipe["python"] != "2.7"
