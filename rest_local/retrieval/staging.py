"""Write datastores in staging directories, and remove datastores and the leftovers of killed writers.

A long write puts its segments into `staging-<16 hex>` in the directory of an index, which has a lock of its own that
the writing process holds. So a writer needs the writers' lock of the index only for the commit, which renames the files
into the index's directory. A staging directory whose lock is free is an orphan: the next commit deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rest_local.errors import DatastoreError, DatastoreLocked, DatastoreNotFound, DatastoreUnwritable
from rest_local.retrieval.files import LOCK, STAGING, Files, locked, mapping_os_errors
from rest_local.retrieval.format import MANIFEST, SegmentEntry, owns
from rest_local.retrieval.home import find, folder, folders, holds_files, indexes, read_manifest, stagings

# A merge always has this directory, so that its lock keeps a second merge away.
MERGE = "staging-6d65726765000000"

REMOVED = ".removed-"  # The name of a datastore that is being deleted begins so.

_LEFT = re.compile(r"\.removed-[0-9a-f]{16}\Z")
_ATTEMPTS = 10
# Files in the staging directories of early builds, which could go on after a kill.
_OF_SHARDS = re.compile(r"(plan|shard-[0-9a-f]{16})\.json(\.new-[0-9a-f]{16})?\Z")


class Staged(NamedTuple):
    """The segments in a directory, which a commit renames into the directory of the index."""

    place: Path
    segments: tuple[SegmentEntry, ...]

    @property
    def names(self) -> list[str]:
        return [name for entry in self.segments for name in entry.named_files]

    def is_there(self) -> bool:
        """Return True if all of their files are there: `forget` may have deleted them."""
        return all(os.path.exists(self.place / name) for name in self.names)


@contextlib.contextmanager
def writing(path: Path, vocabulary_hash: str, files: Files) -> Iterator[Path]:
    """Create, lock and yield the directory for commits of a vocabulary: the one that has its index, else the
    datastore's own directory if that is free, else a folder.

    Leftovers of killed processes are deleted first (`clear`). Raises DatastoreLocked, DatastoreUnwritable.
    """
    clear(path, files)
    while True:
        directory = _place(path, vocabulary_hash)
        with locked(directory, make=files):
            # Another writer may have taken the datastore's own directory for another vocabulary before our lock.
            if _place(path, vocabulary_hash) == directory:
                yield directory
                return


def _place(path: Path, vocabulary_hash: str) -> Path:
    directory = find(path, vocabulary_hash)
    if directory == path:
        with contextlib.suppress(DatastoreError):  # A build replaces a damaged index.
            if read_manifest(path).vocabulary.hash != vocabulary_hash:
                return folder(path, vocabulary_hash)
    return directory


@contextlib.contextmanager
def staging(directory: Path, files: Files, name: str | None = None) -> Iterator[Path]:
    """Yield a locked, empty staging directory, with a new name by default. At the end of the block it is deleted with
    everything that was not published. Raises DatastoreUnwritable, and DatastoreLocked if another process holds `name`.
    """
    for attempt in range(_ATTEMPTS):
        place = directory / (name or f"staging-{secrets.token_hex(8)}")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(place, make=files))
            except DatastoreLocked:  # Another writer may take a new directory for an orphan before it is locked.
                if name or attempt + 1 == _ATTEMPTS:
                    raise
                continue
            try:
                _empty(place, files)
                yield place
            finally:
                with contextlib.suppress(OSError):  # It went with the datastore, or the next commit deletes it.
                    delete(place, files)
        return


def remove(path: Path, wait_s: float = 0.0, files: Files | None = None) -> None:
    """Remove a datastore: rename it under its locks, then unlink its files. Open readers keep the files they mapped.

    A directory that holds files of other origin is refused.

    Args:
        path: the datastore's directory
        wait_s: seconds to wait for each lock
        files: file operations, as for `build`

    Raises:
        DatastoreNotFound: there is no datastore at `path`
        DatastoreLocked: another process writes
        DatastoreUnwritable: it holds files of other origin, or cannot be changed
    """
    if not holds_files(path):
        raise DatastoreNotFound(path)
    with contextlib.ExitStack() as locks:
        for directory in (path, *folders(path)):
            locks.enter_context(locked(directory, wait_s))
        _remove_locked(path, path.parent, files or Files())


def remove_index(path: Path, directory: Path, files: Files | None = None) -> None:
    """Remove one of the `indexes` of a datastore as `remove` does, and with the last one the datastore."""
    if indexes(path) == [directory]:
        remove(path, files=files)
    else:
        with locked(directory):
            remove_index_locked(path, directory, files)


def remove_index_locked(path: Path, directory: Path, files: Files | None = None) -> None:
    """Remove an index as `remove_index` does, for a caller that holds the lock of `directory`."""
    files = files or Files()
    if directory == path and folders(path):
        with mapping_os_errors(path):  # The directory stays, because it contains folders.
            files.unlink(path / MANIFEST)
            files.sync_directory(path)
            remove_all(path, files)
            for name in filter(owns, sorted(os.listdir(path))):
                files.unlink(path / name)
    else:
        _remove_locked(directory, path.parent, files)


def _remove_locked(directory: Path, trash: Path, files: Files) -> None:
    """Rename `directory` into the directory `trash` and delete it there, with leftovers of killed removes."""
    with mapping_os_errors(directory):
        for part in (directory, *folders(directory)):
            inside = (*folders(part), *stagings(part))
            known = {MANIFEST, *(one.name for one in inside)}
            for place in (part, *stagings(part)):
                if strangers := [n for n in os.listdir(place) if not _is_ours(place, n) and n not in known]:
                    cause = f"it also holds {strangers[0]!r}, which no build wrote; move it away"
                    raise DatastoreUnwritable(part, cause)
        gone = trash / f"{REMOVED}{secrets.token_hex(8)}"
        files.rename(directory, gone)
        files.sync_directory(trash)
        if directory.parent != trash:
            files.sync_directory(directory.parent)
        with contextlib.suppress(FileNotFoundError), _others_stay():  # another process may clear the folder meanwhile
            delete(gone, files)
    with contextlib.suppress(DatastoreError):
        clear_folder(trash, files)


def clear(path: Path, files: Files | None = None, *, everything: bool = False) -> None:
    """Delete leftovers of killed processes from the datastore at `path`, and from removals next to it. A
    living process locks what it works on, and that stays.

    Leftovers are segments and manifests that no commit names, and the directories of updates, merges and removals that
    did not end. `everything` includes the files of an index that never had a commit. Every writer calls it before it
    writes, so that a full disk has room again. Raises DatastoreUnwritable.
    """
    files = files or Files()
    clear_folder(path.parent, files)
    for directory in (path, *folders(path)):
        with mapping_os_errors(directory):
            remove_orphans(directory, files)
            if unnamed(directory, everything):
                with contextlib.suppress(DatastoreLocked), locked(directory):
                    delete_unnamed(directory, files, everything)


def clear_folder(folder: Path, files: Files) -> None:
    """Delete leftovers of killed removals from a folder of datastores. Raises DatastoreUnwritable."""
    for left in leftovers(folder):
        with (
            mapping_os_errors(left),
            contextlib.suppress(DatastoreLocked, FileNotFoundError),
            _others_stay(),
            locked(left),
        ):
            delete(left, files)


def leftovers(folder: Path) -> list[Path]:
    """Return the directories of removals in a folder of datastores, of living and dead processes. Only
    those of this user count, and links are not followed.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if _LEFT.match(entry.name)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            )
    except OSError:
        return []


