"""Where datastores lie: names to paths, the directory of each vocabulary, manifests, the list, and removal.

A datastore holds one index for each vocabulary, each a directory with a manifest, a lock and commits of its own, so a
commit for one vocabulary does not touch the others. The first index lies in the datastore's directory itself, the
others in `vocabulary-HASH` in it, HASH being the first 16 digits of the vocabulary's hash (docs/FORMAT.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rest_local.errors import (
    DatastoreCorrupt,
    DatastoreError,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreUnwritable,
    DatastoreVersion,
    DatastoreVocabulary,
    OptionError,
)
from rest_local.paths import datastores_home
from rest_local.retrieval.building.staged import delete, may_hold, others_stay, remove_all, remove_orphans, stagings
from rest_local.retrieval.files import FOLDER, LOCK, WINDOWS, Files, locked, unwritable
from rest_local.retrieval.format import MANIFEST, Manifest, file_name, owns
from rest_local.retrieval.sources.registry import can_repeat

DEFAULT_NAME = "default"
MAX_MANIFEST = 64 << 20
REMOVED, IMPORTING = ".removed-", ".importing-"
"""The beginnings of the names of directories next to a datastore: of one that is deleted, and of one that comes."""

_LEFT = re.compile(r"\.(removed|importing)-[0-9a-f]{16}\Z")


def datastore_path(name: str | os.PathLike[str]) -> Path:
    """The path of a datastore: a name with a path separator is a path itself, any other is in `datastores_home`.

    Raises OptionError for a name that is empty or begins with a dot.
    """
    text = os.fspath(name)
    if os.sep in text or (os.altsep and os.altsep in text):
        return Path(text).expanduser()
    if text.startswith(".") or not text or "\0" in text:
        raise OptionError(f"datastore name {text!r}: must not be empty or begin with a dot; a path needs a {os.sep}")
    return datastores_home() / text


def short_name(path: Path) -> str:
    """What `datastore_path` turns into `path`: the name in `datastores_home`, elsewhere the path."""
    return path.name if path.parent == datastores_home() else str(path)


def list_datastores(*, unfinished: bool = False) -> list[str]:
    """Names of the datastores in `datastores_home`, sorted. Does not check whether they can be opened. unfinished: of
    those without a commit, whose build did not end or still runs.
    """
    try:
        with os.scandir(datastores_home()) as entries:
            paths = sorted(Path(entry.path) for entry in entries if entry.name[0] != ".")
    except FileNotFoundError:
        return []
    return [path.name for path in paths if (holds_files(path) and not indexes(path) if unfinished else indexes(path))]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the newest commit. Raises DatastoreNotFound, DatastoreCorrupt, DatastoreVersion."""
    if directory.is_file():
        raise DatastoreVersion(directory, "of a single file", "1, a directory")
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
    """The directory of a vocabulary, unless its index is the one in the datastore's directory itself."""
    return path / f"vocabulary-{vocabulary_hash[:16]}"


def folders(path: Path) -> list[Path]:
    """The directories of vocabularies in a datastore, sorted, with or without a commit. Links are not followed."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if FOLDER.match(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def datastore_of(directory: Path) -> Path:
    """The datastore that an index's directory belongs to."""
    return directory.parent if FOLDER.match(directory.name) else directory


def indexes(path: Path) -> list[Path]:
    """The directories of a datastore that hold a commit, the datastore's own directory first."""
    return [directory for directory in (path, *folders(path)) if os.path.exists(directory / MANIFEST)]


def find(path: Path, vocabulary_hash: str | None) -> Path:
    """The directory that holds the index for a vocabulary, None: the first index. Without one the datastore's own."""
    if vocabulary_hash is None:
        return next(iter(indexes(path)), path)
    own = folder(path, vocabulary_hash)
    return own if os.path.exists(own / MANIFEST) else path


def manifests(path: Path) -> dict[Path, Manifest | DatastoreError]:
    """The newest commit of each of the `indexes`, or why it cannot be read."""
    found: dict[Path, Manifest | DatastoreError] = {}
    for directory in indexes(path):
        try:
            found[directory] = read_manifest(directory)
        except DatastoreError as error:
            found[directory] = error
    return found


