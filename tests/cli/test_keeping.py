"""`rest-local index check`, and what reaches a terminal."""

from pathlib import Path

import numpy as np
import pytest
from index_calls import answer, call

from rest_local.errors import DatastoreNotFound
from rest_local.retrieval import VocabularyId, build, datastore_path
from rest_local.retrieval.documents import Document, FileState
from rest_local.retrieval.format import file_name
from rest_local.retrieval.home import read_manifest

VOCABULARY = VocabularyId("b0" * 32, 256, "bytes")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build the datastore "mine" of three files in three segments. Two files have the same content."""
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    documents = []
    for name, text in (("a.py", "alpha = 1\n" * 9), ("sub/b.py", "beta = 2\n" * 5), ("sub/Makefile", "all:\n")):
        file = source / name
        file.write_text(text)
        states = [_state(file, file.stat().st_mtime_ns)]
        if name == "a.py":
            (source / "copy.py").write_text(text)
            states.append(_state(source / "copy.py", 0))
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        documents.append(Document(str(file), tokens, tuple(states)))
    recipe = {"sources": [{"kind": "walk", "paths": [str(source)]}]}
    build(datastore_path("mine"), documents, vocabulary=VOCABULARY, recipe=recipe, segment_tokens=10)
    return source


def _state(file: Path, mtime_ns: int) -> FileState:
    return FileState(str(file), file.stat().st_size, mtime_ns, b"s" * 32)


def damage(number: int, kind: str) -> Path:
    path = datastore_path("mine")
    file = path / file_name(read_manifest(path).segments[number].name, kind)
    file.write_bytes(b"?" + file.read_bytes()[1:])
    return file


def test_check_lists_every_fault_and_exits_with_1(corpus):
    assert call("check", "mine").exit_code == 0
    assert "no damage" in call("check", "mine", "--thorough").stdout
    files = [damage(0, "order"), damage(1, "tokens")]
    orphan = datastore_path("mine") / f"{'0' * 16}.order.bin"
    orphan.write_bytes(b"x")
    done = call("check", "mine")
    assert done.exit_code == 1
    assert all(f"{file}: does not match its checksum" in done.stdout for file in files)
    assert "2 faults; `rest-local index rebuild mine` replaces it" in done.stdout
    assert not orphan.exists(), "a killed process left it"
    found = answer("check", "mine")
    assert not found["ok"]
    assert [fault["kind"] for fault in found["faults"]] == ["checksum", "checksum"]
    assert call("check", "mine", "--vocabulary", "bytes").exit_code == 1
    with pytest.raises(DatastoreNotFound):
        call("check", "nothing")


def test_control_characters_of_a_file_reach_no_terminal(corpus):
    evil = "\x1b[31mred\n"
    tokens = np.array([1, 2, 3], np.int32)
    identity = VocabularyId("b0" * 32, 256, evil)
    state = FileState(evil, 1, 1, b"s" * 32)
    build(
        datastore_path("mine"),
        [Document(evil, tokens, (state,))],
        vocabulary=identity,
        recipe={"sources": [{"kind": "walk", "paths": [evil]}]},
    )
    for arguments in (("info", "mine"), ("list",), ("check", "mine")):
        assert call(*arguments).stdout.replace("\n", "").isprintable()