def unnamed(directory: Path, everything: bool = False) -> list[str]:
    """Return the files of this format in an index's directory that its commit does not name. Return none if the
    manifest cannot be read, and, without `everything`, if there is none: a datastore may be being copied to this place.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if owns(name))
        kept = read_manifest(directory).files if names else {}
    except DatastoreNotFound:
        return names if everything else []
    except (DatastoreError, OSError):
        return []
    return [name for name in names if name not in kept]


def delete_unnamed(directory: Path, files: Files, everything: bool = False) -> None:
    """Delete the `unnamed` files, for a caller that holds the lock. Raises OSError."""
    for name in unnamed(directory, everything):
        files.unlink(directory / name)


def remove_orphans(directory: Path, files: Files) -> None:
    """Delete the staging directories that no process holds. A directory with files of other origin stays, without ours.
    Raises OSError, DatastoreUnwritable.
    """
    for place in stagings(directory):
        with contextlib.suppress(DatastoreLocked, FileNotFoundError), _others_stay(), locked(place):
            delete(place, files)


def remove_all(directory: Path, files: Files) -> None:
    """Delete the content of all staging directories; a commit that uses one then fails. Raises OSError."""
    for place in stagings(directory):
        with contextlib.suppress(FileNotFoundError):
            _empty(place, files)
    remove_orphans(directory, files)


def delete(directory: Path, files: Files) -> None:
    """Delete a staging directory or an unnamed datastore. A file of other origin stays, and raises OSError."""
    for part in (*folders(directory), *stagings(directory)):
        delete(part, files)
    files.unlink(directory / MANIFEST)
    _empty(directory, files)
    files.unlink(directory / LOCK)
    directory.rmdir()


def _empty(directory: Path, files: Files) -> None:
    for name in sorted(os.listdir(directory)):
        if _is_ours(directory, name) and name != LOCK:
            files.unlink(directory / name)


def _is_ours(directory: Path, name: str) -> bool:
    """Return True if only a build can have written a file of this name there."""
    return owns(name) or name == LOCK or bool(STAGING.match(directory.name) and _OF_SHARDS.match(name))


@contextlib.contextmanager
def _others_stay() -> Iterator[None]:
    """Ignore that a directory cannot be deleted because it holds files of other origin."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
