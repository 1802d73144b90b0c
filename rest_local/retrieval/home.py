"""The directory of datastores: names to paths, the list, and removal."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from rest_local.errors import DatastoreNotFound, DatastoreUnwritable, OptionError
from rest_local.paths import datastores_home
from rest_local.retrieval.files import LOCK, Files, locked, unwritable
from rest_local.retrieval.format import MANIFEST, owns

DEFAULT_NAME = "default"
_REMOVED = ".removed-"


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


def list_datastores() -> list[str]:
    """Names of the datastores in `datastores_home`, sorted. Does not check whether they can be opened."""
    try:
        with os.scandir(datastores_home()) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and os.path.exists(os.path.join(entry.path, MANIFEST))
            )
    except FileNotFoundError:
        return []


def remove(path: Path, wait_s: float = 0.0, files: Files | None = None) -> None:
    """Remove a datastore: rename it under its lock, then unlink its files. Open readers keep the files they mapped.

    A directory that holds files of other origin is refused. `wait_s`: how long to wait for the lock; `files`: as in
    `build`. Raises DatastoreNotFound, DatastoreLocked, DatastoreUnwritable.
    """
    if not holds_files(path):
        raise DatastoreNotFound(path)
    with locked(path, wait_s):
        remove_locked(path, files)


def remove_locked(path: Path, files: Files | None = None) -> None:
    """`remove`, for a caller that holds the lock."""
    files = files or Files()
    with unwritable(path):
        strangers = [name for name in os.listdir(path) if name not in (LOCK, MANIFEST) and not owns(name)]
        if strangers:
            raise DatastoreUnwritable(path, f"it also holds {strangers[0]!r}, which no build wrote; move it away")
        gone = path.parent / f"{_REMOVED}{secrets.token_hex(8)}"
        files.rename(path, gone)
        files.sync_directory(path.parent)
        _delete(gone, files)
    # Leftovers of a killed remove. Nothing can lock them by name any more.
    for leftover in path.parent.glob(f"{_REMOVED}*"):
        with contextlib.suppress(OSError):
            _delete(leftover, files)


def holds_files(path: Path) -> bool:
    """Whether the directory holds files of a build: a commit, a damaged one, or leftovers of a killed build."""
    try:
        return any(name == MANIFEST or owns(name) for name in os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _delete(directory: Path, files: Files) -> None:
    files.unlink(directory / MANIFEST)
    for name in sorted(os.listdir(directory)):
        if owns(name) or name == LOCK:
            files.unlink(directory / name)
    directory.rmdir()