def newest_manifest(path: Path) -> Manifest:
    """The newest commit of a datastore. Its recipe says of what text an index for another vocabulary is built.

    Raises DatastoreNotFound, and the error of an index if none can be read.
    """
    found = manifests(path).values()
    readable = [manifest for manifest in found if isinstance(manifest, Manifest)]
    if not readable:
        raise next((error for error in found if isinstance(error, DatastoreError)), DatastoreNotFound(path))
    return max(readable, key=lambda manifest: manifest.age)


def newest_commit(path: Path, vocabulary_hash: str | None, vocabulary_name: str) -> tuple[Path, Manifest]:
    """The directory and the manifest of the index for a vocabulary, None: of the first one. Raises DatastoreError."""
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
    """The error for a datastore that lacks this vocabulary: the names of those that it has, and the way out."""
    readable = [manifest for manifest in manifests(path).values() if isinstance(manifest, Manifest)]
    held = [f"{manifest.vocabulary.name or '?'} ({manifest.vocabulary.hash[:12]})" for manifest in readable]
    way = build_command(path, newest_manifest(path).recipe)
    return DatastoreVocabulary(path, ", ".join(held), f"{name} ({vocabulary_hash[:12]})", way)


def build_command(path: Path, recipe: Mapping[str, Any], model: str = "MODEL") -> str:
    """The command line that builds a datastore's index for a model, given by its path."""
    name = short_name(path)
    words = ["rebuild", name] if can_repeat(recipe) else ["build", "PATH", "-o", name]
    return shlex.join(["rest-local", "index", *words, "-m", model])


@contextlib.contextmanager
def writing(path: Path, vocabulary_hash: str, files: Files, wait_s: float = 0.0) -> Iterator[Path]:
    """The directory for commits of a vocabulary, created and locked: the one that has its index, else the datastore's
    own directory if that is free, else a folder. What killed processes left there is deleted first (`clear`). Raises
    DatastoreLocked, DatastoreUnwritable.
    """
    clear(path, files)
    while True:
        directory = _place(path, vocabulary_hash)
        with locked(directory, wait_s, make=files):
            # Another writer may have taken the datastore's own directory for another vocabulary before our lock.
            if _place(path, vocabulary_hash) == directory:
                yield directory
                return


def _place(path: Path, vocabulary_hash: str) -> Path:
    directory = find(path, vocabulary_hash)
    if directory == path:
        with contextlib.suppress(DatastoreError):  # none there, or a damaged one, which a build replaces
            if read_manifest(path).vocabulary.hash != vocabulary_hash:
                return folder(path, vocabulary_hash)
    return directory


def remove(path: Path, wait_s: float = 0.0, files: Files | None = None) -> None:
    """Remove a datastore: rename it under its locks, then unlink its files. Open readers keep the files they mapped.

    A directory that holds files of other origin is refused. `wait_s`: how long to wait for each lock; `files`: as in
    `build`. Raises DatastoreNotFound, DatastoreLocked, DatastoreUnwritable.
    """
    if not holds_files(path):
        raise DatastoreNotFound(path)
    with contextlib.ExitStack() as locks:
        for directory in (path, *folders(path)):
            locks.enter_context(locked(directory, wait_s))
        _remove_locked(path, path.parent, files or Files())


def remove_index(path: Path, directory: Path, wait_s: float = 0.0, files: Files | None = None) -> None:
    """Remove one of the `indexes` of a datastore, with the last one the datastore. As `remove`."""
    if indexes(path) == [directory]:
        return remove(path, wait_s, files)
    with locked(directory, wait_s):
        remove_index_locked(path, directory, files)
    return None


def remove_index_locked(path: Path, directory: Path, files: Files | None = None) -> None:
    """`remove_index`, for a caller that holds the lock of `directory`."""
    files = files or Files()
    if directory != path:
        _remove_locked(directory, path.parent, files)
    elif folders(path):
        with unwritable(path):  # the directory stays, for the folders in it
            files.unlink(path / MANIFEST)
            files.sync_directory(path)
            remove_all(path, files)
            for name in filter(owns, sorted(os.listdir(path))):
                files.unlink(path / name)
    else:
        _remove_locked(path, path.parent, files)


