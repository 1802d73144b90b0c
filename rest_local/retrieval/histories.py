"""Lists all histories and deletes single ones.

A list reads manifests only, so its cost does not depend on the size of the histories.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass

from rest_local.errors import DatastoreError, DatastoreNotFound, HistoryNotFound
from rest_local.retrieval.files import Files
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.history import DAMAGED, WAIT_S, cause_of, history_home
from rest_local.retrieval.home import clear_folder, holds_files, read_manifest, remove


@dataclass(frozen=True)
class HistoryEntry:
    """A history in the list. tokens: without separators; bytes: on disk; last_use: UTC, ISO 8601.

    error: why it cannot be read, or that it was set aside after damage; its numbers may then be 0.
    """

    name: str
    model: str = ""
    answers: int = 0
    tokens: int = 0
    bytes: int = 0
    last_use: str = ""
    error: str = ""


def list_histories() -> list[HistoryEntry]:
    """All histories, including those that were set aside, by name. What killed processes left of removed ones is
    deleted. Raises OSError if their directory is unreadable.
    """
    with contextlib.suppress(DatastoreError):
        clear_folder(history_home(), Files())
    try:
        with os.scandir(history_home()) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except FileNotFoundError:
        return []
    return [entry for entry in map(_entry, names) if entry]


def forget_history(name: str) -> None:
    """Delete a history by its name in the list. A process that has it open drafts from it until it ends, and stores
    the answers that it generates afterwards.

    Raises HistoryNotFound, DatastoreLocked, DatastoreUnwritable.
    """
    if name not in {entry.name for entry in list_histories()}:  # so that no unchecked name becomes a path
        raise HistoryNotFound(name)
    try:
        remove(history_home() / name, WAIT_S)
    except DatastoreNotFound as error:  # another process deleted it meanwhile
        raise HistoryNotFound(name) from error


def _entry(name: str) -> HistoryEntry | None:
    path = history_home() / name
    try:
        manifest = read_manifest(path)
        last_use = datetime.datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, datetime.timezone.utc)
    except (DatastoreError, OSError) as error:
        if not holds_files(path):
            return None  # it was deleted meanwhile, or has no commit yet
        return HistoryEntry(name, error=_fault(name, error))
    answers = sum(segment.documents for segment in manifest.segments)
    return HistoryEntry(
        name,
        manifest.recipe.get("model", ""),
        answers,
        sum(segment.tokens for segment in manifest.segments) - answers,
        sum(file.size for segment in manifest.segments for file in segment.files.values()),
        last_use.isoformat(timespec="seconds"),
        "set aside" if DAMAGED in name else "",
    )


def _fault(name: str, error: Exception) -> str:
    """The error and its remedy, which differs from that of a datastore."""
    state = "set aside" if DAMAGED in name else "cannot be used"
    return f"{state}: {cause_of(error)}; `rest-local history forget {name}` deletes it"
