"""Find datastores: names to paths, the directory of each vocabulary, manifests and the list of datastores.

A datastore holds one index for each vocabulary, each a directory with a manifest, a lock and commits of its own, so a
commit for one vocabulary does not touch the others. The first index lies in the datastore's directory itself, the
others in `vocabulary-HASH` in it, with the first 16 digits of the vocabulary's hash (docs/FORMAT.md). Only reads.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreNotFound,
    DatastoreVersion,
    DatastoreVocabulary,
    OptionError,
)
from rest_local.paths import datastores_home
from rest_local.retrieval.files import FOLDER, STAGING
from rest_local.retrieval.format import MANIFEST, Manifest, owns
from rest_local.retrieval.sources.recipes import can_repeat

DEFAULT_NAME = "default"
MAX_MANIFEST = 64 << 20


def datastore_path(name: str | os.PathLike[str]) -> Path:
    """Return the path of a datastore: a name with a path separator is a path, any other is in `datastores_home`.

    Raises:
        OptionError: the name is empty or begins with a dot
    """
    text = os.fspath(name)
    if os.sep in text or (os.altsep and os.altsep in text):
        return Path(text).expanduser()
    if text.startswith(".") or not text or "\0" in text:
        raise OptionError(f"datastore name {text!r}: must not be empty or begin with a dot; a path needs a {os.sep}")
    return datastores_home() / text


def list_datastores(*, unfinished: bool = False) -> list[str]:
    """Return the sorted names of the datastores in `datastores_home`, without checking whether they can be opened.

    With `unfinished`, return the names of those without a commit, whose build did not end or still runs.
    """
    try:
        with os.scandir(datastores_home()) as entries:
            paths = sorted(Path(entry.path) for entry in entries if entry.name[0] != ".")
    except FileNotFoundError:
        return []
    return [path.name for path in paths if (holds_files(path) and not indexes(path) if unfinished else indexes(path))]


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of the newest commit. Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion."""
    if directory.is_file():
        raise DatastoreVersion(directory, "of a single file", "2, a directory")
    path = directory / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST + 1)
    except FileNotFoundError as error:
        raise DatastoreNotFound(directory) from error
    except OSError as error:
        raise DatastoreError(
            f"datastore {directory}: {MANIFEST} cannot be read: {error.strerror}; check its permissions"
        ) from error
    if len(data) > MAX_MANIFEST:
        raise DatastoreCorrupt(directory, f"the manifest is larger than {MAX_MANIFEST} bytes")
    return Manifest.parse(data, directory)


def folder(path: Path, vocabulary_hash: str) -> Path:
    """Return the directory of a vocabulary whose index is not the one in the datastore's directory itself."""
    return path / f"vocabulary-{vocabulary_hash[:16]}"


def folders(path: Path) -> list[Path]:
    """Return the sorted directories of vocabularies, with or without a commit. Links are not followed."""
    return _directories(path, FOLDER)


def stagings(directory: Path) -> list[Path]:
    """Return the sorted staging directories in the directory of an index. Links are not followed."""
    return _directories(directory, STAGING)


def _directories(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if pattern.match(entry.name) and entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(Path(entry.path) for entry in found)


def datastore_of(directory: Path) -> Path:
    return directory.parent if FOLDER.match(directory.name) else directory


def indexes(path: Path) -> list[Path]:
    """Return the directories of a datastore that hold a commit, the datastore's own directory first."""
    return [directory for directory in (path, *folders(path)) if os.path.exists(directory / MANIFEST)]


def find(path: Path, vocabulary_hash: str | None) -> Path:
    """Return the directory of a vocabulary's index (None: the first index), or the datastore's own without one."""
    if vocabulary_hash is None:
        return next(iter(indexes(path)), path)
    index = folder(path, vocabulary_hash)
    return index if os.path.exists(index / MANIFEST) else path


def manifests(path: Path) -> dict[Path, Manifest | DatastoreError]:
    """Return the newest commit of each of the `indexes`, or the error that its reading raises."""
    found: dict[Path, Manifest | DatastoreError] = {}
    for directory in indexes(path):
        try:
            found[directory] = read_manifest(directory)
        except DatastoreError as error:
            found[directory] = error
    return found


def newest_manifest(path: Path) -> Manifest:
    """Return the newest commit of a datastore. Its recipe names the text that an index for another vocabulary is built
    of. Raises DatastoreNotFound, and the error of an index if none can be read.
    """
    found = manifests(path).values()
    readable = [manifest for manifest in found if isinstance(manifest, Manifest)]
    if not readable:
        raise next((error for error in found if isinstance(error, DatastoreError)), DatastoreNotFound(path))
    return max(readable, key=lambda manifest: manifest.revision)


def newest_commit(path: Path, vocabulary_hash: str | None, vocabulary_name: str) -> tuple[Path, Manifest]:
    """Return directory and manifest of a vocabulary's index (None: the first index). Raises DatastoreError."""
    directory = find(path, vocabulary_hash)
    try:
        manifest = read_manifest(directory)
    except DatastoreNotFound:
        if vocabulary_hash is None or not indexes(path):
            raise
        raise no_such_vocabulary(path, vocabulary_name, vocabulary_hash) from None
    if vocabulary_hash is not None and manifest.vocabulary.hash != vocabulary_hash:
        raise no_such_vocabulary(path, vocabulary_name, vocabulary_hash)
    return directory, manifest


def no_such_vocabulary(path: Path, name: str, vocabulary_hash: str) -> DatastoreVocabulary:
    """Make the error for a datastore that lacks this vocabulary, with the names of its own and the way out."""
    readable = [manifest for manifest in manifests(path).values() if isinstance(manifest, Manifest)]
    known = [f"{manifest.vocabulary.name or '?'} ({manifest.vocabulary.hash[:12]})" for manifest in readable]
    way = build_command(path, newest_manifest(path).recipe)
    return DatastoreVocabulary(path, ", ".join(known), f"{name} ({vocabulary_hash[:12]})", way)


def build_command(path: Path, recipe: Mapping[str, Any], model: str = "MODEL") -> str:
    """Return the command line that builds a datastore's index for a model."""
    name = path.name if path.parent == datastores_home() else str(path)
    words = ["rebuild", name] if can_repeat(recipe) else ["build", "PATH", "-o", name]
    return shlex.join(["rest-local", "index", *words, "-m", model])


def holds_files(path: Path) -> bool:
    """Return True if the directory holds files of a build: a commit, a damaged one, or leftovers of a killed build."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(name == MANIFEST or owns(name) for name in names) or bool(folders(path) or stagings(path))
