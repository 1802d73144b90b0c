"""The datastores of an engine while they change: new commits are opened while it decodes, and used from the next step.

`OpenDatastores` holds datastores that were opened anew until the engine's thread takes them. Opening takes milliseconds
and closing a large one as well, so both happen in another thread: the engine's thread only replaces the objects.

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
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rest_local.errors import DatastoreError, DatastoreNotFound, DatastoreVocabulary, OptionError
from rest_local.llama.model import Model
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.format import MANIFEST
from rest_local.retrieval.home import find, folder, read_manifest

log = logging.getLogger("rest_local.datastore")

EVERY_S = 0.2
RETRY_S = 10.0  # A commit that could not be opened is tried again then.
CLOSE_S = 2.0  # The thread is given so long to end; a network drive may hold it longer.
_TAIL = 80  # Bytes: the checksum of a manifest is its last field.

_State = tuple[object, ...]


class _Offer(NamedTuple):
    """A datastore to use from the next step on, None to stop using it. `is_new`: nothing was open at its path."""

    store: Datastore | None
    is_new: bool


class OpenDatastores:
    """The datastores that an engine drafts from, at most one for each path, and those that take their place at the next
    step. Any thread, except for `take` and `use`.

    in_use     what requests draft from
    on_change  called after each offer, in the thread that made it
    """

    def __init__(self, stores: Sequence[Datastore] = ()) -> None:
        self.in_use = list(stores)
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._waiting: dict[Path, _Offer] = {}
        self._retired: list[Datastore] = []
        self._closed = False

    @property
    def has_news(self) -> bool:
        """Return True if anything waits for `take`. Takes no lock."""
        return bool(self._waiting)

    def offer(self, path: Path, store: Datastore | None, *, is_new: bool = False) -> None:
        """Use `store` from the next step on in place of the one with its path. None: stop using that one.

        `is_new`: no datastore is open at the path. Otherwise a path that is no longer in use stays out of use.
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

    def current(self) -> list[Datastore]:
        """Return the datastores that are in use once all offers are taken."""
        with self._lock:
            return self._exchanged()

    def named(self, names: Sequence[str] | None, still: bool = False) -> list[Datastore]:
        """Return the datastores of these names, None: all. Raises OptionError for one that is not open.

        `still`: leave such names out, because a datastore may be closed or opened anew while a request waits.
        """
        if names is None:
            return self.in_use
        known = {store.path.name: store for store in (self.in_use if still else self.current())}
        missing = [name for name in names if name not in known]
        if missing and not still:
            raise OptionError(f"datastore {missing[0]!r} is not open here; open are: {', '.join(known) or 'none'}")
        return [known[name] for name in names if name in known]

    def take(self) -> None:
        """Use the datastores that were offered, in the engine's thread. `close_retired` closes those they replace."""
        with self._lock:
            fresh = self._exchanged()
            offered = [offer.store for offer in self._waiting.values() if offer.store]
            self._retired += [store for store in {*self.in_use, *offered} if store not in fresh]
            self._waiting.clear()
            self.in_use = fresh

    def _exchanged(self) -> list[Datastore]:
        waiting, open_paths = self._waiting, {store.path for store in self.in_use}
        fresh = [waiting[store.path].store if store.path in waiting else store for store in self.in_use]
        fresh += [offer.store for path, offer in waiting.items() if offer.is_new and path not in open_paths]
        return [store for store in fresh if store]

    def trim(self) -> None:
        """Unmap the pages that lookups have touched (`Datastore.trim`). Only between two steps."""
        for store in self.in_use:
            store.trim()

    def close_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
        for store in retired:
            store.close()

    def close(self) -> None:
        """Close the datastores in use and those that were or will be offered. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._retired += [*self.in_use, *(offer.store for offer in self._waiting.values() if offer.store)]
            self._waiting.clear()
        with ExitStack() as stack:  # Each, whatever the others raise.
            for store in self._retired:
                stack.callback(store.close)


def _opened(model: Model, path: Path) -> Datastore:
    """Open a datastore; --no-mmap applies to every reader of the process."""
    known = model.vocabulary.identity
    mmap = None if model.options.mmap else False
    return Datastore.open(path, vocabulary_hash=known.hash, vocabulary_name=known.name, mmap=mmap)


class Follower:
    """Follows the datastores in use, and those of `paths` that do not exist yet or cannot be opened. `close` ends its
    thread.
    """

    def __init__(
        self, model: Model, datastores: OpenDatastores, paths: Iterable[Path] = (), every_s: float = EVERY_S
    ) -> None:
        self._model, self._datastores, self._every_s = model, datastores, every_s
        self._hash = model.vocabulary.identity.hash
        self._awaited = set(paths) - {store.path for store in datastores.in_use}
        self._seen: dict[Path, _State] = {}
        self._retry_at: dict[Path, float] = {}
        self._warned: dict[Path, str] = {}
        self.told = set(self._awaited)  # Opening the engine has said why.
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
        for path in {*(store.path for store in self._datastores.in_use), *self._awaited}:
            state, now = self._state(path), time.monotonic()
            if self._seen.get(path) != state or now >= self._retry_at.get(path, now + 1):
                self._seen[path] = state
                self._retry_at.pop(path, None)
                self._open(path)
        self._datastores.close_retired()

    def _run(self) -> None:
        try:
            while not self._closing:
                self.look()
                self._news.wait(self._every_s)
                self._news.clear()
        except Exception:  # Nothing above can catch it; answers go on with what is open.
            log.exception("new commits of datastores are not noticed any more")

    def _open(self, path: Path) -> None:
        """Offer the newest commit at a path, unless it is in use."""
        current = {store.path: store for store in self._datastores.current()}.get(path)
        if current is None and path not in self._awaited:
            return  # Its owner stopped using it.
        try:
            if current and read_manifest(find(path, self._hash)) == current.manifest:
                return
            store = _opened(self._model, path)
        except (DatastoreNotFound, DatastoreVocabulary) as error:
            self.told.discard(path)
            if current:
                self._warn(path, f"{error}; continuing without it until there is one again")
                self._awaited.add(path)
                self._datastores.offer(path, None)
        except DatastoreError as error:
            rest = "continuing with the version that was open" if current else "going on without it"
            self._warn(path, f"{error}; {rest}")
            self._retry_at[path] = time.monotonic() + RETRY_S
        else:
            self._warned.pop(path, None)
            self._awaited.discard(path)
            self._datastores.offer(path, store, is_new=current is None)

    def _warn(self, path: Path, message: str) -> None:
        if self._warned.get(path) != message:
            self._warned[path] = message
            if path not in self.told:
                log.warning("%s", message)
        self.told.discard(path)

    def _state(self, path: Path) -> _State:
        """Return a value that changes with every commit for the vocabulary, wherever the index lies."""
        return _end_of(folder(path, self._hash) / MANIFEST), _end_of(path / MANIFEST)


def _end_of(path: Path) -> _State | int | None:
    """Return a value that tells a file from the one that replaces it, such as its last bytes. None: there is no file.

    Another error gives its number. Opening the file makes a network drive ask its server, which may answer a `stat`
    from its memory.
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
