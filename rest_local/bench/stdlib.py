"""The demo's datastore: the running interpreter's standard library without the held-out modules and without tests.

It has a name of its own for each vocabulary (`demo-stdlib-` and the beginning of the vocabulary's hash) and says in its
recipe that it is the demo's. A datastore of that name that says otherwise is somebody's, and is left alone.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rest_local.bench.prompts import held_out_modules, standard_library
from rest_local.errors import DatastoreCorrupt, DatastoreNotFound, DatastoreUnwritable
from rest_local.llama.model import Model
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.home import datastore_path
from rest_local.retrieval.indexing import build_datastore, recipe_of

KIND = "demo"
LEFT_OUT = ("test/", "tests/", "idle_test/", "site-packages/", "dist-packages/")


def ensure(model: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the datastore's path; builds it, in seconds, unless it is there for this vocabulary and interpreter.

    Raises ModelError, DatastoreVersion, DatastoreLocked, and DatastoreUnwritable, also for a datastore of that name
    which the demo did not make.
    """
    library = standard_library()
    with Model.open(model, vocab_only=True) as opened:
        vocabulary = opened.vocabulary
        path = datastore_path(name_for(vocabulary.hash))
        if is_current(path, vocabulary.hash, library):
            return path
        begun = time.perf_counter()
        include, exclude = filters()
        built = build_datastore(
            path, [library], vocabulary=vocabulary, include=include, exclude=exclude, recipe=of_the_demo()
        )
    say(f"datastore {path.name}: {built.tokens:,} tokens of {library} in {time.perf_counter() - begun:.1f} s")
    return path


def name_for(vocabulary_hash: str) -> str:
    """The datastore's name; models that share a vocabulary share it."""
    return f"demo-stdlib-{vocabulary_hash[:12]}"


def filters() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is taken of the library, and what is not."""
    return ("*.py",), (*LEFT_OUT, *(f"/{module}" for module in held_out_modules()))


def of_the_demo() -> dict[str, Any]:
    """What its recipe notes beside paths and filters: whose it is, and the interpreter."""
    return {"kind": KIND, "python": platform.python_version()}


def is_current(path: Path, vocabulary_hash: str, library: Path) -> bool:
    """Whether it is there, for that vocabulary and made as it would be made now. One that is damaged is not.

    Raises DatastoreUnwritable where it is no work of the demo's.
    """
    try:
        with Datastore.open(path) as store:
            manifest = store.manifest
    except (DatastoreNotFound, DatastoreCorrupt):  # of a name that nobody else uses: built again
        return False
    if manifest.recipe.get("kind") != KIND:
        raise DatastoreUnwritable(path, "it is not the demo's, which would build it anew; move it to another name")
    wanted = {**recipe_of([str(library.absolute())], *filters()), **of_the_demo()}
    return manifest.vocabulary.hash == vocabulary_hash and dict(manifest.recipe) == wanted
