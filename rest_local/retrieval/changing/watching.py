"""Keeps datastores up to date with the files they were built from, as long as it runs.

    watcher = Watcher([Target("mycode", path, vocabulary)], update, report=print)
    watcher.run(stop)

The library watchfiles tells of changed files, some 50 to 100 ms after the last of them. An update looks at these files
only. Notifications are not complete: a directory that was renamed is one event, files in a new directory may have none,
and a queue may overflow. So a full update follows

- at the start, and whenever a watched path was replaced or came back
- soon after an event that may stand for many files
- some time after every activity, so that nothing is missed for good

and takes a small share of the time at most. Where the system cannot watch, full updates take the place of the events.

A path that vanishes, or is an empty directory all at once, may be a drive that is not mounted: its files stay in the
datastore, with a warning, until there is something again. Nothing that goes wrong with one datastore ends the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

from rest_local.retrieval.changing.watched import Batch, Commit, Target, Update, Watched

log = logging.getLogger("rest_local.watching")

STEP_MS = 50
DEBOUNCE_MS = 400
TICK_MS = 250
POLL_S = 5.0  # between full updates where the system cannot watch

Events = Callable[[Sequence[Path], threading.Event], Generator[Batch, None, None]]
"""Batches of changes below directories, an empty one now and then, until the event is set. Raises OSError."""


def system_events(roots: Sequence[Path], stop: threading.Event) -> Generator[Batch, None, None]:
    """The events of the system below directories. Raises OSError, RuntimeError where it cannot watch them."""
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
    """Watches the recorded paths of `targets`.

    report: called after each commit; more: called several times a second, gives targets that have come since, None once
    there will be no more; poll_s: make a full update so often and do not watch. Raises DatastoreError for an index that
    was not built from files.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        update: Update,
        report: Callable[[Commit], object] = lambda commit: None,
        *,
        more: Callable[[], Iterable[Target] | None] = lambda: None,
        events: Events = system_events,
        poll_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._update, self._report, self._clock = update, report, clock
        self._more, self._events, self._poll_s = more, events, poll_s
        self.indexes = [self._index(target) for target in targets]

    def run(self, stop: threading.Event) -> None:
        """Watch until `stop` is set, or no index is left."""
        while self._has_some() and not stop.is_set():
            for index in self.indexes:
                index.look_at_roots()
            roots = {root.path for index in self.indexes for root in index.roots if root.is_directory}
            try:
                self._watch(sorted(roots), stop)
            except FileNotFoundError:  # it vanished just now
                stop.wait(TICK_MS / 1000)
            except (OSError, RuntimeError) as error:  # watchfiles raises RuntimeError for what notify reports
                self._give_up(error)

    def _watch(self, roots: Sequence[Path], stop: threading.Event) -> None:
        """Watch until the roots are others."""
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
        """Whether there is an index to watch, or may be one later."""
        more = self._more()
        self.indexes += [self._index(target) for target in more or ()]
        return bool(self.indexes) or more is not None

    def _index(self, target: Target) -> Watched:
        return Watched(target, self._update, self._report, self._clock)

    def _polls(self, stop: threading.Event) -> Generator[Batch, None, None]:
        while not stop.wait(TICK_MS / 1000):
            for index in self.indexes if self._poll_s else ():
                index.full_within(self._poll_s or 0.0)
            yield ()

    def _give_up(self, error: Exception) -> None:
        self._poll_s = POLL_S
        log.warning("the system cannot watch these files (%s); looking at all of them every %.0f s", error, POLL_S)
