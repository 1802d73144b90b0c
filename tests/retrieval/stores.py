"""Small datastores for tests, and what a reader must see in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rest_local.retrieval import Datastore, VocabularyId, build

VOCABULARY = VocabularyId("ab" * 32, 1000, "toy")
OLD = {"old.py": [1, 2, 3, 4], "both.py": [9, 9, 2, 5]}
NEW = {"new.py": [1, 2, 3, 7], "both.py": [9, 9, 2, 6], "more.py": [8] * 5}


def make(path: Path, content: dict[str, list[int]], **options: Any) -> Path:
    documents = ((name, np.array(tokens, np.int32)) for name, tokens in content.items())
    options.setdefault("recipe", {"paths": ["src"]})
    build(path, documents, vocabulary=VOCABULARY, **options)
    return path


def content_of(path: Path) -> dict[str, list[int]]:
    """All documents of the newest commit, which must be clean."""
    with Datastore.open(path) as store:
        store.check()
        text = np.concatenate([segment.slice(0, len(segment)) for segment in store.segments])
        found, start = {}, 0
        for name in store.document_names():
            end = start + int((text[start:] == VOCABULARY.size).argmax())
            found[name] = text[start:end].tolist()
            start = end + 1
        return found
