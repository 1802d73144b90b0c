"""`rest-local index` with a byte vocabulary in place of a model's."""

import json
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from index_calls import ByteVocabulary, answer, call, replace_models

from rest_local.cli import terminal
from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreExists, DatastoreNotFound, OptionError
from rest_local.retrieval import build_from_texts, datastore_path
from rest_local.retrieval.format import sealed


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    replace_models(monkeypatch, tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("import os\n\ndef alpha():\n    return os.getcwd()\n")
    (source / "b.py").write_text("def beta():\n    return os.getpid()\n")
    (source / "c.py").write_bytes(b"\0\1")
    return source


def test_build_info_list_check_remove(corpus):
    built = answer("build", corpus, "-o", "mine")
    assert built["documents"] == 2
    assert built["skipped"] == {"binary": 1}
    (info,) = answer("info", "mine")["indexes"]
    assert [source["paths"] for source in info["recipe"]["sources"]] == [[str(corpus)]]
    assert info["tokens"] == built["tokens"]
    assert [row["name"] for row in answer("list")["datastores"]] == ["mine"]
    assert answer("check", "mine")["ok"] is True
    for arguments in (("info", "mine"), ("list",), ("check", "mine")):
        assert "mine" in call(*arguments).stdout
    assert answer("remove", "mine", "--yes")["removed"].endswith("mine")
    assert answer("list")["datastores"] == []
    assert "no datastores" in call("list").stdout
    with pytest.raises(DatastoreNotFound):
        call("remove", "mine", "--yes")


def test_search_tells_match_places_files_lines_and_continuations(corpus):
    call("build", corpus, "-o", "mine")
    found = answer("search", "mine", "x    return os.get")
    assert found["matched"] == "    return os.get"
    assert found["places"] == 2
    assert {(Path(file["name"]).name, file["line"]) for file in found["files"]} == {("a.py", 4), ("b.py", 2)}
    assert {row["text"] for row in found["continuations"][:2]} == {"cwd()\n", "pid()\n"}
    printed = call("search", "mine", "os.getc").stdout
    assert "a.py:4" in printed
    assert "'wd()\\n'" in printed
    assert answer("search", "mine", "~")["places"] == 0


def test_secrets_are_named(corpus):
    (corpus / "credentials.py").write_text("x = 1\n")
    assert "credentials.py" in call("build", corpus).stdout
    assert answer("build", corpus, "--allow-secrets", "--replace")["documents"] == 3


class WordVocabulary(ByteVocabulary):
    """A vocabulary in which a dot belongs to the word after it, as in most."""

    name, size, hash = "words", 5000, "d0" * 32
    words: ClassVar[list[str]] = []

    def tokenize(self, text: str) -> np.ndarray:
        found = re.findall(r"\.\w+| ?\w+|\W", text)
        self.words += [word for word in found if word not in self.words]
        return np.array([self.words.index(word) for word in found], np.int32)

    def piece(self, token: int) -> bytes:
        return self.words[token].encode()


def test_a_text_that_ends_inside_a_token_finds_what_agrees_before(corpus, monkeypatch):
    replace_models(monkeypatch, corpus.parent, lambda path: WordVocabulary())
    (corpus / "d.py").write_text("x = self.y\nfor key, value in self.items():\n    pass\nself.\n")
    call("build", corpus, "-o", "mine")
    found = answer("search", "mine", "for key, value in self.")
    assert (found["matched"], found["left_off"]) == ("for key, value in self", ".")
    assert (found["tokens"], found["match"], found["places"]) == (7, 6, 1)
    assert [(Path(file["name"]).name, file["line"]) for file in found["files"]] == [("d.py", 2)]
    assert found["continuations"][0]["text"].startswith(".items():")
    assert "left off: '.'" in call("search", "mine", "for key, value in self.").stdout
    whole = answer("search", "mine", "    pass\nself.")
    assert (whole["matched"], whole["left_off"]) == ("    pass\nself.", "")
    assert "left off" not in call("search", "mine", "    pass\nself.").stdout


def test_a_search_in_damaged_files_is_a_clear_error(corpus):
    path = Path(answer("build", corpus, "-o", "mine")["path"])
    packed = b"".join(bytes([0, byte]) for byte in reversed(b"def beta"))
    for kind, word in (
        ("order", "outside its text"),
        ("documents", "document"),
        ("tokens", "ids outside the vocabulary"),
    ):
        (file,) = path.glob(f"*.{kind}.bin")
        data = file.read_bytes()
        if kind == "tokens":  # some before the match, which have to be decoded to tell its line
            assert packed in data
            file.write_bytes(data.replace(packed, b"\x01\xfe" * 8))
        else:
            file.write_bytes(data[:24] + b"\xff" * (len(data) - 24))
        with pytest.raises(DatastoreCorrupt, match=word):
            call("search", "mine", "os.getpid()\n")
        file.write_bytes(data)
    assert answer("search", "mine", "os.getpid()\n")["places"] == 1


def test_nothing_from_a_file_reaches_the_terminal_with_its_control_characters(corpus):
    path = Path(answer("build", corpus, "-o", "mine")["path"])
    fields = json.loads((path / "manifest.json").read_bytes())
    evil = "\x1b[31mred\x07\r"
    fields["created"] = fields["vocabulary"]["name"] = evil
    fields["recipe"] = {"sources": [{"kind": "walk", "paths": [evil]}], "model": evil, evil: {evil: [evil]}}
    del fields["sha256"]
    (path / "manifest.json").write_bytes(sealed(fields))
    for arguments in (("info", "mine"), ("list",), ("search", "mine", "os.getpid"), ("check", "mine")):
        printed = call(*arguments).stdout
        assert printed.replace("\n", "").isprintable()
    assert call("info", "mine").stdout.count("red") >= 5
    assert answer("info", "mine")["indexes"][0]["recipe"]["model"] == evil


def test_check_lists_every_fault_and_exits_with_1(corpus):
    path = Path(answer("build", corpus, "-o", "mine")["path"])
    assert "no damage" in call("check", "mine").stdout
    files = [file for kind in ("order", "tokens") for file in path.glob(f"*.{kind}.bin")]
    for file in files:
        file.write_bytes(b"?" + file.read_bytes()[1:])
    orphan = path / f"{'0' * 16}.order.bin"
    orphan.write_bytes(b"x")
    done = call("check", "mine")
    assert done.exit_code == 1
    assert all(f"{file}: does not match its checksum" in done.stdout for file in files)
    assert "2 faults; `rest-local index rebuild mine` replaces it" in done.stdout
    assert not orphan.exists(), "a killed process left it"
    found = answer("check", "mine")
    assert (found["ok"], [fault["kind"] for fault in found["faults"]]) == (False, ["checksum", "checksum"])
    assert call("check", "mine", "--vocabulary", "bytes").exit_code == 1
    with pytest.raises(DatastoreNotFound):
        call("check", "nothing")


@pytest.fixture
def other(monkeypatch):
    """Return `other()`, which changes the model to one of another vocabulary, and back."""

    def change():
        changed = ByteVocabulary.hash == "b0" * 32
        monkeypatch.setattr(ByteVocabulary, "hash", ("c1" if changed else "b0") * 32)
        monkeypatch.setattr(ByteVocabulary, "name", "others" if changed else "bytes")

    return change


def vocabularies() -> list[tuple[str, int]]:
    return [(row["vocabulary"]["name"], row["tokens"]) for row in answer("list")["datastores"]]


def test_a_name_holds_an_index_for_each_vocabulary(corpus, other):
    size = answer("build", corpus, "-o", "mine")["tokens"]
    other()
    (corpus / "d.py").write_text("more = 1\n")
    assert answer("rebuild", "mine")["documents"] == 3
    assert vocabularies() == [("bytes", size), ("others", size + 10)]
    sources = [row["recipe"]["sources"] for row in answer("info", "mine")["indexes"]]
    assert [source["paths"] for (source,) in sources] == [[str(corpus)]] * 2
    assert answer("search", "mine", "more = ")["places"] == 1
    other()
    assert answer("search", "mine", "more = ")["match"] < 7
    printed = call("list").stdout
    assert printed.splitlines()[0].split() == ["NAME", "TOKENS", "SIZE", "VOCABULARY"]
    assert printed.count("mine") == 2
    assert "c1c1c1c1 others" in printed
    assert answer("check", "mine")["ok"] is True


def test_nothing_is_replaced_or_deleted_without_being_asked_to(corpus, other):
    call("build", corpus, "-o", "mine")
    before = vocabularies()
    (corpus / "d.py").write_text("more = 1\n")
    for arguments in (("build", corpus, "-o", "mine"), ("rebuild", "mine")):
        with pytest.raises(DatastoreExists, match="replace"):
            call(*arguments)
    with pytest.raises(OptionError, match="--yes"):
        call("remove", "mine")
    assert vocabularies() == before
    assert answer("rebuild", "mine", "--replace")["documents"] == 3
    other()
    assert answer("build", corpus / "a.py", "-o", "mine")["documents"] == 1, "another vocabulary replaces nothing"
    assert len(vocabularies()) == 2


def test_at_a_terminal_a_question_is_asked_first(corpus, monkeypatch):
    call("build", corpus, "-o", "mine")
    before = vocabularies()
    (corpus / "d.py").write_text("more = 1\n")
    monkeypatch.setattr(terminal, "can_ask", lambda: True)

    def said(word, *arguments):
        done = call(*arguments, stdin=word)
        return done.exit_code, done.stderr

    code, asked = said("n\n", "build", corpus, "-o", "mine")
    assert (code, vocabularies()) == (1, before)
    assert f"tokens of {corpus}" in asked
    assert asked.endswith("nothing was changed\n")
    assert said("\n", "build", corpus, "-o", "mine")[0] == 1, "no is the default"
    assert said("y\n", "build", corpus, "-o", "mine")[0] == 0
    assert vocabularies() != before
    code, asked = said("n\n", "remove", "mine")
    assert (code, len(vocabularies())) == (1, 1)
    assert "bytes: " in asked
    assert said("y\n", "remove", "mine")[0] == 0
    assert vocabularies() == []


def test_one_vocabulary_is_removed(corpus, other):
    call("build", corpus, "-o", "mine")
    other()
    call("rebuild", "mine")
    for wrong in ("none", ""):
        with pytest.raises(OptionError, match="give one of: bytes b0b0b0b0b0b0, others c1c1c1c1c1c1"):
            call("remove", "mine", "--vocabulary", wrong, "--yes")
    assert call("remove", "mine", "--vocabulary", "b0b0", "--yes").exit_code == 0
    assert [name for name, _ in vocabularies()] == ["others"]
    other()
    call("rebuild", "mine")
    assert [name for name, _ in vocabularies()] == ["bytes", "others"]
    call("remove", "mine", "--vocabulary", "others", "--yes")
    assert [name for name, _ in vocabularies()] == ["bytes"]
    call("remove", "mine", "--vocabulary", "bytes", "--yes")
    assert vocabularies() == []
    assert not datastore_path("mine").exists()


def test_what_was_not_built_from_files_cannot_be_built_again(corpus):
    build_from_texts("texts", [("one", "text")], vocabulary=ByteVocabulary(), recipe={"kind": "git history"})
    with pytest.raises(DatastoreError, match="not built from files"):
        call("rebuild", "texts", "--replace")
    with pytest.raises(DatastoreNotFound):
        call("rebuild", "nothing")
