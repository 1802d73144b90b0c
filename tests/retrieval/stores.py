"""Small datastores for tests, and the content that a reader must see in them."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rest_local.retrieval import Datastore, VocabularyId, build
from rest_local.retrieval.documents import Text
from rest_local.retrieval.files import Files
from rest_local.retrieval.sources import Reading, Source, Walk
from rest_local.retrieval.sources.source import Skipped, Unchanged

VOCABULARY = VocabularyId("ab" * 32, 1000, "toy")
OTHER = VocabularyId("cd" * 32, 1000, "other")
OLD = {"old.py": [1, 2, 3, 4], "both.py": [9, 9, 2, 5]}
NEW = {"new.py": [1, 2, 3, 7], "both.py": [9, 9, 2, 6], "more.py": [8] * 5}


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


class Durable(Files):
    """`names`: for each directory the entries that survive a power cut, namely those at its last sync."""

    def __init__(self) -> None:
        self.names: dict[Path, set[str]] = {}

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.names[path] = set(os.listdir(path))


def walked(*paths: object) -> dict[str, Any]:
    """Return the recipe of what a walk over these paths found."""
    return {"sources": [{"kind": "walk", "paths": list(map(str, paths))}]}


def make(path: Path, content: dict[str, list[int]], **options: Any) -> Path:
    documents = ((name, array(tokens)) for name, tokens in content.items())
    options = {"recipe": walked("src"), "vocabulary": VOCABULARY, **options}
    build(path, documents, **options)
    return path


def content_of(path: Path) -> dict[str, list[int]]:
    """Return all documents of the newest commit. Fail if it is damaged."""
    with Datastore.open(path) as store:
        store.check()
        text = np.concatenate([segment.slice(0, len(segment)) for segment in store.segments])
        found, start = {}, 0
        for name in store.document_names():
            end = start + int((text[start:] == VOCABULARY.size).argmax())
            found[name] = text[start:end].tolist()
            start = end + 1
        return found


def read(source: Source, skipped: Skipped, unchanged: Unchanged | None = None, **options: Any) -> Iterator[Text]:
    """Yield the texts of a source. `options` are other fields of `Reading`."""
    return source.texts(Reading(skipped, unchanged, **options))


def walk_files(
    paths: Iterable[Path],
    skipped: Skipped | None = None,
    unchanged: Unchanged | None = None,
    filters: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Text]:
    """Yield the texts of a walk. `options` are other fields of `Reading`."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in (filters or {}).items()}
    return read(Walk(tuple(map(str, paths)), **given), skipped or Skipped(), unchanged, **options)
