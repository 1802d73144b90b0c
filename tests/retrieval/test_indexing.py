"""One call from paths to a datastore: its content, its recipe, its report and its errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from edited import Bytes

from rest_local.errors import CorpusEmpty, InputInvalid
from rest_local.retrieval import Datastore, build_datastore


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.py").write_text("alpha")
    (folder / "b.py").write_text("be")
    (folder / "c.txt").write_text("c")
    (folder / "d.py").write_bytes(b"\0")
    return folder


def test_files_become_a_named_datastore_with_its_recipe(source: Path, tmp_path: Path) -> None:
    reported: Counter[str] = Counter()

    def progress(what: str, tokens: int) -> None:
        reported[what] += tokens

    built = build_datastore(
        "mine", [source], vocabulary=Bytes(), include=["*.py"], recipe={"why": "a test"}, progress=progress
    )
    assert built.path == tmp_path / "home" / "mine"
    assert (built.documents, built.tokens) == (2, 5 + 2 + 2)  # a separator after each document
    assert dict(built.skipped.counts) == {"not a wanted kind of file": 1, "binary": 1}
    assert reported == {"read": 8, "tokenized": 7, "sorted": 9, "written": 9}
    with Datastore.open(built.path, vocabulary_hash=Bytes.hash) as store:
        assert [Path(name).name for name in store.document_names()] == ["a.py", "b.py"]
        info = store.info()
        assert (info["tokens"], info["bytes"]) == (built.tokens, built.bytes)
        assert info["vocabulary"] == {"hash": Bytes.hash, "size": 256, "name": "bytes"}
        assert info["recipe"] == {
            "sources": [
                {
                    "kind": "walk",
                    "paths": [str(source)],
                    "include": ["*.py"],
                    "exclude": [],
                    "allow_secrets": False,
                    "max_file_size": 1 << 20,
                }
            ],
            "why": "a test",
        }
    assert json.loads(json.dumps(built.to_dict()))["skipped"] == dict(built.skipped.counts)


def test_an_empty_corpus_names_the_skipped_files_and_keeps_the_old_datastore(source: Path) -> None:
    before = build_datastore("mine", [source], vocabulary=Bytes())
    with pytest.raises(CorpusEmpty, match=r"d\.py: no text to index \(1 binary\)"):
        build_datastore("mine", [source / "d.py"], vocabulary=Bytes())
    with pytest.raises(InputInvalid, match="no such file"):
        build_datastore("mine", [source / "gone"], vocabulary=Bytes())
    with Datastore.open(before.path) as store:
        assert store.manifest == before.manifest
