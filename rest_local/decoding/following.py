"""Follows the datastores of an engine: a new commit of one of them is used within a fraction of a second.

Contract: `Follower` has a thread of its own, which reads the end of each manifest a few times a second, opens new
commits and offers them to the engine (`offers`). Running requests use them from their next step on. Nothing here is
fatal: a commit that cannot be opened leaves the old one in use, with one warning.

Reading beats notifications of the system here: it works on network drives, and notices a commit of any process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from rest_local.decoding.offers import Offers
from rest_local.errors import DatastoreError, DatastoreNotFound, DatastoreVocabulary
from rest_local.llama.model import Model
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.home import find, folder, read_manifest

log = logging.getLogger("rest_local.datastore")

EVERY_S = 0.2
RETRY_S = 10.0  # until a commit that could not be opened is tried again
CLOSE_S = 2.0  # for the thread to end; a network drive may hold it longer
_TAIL = 80  # bytes: the checksum of a manifest is its last field

_State = tuple[object, ...]


class Followed(Protocol):
    """An engine, or the inside of one."""

    @property
    def model(self) -> Model: ...
    @property
    def datastores(self) -> list[Datastore]: ...
    @property
    def offers(self) -> Offers: ...


def reopen(engine: Followed, also: Iterable[Path] = ()) -> None:
    """Open the newest commit of every open datastore, and of those at the paths `also`, for the engine's next step.

    A datastore that cannot be opened stays as it was, with a warning; one that no longer exists is closed. From any
    thread. Takes the time of opening them.
    """
    offers = engine.offers
    with offers.changing:
        current = {store.path: store for store in offers.current(engine.datastores)}
        for path in dict.fromkeys((*current, *also)):
            try:
                offers.offer(path, _opened(engine, path), is_new=path not in current)
            except (DatastoreNotFound, DatastoreVocabulary) as error:  # it was removed, or the model's part of it
                log.warning("%s; continuing without it", error)
                offers.offer(path, None)
            except DatastoreError as error:
                log.warning("%s; continuing with the version that was open", error)
    offers.close_retired()


def _opened(engine: Followed, path: Path) -> Datastore:
    """--no-mmap applies to every reader of the process."""
    known = engine.model.vocabulary.identity
    mmap = None if engine.model.options.mmap else False
    return Datastore.open(path, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=mmap)


class Follower:
    """Follows the datastores that `engine` uses at each moment, and those of `paths` that do not exist yet, or cannot
    be opened. `close` ends its thread.
    """

    def __init__(self, engine: Followed, paths: Iterable[Path] = (), every_s: float = EVERY_S) -> None:
        self._engine, self._every_s = engine, every_s
        self._hash = engine.model.vocabulary.identity.hash
        self._awaited = set(paths) - {store.path for store in engine.datastores}
        self._seen: dict[Path, _State] = {}
        self._retry_at: dict[Path, float] = {}
        self._warned: dict[Path, str] = {}
        self._told = set(self._awaited)  # why they cannot be opened was said when the engine opened its datastores
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rest-local-follow", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def look_soon(self) -> None:
        """Look now instead of at the next interval, after a commit that the caller knows of. Any thread."""
        self._news.set()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._closing = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def look(self) -> None:
        """Look at every datastore once, and offer what is new. Takes about 20 us for one without news."""
        offers = self._engine.offers
        for path in {*(store.path for store in self._engine.datastores), *self._awaited}:
            state, now = self._state(path), time.monotonic()
            if self._seen.get(path) != state or now >= self._retry_at.get(path, now + 1):
                self._seen[path] = state
                self._retry_at.pop(path, None)
                with offers.changing:
                    self._open(path)
        offers.close_retired()

    def _run(self) -> None:
        try:
            while not self._closing:
                self.look()
                self._news.wait(self._every_s)
                self._news.clear()
        except Exception:  # nothing above can catch it; answers go on with what is open
            log.exception("new commits of datastores are not noticed any more")

    def _open(self, path: Path) -> None:
        """Offer the newest commit at a path, unless it is in use."""
        offers = self._engine.offers
        current = {store.path: store for store in offers.current(self._engine.datastores)}.get(path)
        if current is None and path not in self._awaited:
            return  # its owner stopped using it
        try:
            if current and read_manifest(find(path, self._hash)) == current.manifest:
                return
            store = _opened(self._engine, path)
        except (DatastoreNotFound, DatastoreVocabulary) as error:
            self._told.discard(path)
            if current:
                self._warn(path, f"{error}; continuing without it until there is one again")
                self._awaited.add(path)
                offers.offer(path, None)
        except DatastoreError as error:
            rest = "continuing with the version that was open" if current else "going on without it"
            self._warn(path, f"{error}; {rest}")
            self._retry_at[path] = time.monotonic() + RETRY_S
        else:
            self._warned.pop(path, None)
            self._awaited.discard(path)
            offers.offer(path, store, is_new=current is None)

    def _warn(self, path: Path, message: str) -> None:
        if self._warned.get(path) != message:
            self._warned[path] = message
            if path not in self._told:
                log.warning("%s", message)
        self._told.discard(path)

    def _state(self, path: Path) -> _State:
        """What changes with every commit for the vocabulary, wherever it lies."""
        return _end_of(folder(path, self._hash) / MANIFEST), _end_of(path / MANIFEST)


def _end_of(path: Path) -> _State | int | None:
    """What tells a file from the one that replaces it, its last bytes among it; None if there is none, the number of
    another error. Opening it makes a network drive ask its server, which may answer a `stat` from its memory.
    """
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            file.seek(max(status.st_size - _TAIL, 0))
            return status.st_ino, status.st_mtime_ns, status.st_size, file.read(_TAIL)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.errno
