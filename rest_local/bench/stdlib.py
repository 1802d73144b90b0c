"""The demo's datastore: the running interpreter's standard library without the held-out modules and without tests."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rest_local.bench.prompts import held_out_modules, standard_library
from rest_local.errors import DatastoreError
from rest_local.llama.model import Model
from rest_local.retrieval.build import build
from rest_local.retrieval.corpus import walk
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import VocabularyId
from rest_local.retrieval.home import datastore_path
from rest_local.retrieval.tokenizing import tokenize_documents

NAME = "stdlib"
LEFT_OUT = ("test/", "tests/", "idle_test/", "site-packages/", "dist-packages/")


def ensure(model: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the datastore's path; builds it, in seconds, unless it is there for this vocabulary and interpreter.

    Raises ModelError, DatastoreUnwritable, DatastoreLocked.
    """
    path, recipe = datastore_path(NAME), recipe_of(standard_library())
    with Model.open(model, vocab_only=True) as opened:
        vocabulary = VocabularyId(*opened.vocabulary.identity)
        if is_current(path, vocabulary, recipe):
            return path
        begun = time.perf_counter()
        documents = walk(recipe["paths"], recipe["include"], recipe["exclude"])
        tokens = tokenize_documents(documents, opened.vocabulary.tokenize)
        manifest = build(path, tokens, vocabulary=vocabulary, recipe=recipe)
    n_tokens = sum(segment.tokens for segment in manifest.segments)
    say(f"datastore {NAME}: {n_tokens:,} tokens of {recipe['paths'][0]} in {time.perf_counter() - begun:.1f} s")
    return path


def recipe_of(library: Path) -> dict[str, Any]:
    """Return the paths and filters that make the datastore, and the interpreter they belong to."""
    return {
        "paths": [str(library)],
        "include": ["*.py"],
        "exclude": [*LEFT_OUT, *(f"/{module}" for module in held_out_modules())],
        "python": platform.python_version(),
    }


def is_current(path: Path, vocabulary: VocabularyId, recipe: dict[str, Any]) -> bool:
    """Whether `path` opens for that vocabulary and was made by that recipe; one that is damaged is built again."""
    try:
        with Datastore.open(path, vocabulary_hash=vocabulary.hash, vocabulary_name=vocabulary.name) as datastore:
            return bool(datastore.info()["recipe"] == recipe)
    except DatastoreError:
        return False
