"""What a command does about a datastore that it cannot open, while its engine is opened.

- It lacks an index for the model's vocabulary: at a terminal one question, and "yes" builds it. Elsewhere, after a "no"
  and with --no-build-missing the answer is drafted without it, and one line names the command that builds it. With
  --build-missing it is built without a question.
- It is damaged: left out with one line, since it could only have made the answer faster.
- Anything else is refused.

The default datastore is used without being named, so it is never a reason to refuse. A question about it that was
answered with "no" is not asked again, and a line about what it lacks is printed once for each vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rest_local.catalog.quantization import in_bytes
from rest_local.cli import building
from rest_local.cli.messages import warn
from rest_local.cli.progress import duration
from rest_local.errors import DatastoreCorrupt, DatastoreError, DatastoreNotFound, DatastoreVocabulary, RestLocalError

if TYPE_CHECKING:
    from rest_local.decoding.core import Unusable
    from rest_local.llama.model import Model
    from rest_local.retrieval.sources.source import Source


def unusable(build: bool | None, is_named: bool, awaited: Callable[[str], bool] = lambda name: False) -> Unusable:
    """What `Engine` calls for a datastore that it cannot open. build: --build-missing, None: ask; is_named: the user
    named it, so that it is no default; awaited: whether it is being built, and used when it is there.
    """

    def decide(name: str | Path, error: DatastoreError, model: Model) -> bool:
        if awaited(str(name)) and isinstance(error, (DatastoreNotFound, DatastoreVocabulary)):
            return False
        if isinstance(error, DatastoreVocabulary):
            return _add_index(name, model, build, is_named)
        if is_named and not isinstance(error, DatastoreCorrupt):
            raise error
        warn(f"{error}; going on without it" if is_named else f"the default datastore is not used: {error}")
        return False

    return decide


def _add_index(name: str | Path, model: Model, build: bool | None, is_named: bool) -> bool:
    """Build the index for the model's vocabulary if that is wanted, else say how. Whether it was built."""
    from rest_local.retrieval.building.indexing import recorded_sources
    from rest_local.retrieval.home import build_command, datastore_path, newest_manifest

    path, vocabulary = datastore_path(name), model.vocabulary
    asks = build is None and building.can_ask() and not _noted("declined", path, vocabulary.hash)
    try:
        if build or asks:
            sources = recorded_sources(path)
            if build or _wanted(name, model, sources):
                return _build(name, model, sources)
            _note("declined", path, vocabulary.hash)
    except RestLocalError as error:  # the answer can do without
        warn(f"{error}; going on without it")
        return False
    if is_named or (build is None and not asks and not _noted("told", path, vocabulary.hash)):
        _note("told", path, vocabulary.hash)
        command = build_command(path, newest_manifest(path).recipe, str(model.path))
        lacks = f"datastore {name}: nothing is built for this model's vocabulary ({vocabulary.name})"
        warn(f"{lacks}; going on without it; `{command}` builds it")
    return False


def _wanted(name: str | Path, model: Model, sources: list[Source]) -> bool:
    from rest_local.decoding.transcripts import turn_renderer
    from rest_local.retrieval.building.indexing import estimate

    guess = estimate(sources, model.vocabulary, turn_renderer(model, sources))
    takes = f"about {in_bytes(guess.disk)} on disk and {duration(max(guess.seconds, 1))}"
    return building.ask(
        f"Datastore {name} has nothing for this model's vocabulary ({model.vocabulary.name}) yet. "
        f"Build it from {guess.files:,} files ({in_bytes(guess.text)}; {takes})?",
        default=True,
    )


def _build(name: str | Path, model: Model, sources: list[Source]) -> bool:
    from rest_local.decoding.transcripts import turn_renderer
    from rest_local.retrieval.building.indexing import build_from_sources

    with building.progress(False, lambda: sum(source.measure()[1] for source in sources)) as progress:
        made = {"model": str(model.path.absolute())}
        render = turn_renderer(model, sources)
        build_from_sources(
            name, sources, vocabulary=model.vocabulary, recipe=made, progress=progress, replace=False, render=render
        )
    return True


def _marker(kind: str, path: Path, vocabulary_hash: str) -> Path:
    import hashlib

    from rest_local.paths import cache_dir

    key = "\0".join((kind, os.path.abspath(path), vocabulary_hash))
    return cache_dir() / "asked" / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _noted(kind: str, path: Path, vocabulary_hash: str) -> bool:
    try:
        return _marker(kind, path, vocabulary_hash).exists()
    except OSError:
        return False


def _note(kind: str, path: Path, vocabulary_hash: str) -> None:
    """Remember it in the cache. Where that cannot be written, the question or the line comes again."""
    try:
        marker = _marker(kind, path, vocabulary_hash)
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
    except OSError:
        pass
