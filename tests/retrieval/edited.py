"""A folder of files, the datastore that is kept up to date with it, and what it must hold."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rest_local.retrieval.building.indexing import build_datastore
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import Document, alive
from rest_local.retrieval.files import Files, locked
from rest_local.retrieval.format import Manifest, VocabularyId
from rest_local.retrieval.update import merging
from rest_local.retrieval.update.merging import segments_without
from rest_local.retrieval.update.updating import Updated, put, update

LONG_AGO = 1_600_000_000


class Bytes:
    """Every byte is a token."""

    name, size, hash = "bytes", 256, "b0" * 32

    def __init__(self) -> None:
        self.tokenized: list[str] = []

    def tokenize(self, text: str, *, special: bool = False) -> np.ndarray:
        self.tokenized.append(text)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


IDENTITY = VocabularyId(Bytes.hash, Bytes.size, Bytes.name)


class Folder:
    """Files below `source`, and a datastore of them at `path`. Every write has a new, certain time of change."""

    def __init__(self, directory: Path) -> None:
        self.source, self.path = directory / "source", directory / "store"
        self.source.mkdir(parents=True)
        self.clock = LONG_AGO

    def write(self, name: str, text: str) -> str:
        (self.source / name).parent.mkdir(parents=True, exist_ok=True)
        (self.source / name).write_text(text)
        return self.touch(name)

    def touch(self, name: str) -> str:
        self.clock += 10
        os.utime(self.source / name, (self.clock, self.clock))
        return str(self.source / name)

    def delete(self, name: str) -> str:
        (self.source / name).unlink()
        return str(self.source / name)

    def build(self) -> None:
        """Build, and record the states of the files."""
        build_datastore(self.path, [self.source], vocabulary=Bytes())
        self.update()

    def update(self, vocabulary: Bytes | None = None, **options: Any) -> Updated:
        return update(self.path, vocabulary=vocabulary or Bytes(), **options)

    def texts(self) -> dict[str, str]:
        """Return the text of each file, by the name that the datastore has for it."""
        files = [path for path in self.source.rglob("*") if path.is_file()]
        return {str(path): path.read_text() for path in files}


def store_documents(path: Path, documents: Sequence[tuple[str, np.ndarray]]) -> None:
    """Add documents of no file, such as those of the standard input."""
    new = [Document(name, tokens) for name, tokens in documents]
    with locked(path), Datastore.open(path) as store:
        entries = segments_without(store, {document.name for document in new})
        put(store, entries, new, store.manifest.recipe, Files())


def merge_all(path: Path, **options: Any) -> Manifest | None:
    """Merge all segments, as far as they fit into one, and drop deleted text, whatever is due."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "FANOUT", 2)
        patch.setattr(merging, "SMALL_SEGMENT", 1 << 26)
        patch.setattr(merging, "DEAD", 0.0)
        return merging.merge(path, **options)


def texts_in(path: Path) -> dict[str, str]:
    """Return the text that a datastore has for each file, read from the files and as readers see it.

    Fail if the datastore is damaged, holds a document of no file, or one file twice.
    """
    with Datastore.open(path) as store:
        store.check()
        found: dict[str, str] = {}
        for index in range(len(store.segments)):
            for document in store.documents(index):
                assert document.states or document.name.startswith("stored:")
                for name in [state.name for state in document.states] or [document.name]:
                    assert name not in found
                    found[name] = bytes(document.tokens.astype(np.uint8)).decode()
                assert document.name in found
        assert sorted(store.document_names()) == sorted(
            document.name for index in range(len(store.segments)) for document in store.documents(index)
        )
        return found


def text_on_disk(path: Path) -> Iterator[str]:
    """Yield the text of all documents in all files of a datastore and its staging directories, forwards."""
    for file in path.rglob("*.tokens.bin"):
        tokens = np.frombuffer(file.read_bytes(), ">u2")[::-1]
        yield bytes(tokens[tokens < 256].astype(np.uint8)).decode()


def live_tokens(path: Path) -> list[int]:
    """Return the tokens of the documents of each segment that are not deleted."""
    found = []
    with Datastore.open(path) as store:
        for index, entry in enumerate(store.manifest.segments):
            sizes = np.diff(store.table(index).starts.astype(np.int64))
            found.append(int(sizes[alive(entry.dead, entry.documents)].sum()))
    return found
