"""Every history there is: what each holds, and forgetting one for good.

Reads manifests only, so that a list costs the same however much was said.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

from rest_local.errors import DatastoreError, DatastoreNotFound, HistoryNotFound
from rest_local.retrieval.datastore import read_manifest
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.history import ASIDE, WAIT_S, cause_of, history_home
from rest_local.retrieval.home import holds_files, remove


@dataclass(frozen=True)
class Listed:
    """A history as it is listed. tokens: without separators; bytes: on disk; last_use: UTC, ISO 8601.

    error: why it cannot be read, or that it was set aside; the numbers of such a one are 0.
    """

    name: str
    model: str = ""
    answers: int = 0
    tokens: int = 0
    bytes: int = 0
    last_use: str = ""
    error: str = ""


def list_histories() -> list[Listed]:
    """All histories and what was set aside, by name. Raises OSError where the home cannot be read."""
    try:
        with os.scandir(history_home()) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except FileNotFoundError:
        return []
    return [listed for listed in map(_listed, names) if listed]


def forget_history(name: str) -> None:
    """Deletes a history by its listed name. Processes that have it open draft from it until they end, and keep what
    they generate afterwards.

    Raises HistoryNotFound, DatastoreLocked, DatastoreUnwritable.
    """
    if name not in {listed.name for listed in list_histories()}:  # looked up, never joined to a path unseen
        raise HistoryNotFound(name)
    try:
        remove(history_home() / name, WAIT_S)
    except DatastoreNotFound as error:  # by somebody else, between the two looks
        raise HistoryNotFound(name) from error


def _listed(name: str) -> Listed | None:
    path = history_home() / name
    try:
        manifest = read_manifest(path)
        last_use = datetime.datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, datetime.timezone.utc)
    except (DatastoreError, OSError) as error:
        if not holds_files(path):
            return None  # forgotten meanwhile, or a first commit that was never made
        return Listed(name, error=_fault(name, error))
    answers = sum(segment.documents for segment in manifest.segments)
    return Listed(
        name,
        manifest.recipe.get("model", ""),
        answers,
        sum(segment.tokens for segment in manifest.segments) - answers,
        sum(file.size for segment in manifest.segments for file in segment.files.values()),
        last_use.isoformat(timespec="seconds"),
        "set aside" if ASIDE in name else "",
    )


def _fault(name: str, error: Exception) -> str:
    """What is wrong with it and the way out, which for a history is not the one of a datastore."""
    state = "set aside" if ASIDE in name else "cannot be used"
    return f"{state}: {cause_of(error)}; `rest-local history forget {name}` deletes it"
