"""`checking` lists every fault of a datastore, and changes nothing."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from stores import NEW, OLD, OTHER, VOCABULARY, make
from support.files import overwrite
from test_datastore import rewrite

from rest_local.retrieval import VocabularyId, checking
from rest_local.retrieval.building.build import build
from rest_local.retrieval.checking import Fault, look, segment_faults
from rest_local.retrieval.documents import Document, FileState
from rest_local.retrieval.format import MANIFEST, file_name
from rest_local.retrieval.home import read_manifest

STATE = FileState("new.py", 5, 7, b"s" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make a datastore of three documents in three segments, with file states."""
    documents = [Document(name, np.array(tokens, np.int32), (STATE,)) for name, tokens in NEW.items()]
    build(tmp_path / "home" / "store", documents, vocabulary=VOCABULARY, segment_tokens=6)
    return tmp_path / "home" / "store"


def faults(path: Path) -> list[Fault]:
    return [fault for one in look(path) for fault in one.faults]


def kinds(path: Path) -> list[tuple[str, str]]:
    return [(fault.kind, fault.part or fault.name) for fault in faults(path)]


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_an_intact_datastore_has_no_fault_and_every_byte_is_read(store):
    assert faults(store) == []
    sizes = [file.stat().st_size for file in store.glob("*.bin")]
    assert sum(one.bytes for one in look(store)) == sum(sizes)
    assert len(sizes) == 12


def test_every_damaged_file_is_listed_and_nothing_is_changed(store):
    make(store, OLD, vocabulary=OTHER)
    (order, *_), (documents, *_), (states, *_) = (
        sorted(store.glob(f"*.{kind}.bin")) for kind in ("order", "documents", "states")
    )
    order.unlink()
    overwrite(documents, documents.read_bytes()[:-1] + b"?")
    overwrite(states, states.read_bytes() + b"?")
    (tokens,) = store.glob("vocabulary-*/*.tokens.bin")
    tokens.write_bytes(b"")
    before = content(store)
    assert sorted(kinds(store)) == [
        ("checksum", "documents"),
        ("missing", "order"),
        ("size", "states"),
        ("size", "tokens"),
    ]
    assert content(store) == before


def sign(path: Path, kind: str, change: Callable[[bytearray], None]) -> None:
    """Change a file of the first segment, and give it a right checksum."""
    segment = read_manifest(path).segments[0]
    file = path / file_name(segment.name, kind)
    data = bytearray(file.read_bytes())
    change(data)
    overwrite(file, bytes(data))

    def again(fields):
        fields["segments"][0]["files"][kind]["sha256"] = hashlib.sha256(data).hexdigest()

    rewrite(path, again)


def put(at: int, value: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at : at + len(value)] = value

    return change


FIRST = 64 * 2  # the first token in the file


@pytest.mark.parametrize(
    ("kind", "change", "found"),
    [
        ("tokens", put(FIRST + 4, b"\xff\xff"), ("ids", "tokens")),  # outside the vocabulary
        ("tokens", put(FIRST + 4, b"\x03\xe8"), ("ids", "tokens")),  # a separator inside of a document
        ("tokens", put(FIRST, b"\0\1"), ("ids", "tokens")),  # none at the end
        ("tokens", put(0, b"\0\1"), ("ids", "tokens")),  # none before the text
        ("order", put(0, b"\xff\xff\xff\xff"), ("order", "order")),
        ("documents", put(0, b"R?"), ("table", "documents")),
        ("documents", put(8, b"\2"), ("table", "documents")),
        ("documents", put(24 + 8, b"\4"), ("table", "documents")),  # the end of the text
        ("documents", put(24 + 16 + 8, b"\xff"), ("table", "documents")),  # the end of a name
        ("states", put(0, b"R?"), ("table", "states")),
        ("states", put(24 + 8 + 8 + 16, b"\1"), ("table", "states")),  # the number of the document
    ],
)
def test_wrong_content_with_a_right_checksum(store, kind, change, found):
    sign(store, kind, change)
    assert kinds(store) == [found]


def test_documents_out_of_order(tmp_path):
    path = make(tmp_path / "store", {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8]})
    sign(path, "documents", put(24 + 8, b"\x09"))
    assert kinds(path) == [("table", "documents")]
    sign(path, "documents", put(24 + 8, b"\x05"))  # They are in order, but the place is no separator.
    assert kinds(path) == [("ids", "tokens")]


def swapped(data: bytearray) -> None:
    data[:] = data[4:8] + data[:4] + data[8:]


def repeated(data: bytearray) -> None:
    data[:4] = data[4:8]


@pytest.mark.parametrize("change", [swapped, repeated])
def test_an_order_that_is_none(store, change):
    sign(store, "order", change)
    assert kinds(store) == [("order", "order")]


def test_an_order_of_equal_tokens_and_of_wide_ones(tmp_path):
    wide = VocabularyId("ee" * 32, 70_000, "wide")
    content = {"equal": [7] * 3000, "wide": list(range(69_000, 70_000)), "one": [1]}
    assert faults(make(tmp_path / "store", content, vocabulary=wide)) == []


@pytest.mark.parametrize("kind", ["manifest", "version"])
def test_a_manifest_that_cannot_be_read_is_a_fault(store, kind):
    if kind == "version":
        rewrite(store, lambda fields: fields.update(format=99))
    else:
        (store / MANIFEST).write_bytes((store / MANIFEST).read_bytes()[:-2])
    (found,) = faults(store)
    assert (found.kind, found.name) == (kind, MANIFEST)
    assert kind == "manifest" or "99" in found.what


def test_a_commit_in_the_meantime_is_no_damage(store, monkeypatch):
    """The files of the first look are deleted by a build before they are read."""
    looks = []

    def late(*arguments, **options):
        if not looks:
            make(store, OLD)
        looks.append(arguments)
        return segment_faults(*arguments, **options)

    monkeypatch.setattr(checking, "segment_faults", late)
    assert faults(store) == []
    assert len(looks) > 1
