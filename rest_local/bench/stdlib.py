"""The demo's datastore: the running interpreter's standard library without the held-out modules and without tests.

Its name is `demo-stdlib-` and the beginning of the vocabulary's hash, and its recipe marks it as the demo's. A
datastore of that name without this mark belongs to the user and is left alone.
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


def ensure(model: Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """The datastore's path. Builds it within seconds, unless it exists for this vocabulary and interpreter.

    Raises ModelError, DatastoreVersion, DatastoreLocked, and DatastoreUnwritable, also if the demo did not make the
    datastore of that name.
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
            path, [library], vocabulary=vocabulary, include=include, exclude=exclude, recipe=recipe_fields()
        )
    report(f"datastore {path.name}: {built.tokens:,} tokens of {library} in {time.perf_counter() - begun:.1f} s")
    return path


def name_for(vocabulary_hash: str) -> str:
    """The datastore's name; models with the same vocabulary share it."""
    return f"demo-stdlib-{vocabulary_hash[:12]}"


def filters() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of files to include and to exclude."""
    return ("*.py",), (*LEFT_OUT, *(f"/{module}" for module in held_out_modules()))


def recipe_fields() -> dict[str, Any]:
    """What the recipe holds in addition to paths and filters: the demo's mark and the interpreter's version."""
    return {"kind": KIND, "python": platform.python_version()}


def is_current(path: Path, vocabulary_hash: str, library: Path) -> bool:
    """Whether the datastore exists undamaged, for that vocabulary and with the present recipe.

    Raises DatastoreUnwritable if the demo did not make it.
    """
    try:
        with Datastore.open(path) as store:
            manifest = store.manifest
    except (DatastoreNotFound, DatastoreCorrupt):  # the name is the demo's own, so it may build it again
        return False
    if manifest.recipe.get("kind") != KIND:
        raise DatastoreUnwritable(path, "it is not the demo's, which would overwrite it; move it to another name")
    wanted = {**recipe_of([str(library.absolute())], *filters()), **recipe_fields()}
    return manifest.vocabulary.hash == vocabulary_hash and dict(manifest.recipe) == wanted
