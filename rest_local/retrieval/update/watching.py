"""Keep datastores up to date with the files they were built from, as long as it runs.

    watcher = Watcher([Target("mycode", path, vocabulary)], update, report=print)
    watcher.run(stop)

The library watchfiles reports changed files, some 50 to 100 ms after the last change. An update looks at these files
only. Notifications are not complete: a directory that was renamed is one event, files in a new directory may have none,
and a queue may overflow. So a full update follows

- at the start, and whenever a watched path was replaced or came back
- soon after an event that may stand for many files
- some time after every activity, so that nothing is missed for good

and takes a small share of the time at most. If the system cannot watch, full updates take the place of the events.

A path that vanishes, or is an empty directory all at once, may be a drive that is not mounted: its files stay in the
datastore, with a warning, until there is something again. Nothing that goes wrong with one datastore ends the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec

from rest_local.errors import (
    DatastoreError,
    DatastoreLocked,
    DatastoreNotFound,
    DatastoreVocabulary,
    RestLocalError,
    printable,
)
from rest_local.retrieval.datastore import Datastore
from rest_local.retrieval.documents import DocumentTokenizer
from rest_local.retrieval.home import find, read_manifest
from rest_local.retrieval.sources.walk import by_extension
from rest_local.retrieval.update.updating import Updated

log = logging.getLogger("rest_local.watching")

MANY = 2000  # above so many changed files a walk over all files costs no more
SETTLE_S = 10.0
SOON = (10, 60.0)  # a full update waits so many times as long as the one before took, and so many seconds at most
SETTLED = (50, 600.0)
RETRY_S = 1.0  # a locked index or a full disk is tried again after this
_NEVER_HELD = frozenset({"__pycache__", "node_modules"})
_GITIGNORE = ".gitignore"

ADDED, MODIFIED, DELETED = 1, 2, 3  # the values of `watchfiles.Change`

Changes = Collection[tuple[int, str]]  # (kind, absolute path) of each change
Update = Callable[..., Updated]  # `retrieval.update.updating.update`, called with the path, `vocabulary` and `only`


@dataclass(frozen=True)
class Target:
    """An index to keep up to date. Messages contain its `name`."""

    name: str
    path: Path
    vocabulary: DocumentTokenizer


@dataclass(frozen=True)
class Commit:
    """An update that changed an index."""

    target: Target
    counts: Updated
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.target.name, **self.counts.to_dict(), "seconds": round(self.seconds, 3)}


@dataclass
class Root:
    """A recorded path. `include` has globs of the wanted files, none for the usual kinds. `identity` is None while the
    path is gone, and another directory of the same name has another one.
    """

    path: Path
    include: tuple[str, ...] = ()
    identity: tuple[int, ...] | None = None
    is_directory: bool = False

    def holds(self, path: str) -> str | None:
        """Return the rest of a path below this one, or None for any other path and while this one is gone."""
        base = os.path.join(self.path, "")
        return path[len(base) :] if self.identity and path.startswith(base) else None

    def wants(self, relative: str) -> bool:
        """Return True if a walk would look at a file of this name."""
        if self.include:
            return GitIgnoreSpec.from_lines(self.include).match_file(relative)
        return by_extension(os.path.basename(relative))

    def look(self, may_be_empty: Callable[[Path], bool]) -> bool:
        """Return True if the path was replaced since the last call. An unexpectedly empty one is gone."""
        before = self.identity
        try:
            status = os.stat(self.path)
            self.is_directory = stat.S_ISDIR(status.st_mode)
            self.identity = (status.st_dev, status.st_ino)
            if not self.is_directory:  # saving may replace a file or not
                self.identity += (status.st_mtime_ns, status.st_size)
            elif not _has_entries(self.path) and not may_be_empty(self.path):
                self.identity = None
        except OSError:
            self.identity, self.is_directory = None, False
        return self.identity != before


@dataclass(eq=False)
class Watched:
    """The index of one target. `pending` has the files to look at."""

    target: Target
    update: Update
    report: Callable[[Commit], object]
    clock: Callable[[], float]
    roots: list[Root] = field(default_factory=list)
    is_gone: bool = False
    pending: set[str] = field(default_factory=set)
    _full_at: float = 0.0
    full_ended: float = 0.0
    _full_took: float = 0.0
    _wait_until: float = 0.0
    _warned: str = ""

    def __post_init__(self) -> None:
        self._use(read_manifest(find(self.target.path, self.target.vocabulary.hash)).recipe)
        self.look_at_roots()

    def _use(self, recipe: Mapping[str, Any]) -> None:
        wanted = [
            (Path(path).resolve(), tuple(walk.get("include", ())))
            for walk in walks_of(recipe)
            for path in walk["paths"]
        ]
        if not wanted:
            raise DatastoreError(f"datastore {self.target.name}: it was not built from files that can be watched")
        if wanted != [(root.path, root.include) for root in self.roots]:
            self.roots = [Root(path, include) for path, include in wanted]

    def look_at_roots(self) -> bool:
        """Return True if a recorded path vanished, came back or was replaced."""
        changed = [root for root in self.roots if root.look(self._holds_nothing_of)]
        if changed:
            self._full_at = self.clock()
            gone = [str(root.path) for root in self.roots if root.identity is None]
            if gone:
                what = f"{', '.join(gone)} vanished or is empty; what it held stays until there is something again"
                self._warn(f"datastore {self.target.name}: {what}")
        return bool(changed)

    def _holds_nothing_of(self, root: Path) -> bool:
        below = os.path.join(root, "")
        known = self.target.vocabulary.hash
        try:
            with Datastore.open(self.target.path, vocabulary_hash=known, mmap=True) as store:
                return not any(name.startswith(below) for name in store.document_names())
        except DatastoreError:
            return False

    def note(self, batch: Changes) -> None:
        """Note changed files, and whether a full update is needed."""
        added = {path for kind, path in batch if kind == ADDED}
        doubtful = unsettled = False
        for kind, path in batch:
            for root in self.roots:
                relative = root.holds(path)
                if relative is None:
                    continue
                if os.path.basename(path) == _GITIGNORE:
                    doubtful = True
                elif not _may_hold(relative):
                    continue
                elif root.wants(relative):
                    self.pending.add(path)
                elif kind == ADDED and os.path.isdir(path) and not os.path.islink(path):
                    self.pending.update(self._below(path, root))
                elif kind == DELETED and path not in added:  # the path may have been a directory
                    unsettled = True
                    if not os.path.splitext(path)[1]:
                        self.pending.add(path)
        if len(self.pending) > MANY:
            self.pending.clear()
            doubtful = True
        if doubtful:
            self.full_no_later_than(self.full_ended + min(SOON[0] * self._full_took, SOON[1]))
        elif unsettled:
            self._full_when_settled()

    def _below(self, directory: str, root: Root) -> Iterator[str]:
        """Yield wanted files in a new directory. They have no events if they were there before it was watched."""
        for folder, folders, names in os.walk(directory):
            folders[:] = [name for name in folders if _may_hold(name)]
            for path in (os.path.join(folder, name) for name in names if _may_hold(name)):
                if root.wants(root.holds(path) or ""):
                    yield path
            if len(self.pending) > MANY:
                return

    def full_no_later_than(self, moment: float) -> None:
        self._full_at = min(self._full_at, max(moment, self.clock()))

    def _full_when_settled(self) -> None:
        share, most = SETTLED
        self.full_no_later_than(self.clock() + max(SETTLE_S, min(share * self._full_took, most)))

    def work(self) -> None:
        now = self.clock()
        if now < self._wait_until:
            return
        if now >= self._full_at and all(root.identity for root in self.roots):
            self.pending.clear()
            self._full_at = float("inf")
            self._full_took = self._update(None)
            self.full_ended = self.clock()
        elif only := frozenset(path for path in self.pending if any(root.holds(path) for root in self.roots)):
            self.pending.clear()
            self._update(only)
            self._full_when_settled()

    def _update(self, only: Collection[str] | None) -> float:
        """Update the index, and return how many seconds it took. An update that fails is due again later."""
        began = self.clock()
        try:
            counts = self.update(self.target.path, vocabulary=self.target.vocabulary, only=only)
        except DatastoreLocked:  # another writer's commit comes first
            self._again(only)
        except (DatastoreNotFound, DatastoreVocabulary) as error:
            self.is_gone = True
            self._warn(f"{error}; no longer watched")
        except RestLocalError as error:
            self._again(only)
            self._warn(f"{error}; it stays as it is")
        else:
            self._warned = ""
            self._use(counts.manifest.recipe)
            if counts.added or counts.changed or counts.deleted:
                self.report(Commit(self.target, counts, self.clock() - began))
        return self.clock() - began

    def _again(self, only: Collection[str] | None) -> None:
        self._wait_until = self.clock() + RETRY_S
        if only is None:
            self._full_at = self._wait_until
        else:
            self.pending.update(only)

    def _warn(self, message: str) -> None:
        if message != self._warned:
            self._warned = message
            log.warning("%s", printable(message))


def _has_entries(directory: Path) -> bool:
    with os.scandir(directory) as entries:
        return any(True for _ in entries)


def _may_hold(relative: str) -> bool:
    """Return True if a walk looks at a path at all: no part of it is hidden, or a folder of packages."""
    return not any(part.startswith(".") or part in _NEVER_HELD for part in relative.split(os.sep))


def walks_of(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the walks among the sources of a recipe, each with `paths` and maybe `include`."""
    sources = [] if "kind" in recipe else recipe.get("sources", [])
    return [one for one in sources if one.get("kind") == "walk" and one.get("paths")]


