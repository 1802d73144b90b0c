"""Datastores that were opened anew and wait for the engine's thread, which exchanges them between two steps.

Opening takes milliseconds and closing a large one as well, so both happen in other threads: the engine's thread only
replaces the objects. A thread that opens newest commits holds `Offers.changing` from before it opens them until it has
offered them. So an older commit never replaces a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rest_local.retrieval.datastore import Datastore


class _Offer(NamedTuple):
    """store: None to stop using the datastore; is_new: nothing was open at its path."""

    store: Datastore | None
    is_new: bool


class Offers:
    """Those of one engine, at most one for each path. Any thread, except for `take`.

    told: called after each offer, in the thread that made it.
    """

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.told: Callable[[], None] = lambda: None
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
        self.told()

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
        """Close what is no longer used."""
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