def _remove_locked(directory: Path, trash: Path, files: Files) -> None:
    """Rename `directory` into the directory `trash` and delete it there, with leftovers of killed removes."""
    with unwritable(directory):
        for part in (directory, *folders(directory)):
            known = {LOCK, MANIFEST, *(inside.name for inside in (*folders(part), *stagings(part)))}
            strangers = [name for name in os.listdir(part) if name not in known and not owns(name)]
            strangers += [name for place in stagings(part) for name in os.listdir(place) if not may_hold(name)]
            if strangers:
                cause = f"it also holds {strangers[0]!r}, which no build wrote; move it away"
                raise DatastoreUnwritable(part, cause)
        gone = trash / f"{REMOVED}{secrets.token_hex(8)}"
        files.rename(directory, gone)
        files.sync_directory(trash)
        if directory.parent != trash:
            files.sync_directory(directory.parent)
        with contextlib.suppress(FileNotFoundError), others_stay():  # another process may clear the folder meanwhile
            delete_files(gone, files)
    with contextlib.suppress(DatastoreError):
        clear_folder(trash, files)


def clear(path: Path, files: Files | None = None, *, everything: bool = False) -> None:
    """Delete what killed processes left of the datastore at `path`, and of removals and imports next to it. What a
    living process works on is locked, and stays.

    Left are segments and manifests that no commit names, and the directories of updates, merges, imports and removals
    that did not end. everything: also what the next build would go on with, and the files of an index that never had a
    commit. Every writer calls it before it writes, so that a full disk has room again. Raises DatastoreUnwritable.
    """
    files = files or Files()
    clear_folder(path.parent, files)
    for directory in (path, *folders(path)):
        with unwritable(directory):
            remove_orphans(directory, files, plans=everything)
            if unnamed(directory, everything):
                with contextlib.suppress(DatastoreLocked), locked(directory):
                    delete_unnamed(directory, files, everything)


def clear_folder(folder: Path, files: Files) -> None:
    """Delete what killed removals and imports left in a folder of datastores. Raises DatastoreUnwritable."""
    for left in leftovers(folder):
        with unwritable(left), contextlib.suppress(DatastoreLocked, FileNotFoundError), others_stay(), locked(left):
            delete_files(left, files)


def unnamed(directory: Path, everything: bool = False) -> list[str]:
    """The files of this format in an index's directory that its commit does not name. None of them where the manifest
    cannot be read, and, without `everything`, where there is none: a datastore may be being copied to this place.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if owns(name))
        segments = read_manifest(directory).segments if names else ()
    except DatastoreNotFound:
        return names if everything else []
    except (DatastoreError, OSError):
        return []
    kept = {file_name(entry.name, kind) for entry in segments for kind in entry.files}
    return [name for name in names if name not in kept]


def delete_unnamed(directory: Path, files: Files, everything: bool = False) -> None:
    """Delete what `unnamed` gives, for a caller that holds the lock. Raises OSError."""
    for name in unnamed(directory, everything):
        with contextlib.suppress(PermissionError) if WINDOWS else contextlib.nullcontext():  # a reader has it mapped
            files.unlink(directory / name)


def leftovers(folder: Path) -> list[Path]:
    """What removals and imports have in a folder of datastores, of living and of dead processes: datastores and indexes
    that were renamed and are not deleted yet, and what is put together. Of this user alone; links are not followed.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if _LEFT.match(entry.name) and entry.is_dir(follow_symlinks=False) and _is_own(entry)
            )
    except OSError:
        return []


def _is_own(entry: os.DirEntry[str]) -> bool:
    return not hasattr(os, "getuid") or entry.stat(follow_symlinks=False).st_uid == os.getuid()


def holds_files(path: Path) -> bool:
    """Whether the directory holds files of a build: a commit, a damaged one, or leftovers of a killed build."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(name == MANIFEST or owns(name) for name in names) or bool(folders(path) or stagings(path))


def delete_files(directory: Path, files: Files) -> None:
    """Delete a datastore that has no name any more. A file of other origin stays, with its directory: OSError."""
    for part in (*folders(directory), directory):
        for place in stagings(part):
            delete(place, files)
        files.unlink(part / MANIFEST)
        for name in sorted(os.listdir(part)):
            if owns(name) or name == LOCK:
                files.unlink(part / name)
        part.rmdir()