STEP_MS = 50
DEBOUNCE_MS = 400
TICK_MS = 250
POLL_S = 5.0  # interval of full updates if the system cannot watch

# Yields batches of changes below directories, an empty one now and then, until the event is set. Raises OSError.
Events = Callable[[Sequence[Path], threading.Event], Generator[Changes, None, None]]


def system_events(roots: Sequence[Path], stop: threading.Event) -> Generator[Changes, None, None]:
    """Return the system's events below directories. Raises OSError, RuntimeError if it cannot watch them."""
    from watchfiles import watch

    return watch(
        *roots,
        watch_filter=None,
        debounce=DEBOUNCE_MS,
        step=STEP_MS,
        stop_event=stop,
        rust_timeout=TICK_MS,
        yield_on_timeout=True,
        ignore_permission_denied=True,
    )


class Watcher:
    """A watcher of the recorded paths of `targets`. Raises DatastoreError for an index that was not built from files.
    `report` is called after each commit. `more` is called several times a second and returns targets that have come
    since, or None once there will be no more.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        update: Update,
        report: Callable[[Commit], object] = lambda commit: None,
        *,
        more: Callable[[], Iterable[Target] | None] = lambda: None,
        events: Events = system_events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._update, self._report, self._clock = update, report, clock
        self._more, self._events = more, events
        self._poll_s: float | None = None  # Seconds between full updates, once the system cannot watch.
        self.indexes = [self._index(target) for target in targets]

    def run(self, stop: threading.Event) -> None:
        """Watch until `stop` is set, or no index is left."""
        while self._has_some() and not stop.is_set():
            for index in self.indexes:
                index.look_at_roots()
            roots = {root.path for index in self.indexes for root in index.roots if root.is_directory}
            try:
                self._watch(sorted(roots), stop)
            except FileNotFoundError:  # a root vanished just now
                stop.wait(TICK_MS / 1000)
            except (OSError, RuntimeError) as error:  # watchfiles turns errors of the system into RuntimeError
                self._give_up(error)

    def _watch(self, roots: Sequence[Path], stop: threading.Event) -> None:
        """Watch until the roots change."""
        batches = self._polls(stop) if self._poll_s or not roots else self._events(roots, stop)
        with contextlib.closing(batches) as batches:
            for batch in batches:
                known = list(self.indexes)
                changed = not self._has_some() or self.indexes != known
                for index in self.indexes:
                    changed |= index.look_at_roots()
                for index in self.indexes:
                    index.note(batch)
                    index.work()
                self.indexes = [index for index in self.indexes if not index.is_gone]
                if changed or not self.indexes:
                    return

    def _has_some(self) -> bool:
        """Return True if there is an index to watch, or may be one later."""
        more = self._more()
        self.indexes += [self._index(target) for target in more or ()]
        return bool(self.indexes) or more is not None

    def _index(self, target: Target) -> Watched:
        return Watched(target, self._update, self._report, self._clock)

    def _polls(self, stop: threading.Event) -> Generator[Changes, None, None]:
        while not stop.wait(TICK_MS / 1000):
            for index in self.indexes if self._poll_s else ():
                index.full_no_later_than(index.full_ended + (self._poll_s or 0.0))
            yield ()

    def _give_up(self, error: Exception) -> None:
        self._poll_s = POLL_S
        log.warning("the system cannot watch these files (%s); looking at all of them every %.0f s", error, POLL_S)
