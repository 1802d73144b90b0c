"""Staging directories: where long writes put their segments before a commit takes them over.

`staging-<16 hex>` in the directory of an index, with its own lock, which the process that writes holds. So a writer
needs the writers' lock of the index only for the commit, which renames the files into the index's directory. A staging
directory whose lock is free is an orphan: the next commit deletes it, unless it holds a plan, by which a build that was
killed goes on.
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

from rest_local.errors import DatastoreLocked
from rest_local.retrieval.files import LOCK, STAGING, WINDOWS, Files, locked
from rest_local.retrieval.format import SegmentEntry, file_name, owns

PLAN = "plan.json"
"""In a staging directory: what is built there, so that a later build goes on with it."""

MERGE = "staging-6d65726765000000"
"""The directory of a merge. It always has this name, so that its lock keeps a second merge away."""

_ATTEMPTS = 10
_NAME = re.compile(r"(plan|shard-[0-9a-f]{16})\.json(\.new-[0-9a-f]{16})?\Z|[a-z]+\.new-[0-9a-f]{16}\Z")


class Staged(NamedTuple):
    """Segments in a staging directory, which a commit renames into the directory of the index."""

    place: Path
    segments: tuple[SegmentEntry, ...]


def is_there(staged: Staged) -> bool:
    """Whether all files of staged segments are there: `forget` may have deleted them."""
    names = [file_name(entry.name, kind) for entry in staged.segments for kind in entry.files]
    return all(os.path.exists(staged.place / name) for name in names)


def stagings(directory: Path) -> list[Path]:
    """The staging directories in the directory of an index, sorted. Links are not followed."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if STAGING.match(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def may_hold(name: str) -> bool:
    """Whether a file of this name belongs into a staging directory."""
    return owns(name) or name == LOCK or bool(_NAME.match(name))


@contextlib.contextmanager
def staging(directory: Path, files: Files, name: str | None = None) -> Iterator[Path]:
    """A staging directory, locked and empty; deleted at the end with all that was not published.

    name: by default a new one. Raises DatastoreUnwritable, and DatastoreLocked if another process holds that name.
    """
    for attempt in range(_ATTEMPTS):
        place = directory / (name or f"staging-{secrets.token_hex(8)}")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(place, make=files))
            except DatastoreLocked:  # a new one may look like an orphan to another writer, before it is locked
                if name or attempt + 1 == _ATTEMPTS:
                    raise
                continue
            try:
                _empty(place, files)
                yield place
            finally:
                with contextlib.suppress(OSError):  # gone with the datastore, or the next commit deletes it
                    _delete_locked(place, files)
        if WINDOWS:
            with contextlib.suppress(OSError):
                delete(place, files)
        return


def remove_orphans(directory: Path, files: Files, *, plans: bool = False, keep: Path | None = None) -> None:
    """Delete the staging directories that no process holds, except `keep`. plans: those with a plan too. A directory
    with files of other origin stays, without ours. Raises OSError, DatastoreUnwritable.
    """
    for place in stagings(directory):
        if place == keep or (not plans and (place / PLAN).exists()):
            continue
        with contextlib.suppress(DatastoreLocked, FileNotFoundError), others_stay():
            with locked(place):
                _delete_locked(place, files)
            if WINDOWS:
                delete(place, files)


def remove_all(directory: Path, files: Files) -> None:
    """Delete the content of all staging directories, also of those that a process holds: its commit then fails, since
    nothing is there to be published. Raises OSError.
    """
    for place in stagings(directory):
        with contextlib.suppress(FileNotFoundError):
            _empty(place, files)
    remove_orphans(directory, files, plans=True)


@contextlib.contextmanager
def others_stay() -> Iterator[None]:
    """A directory that cannot be deleted because it holds files of other origin stays."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def delete(place: Path, files: Files) -> None:
    """Delete a staging directory. Raises OSError, also if it holds something else."""
    _empty(place, files)
    files.unlink(place / LOCK)
    place.rmdir()


def _delete_locked(place: Path, files: Files) -> None:
    if WINDOWS:  # the lock file is open
        _empty(place, files)
    else:
        delete(place, files)


def _empty(place: Path, files: Files) -> None:
    for name in sorted(os.listdir(place)):
        if may_hold(name) and name != LOCK:
            files.unlink(place / name)
