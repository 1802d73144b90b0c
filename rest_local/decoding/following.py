"""The datastores of an engine while they change: new commits are opened while it decodes, and used from the next step.

`DatastoreSwap` holds datastores that were opened anew until the engine's thread takes them. Opening takes milliseconds
and closing a large one as well, so both happen in other threads: the engine's thread only replaces the objects. A
thread that opens newest commits holds `DatastoreSwap.changing` from before it opens them until it has offered them. So
an older commit never replaces a newer one.

`Follower` has a thread of its own, which reads the end of each manifest a few times a second, opens new commits and
offers them to the engine. Running requests use them from their next step on, within a fraction of a second. Nothing
here is fatal: a commit that cannot be opened leaves the old one in use, with one warning. Reading beats notifications
of the system here: it works on network drives, and notices a commit of any process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

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


class _Offer(NamedTuple):
    """store: None to stop using the datastore; is_new: nothing was open at its path."""

    store: Datastore | None
    is_new: bool


class DatastoreSwap:
    """Those of one engine, at most one for each path. Any thread, except for `take`.

    on_change: called after each offer, in the thread that made it.
    """

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._waiting: dict[Path, _Offer] = {}
        self._retired: list[Datastore] = []
        self._closed = False

    def __bool__(self) -> bool:
        """Whether anything waits for `take`. Takes no lock."""
        return bool(self._waiting)

    def offer(self, path: Path, store: Datastore | None, *, is_new: bool = False) -> None:
        """Use `store` from the next step on in the place of the one with its path, None: stop using that. is_new: none
        is open at the path; without it, a datastore that is no longer in use then stays out of use.
        """
        with self._lock:
            before = self._waiting.pop(path, None)
            if before and before.store:
                self._retired.append(before.store)
            if store and self._closed:
                self._retired.append(store)
            elif not self._closed and (store or not (before and before.is_new)):
                self._waiting[path] = _Offer(store, is_new or bool(before and before.is_new))
        self.on_change()

    def current(self, stores: Sequence[Datastore]) -> list[Datastore]:
        """What `stores` are once everything that waits is taken."""
        with self._lock:
            return _exchanged(stores, self._waiting)

    def take(self, stores: Sequence[Datastore]) -> list[Datastore]:
        """The stores to use in the place of `stores`, in the engine's thread. `close_retired` closes the others."""
        with self._lock:
            fresh = _exchanged(stores, self._waiting)
            offered = [offer.store for offer in self._waiting.values() if offer.store]
            self._retired += [store for store in {*stores, *offered} if store not in fresh]
            self._waiting.clear()
            return fresh

    def close_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
        for store in retired:
            store.close()

    def close(self) -> None:
        """Close what was offered and not taken, and all that is offered later; again does nothing."""
        with self._lock:
            self._closed = True
            self._retired += [offer.store for offer in self._waiting.values() if offer.store]
            self._waiting.clear()
        self.close_retired()


def _exchanged(stores: Sequence[Datastore], waiting: dict[Path, _Offer]) -> list[Datastore]:
    open_paths = {store.path for store in stores}
    fresh = [waiting[store.path].store if store.path in waiting else store for store in stores]
    fresh += [offer.store for path, offer in waiting.items() if offer.is_new and path not in open_paths]
    return [store for store in fresh if store]


class Followed(Protocol):
    """An engine, or the inside of one."""

    @property
    def model(self) -> Model: ...
    @property
    def datastores(self) -> list[Datastore]: ...
    @property
    def swap(self) -> DatastoreSwap: ...


def reopen(engine: Followed, also: Iterable[Path] = ()) -> None:
    """Open new commits of every open datastore, and of those at the paths `also`, for the engine's next step.

    A datastore that cannot be opened stays as it was, with a warning; one that no longer exists is closed. From any
    thread. Takes the time of opening them.
    """
    follower = Follower(engine, also)
    follower.told.clear()
    follower.look()


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
        self.told = set(self._awaited)  # why they cannot be opened was said when the engine opened its datastores
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rest-local-follow", daemon=True)

    def start(self) -> None:
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
        swap = self._engine.swap
        for path in {*(store.path for store in self._engine.datastores), *self._awaited}:
            state, now = self._state(path), time.monotonic()
            if self._seen.get(path) != state or now >= self._retry_at.get(path, now + 1):
                self._seen[path] = state
                self._retry_at.pop(path, None)
                with swap.changing:
                    self._open(path)
        swap.close_retired()

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
        swap = self._engine.swap
        current = {store.path: store for store in swap.current(self._engine.datastores)}.get(path)
        if current is None and path not in self._awaited:
            return  # its owner stopped using it
        try:
            if current and read_manifest(find(path, self._hash)) == current.manifest:
                return
            store = _opened(self._engine, path)
        except (DatastoreNotFound, DatastoreVocabulary) as error:
            self.told.discard(path)
            if current:
                self._warn(path, f"{error}; continuing without it until there is one again")
                self._awaited.add(path)
                swap.offer(path, None)
        except DatastoreError as error:
            rest = "continuing with the version that was open" if current else "going on without it"
            self._warn(path, f"{error}; {rest}")
            self._retry_at[path] = time.monotonic() + RETRY_S
        else:
            self._warned.pop(path, None)
            self._awaited.discard(path)
            swap.offer(path, store, is_new=current is None)

    def _warn(self, path: Path, message: str) -> None:
        if self._warned.get(path) != message:
            self._warned[path] = message
            if path not in self.told:
                log.warning("%s", message)
        self.told.discard(path)

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
