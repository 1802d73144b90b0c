"""Restoring a text from disk: what the files hold of a prompt beyond what any slot holds.

It is read in threads, and put into the slot between the passes of other requests. The rest is evaluated.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, TimeoutError

from rest_local.kv_cache.cell_files import CellFiles, Cells
from rest_local.kv_cache.cell_format import PART
from rest_local.kv_cache.cell_states import load_part, load_states
from rest_local.kv_cache.sessions import before_images
from rest_local.kv_cache.slot import Slot
from rest_local.kv_cache.slots import Slots
from rest_local.llama.placeholders import common_prefix

log = logging.getLogger("rest_local.sessions")

LEAST_RESTORED = PART  # Reading a file pays if it holds so many tokens more than the slots.
AHEAD = 4  # So many parts are read ahead.


def begin_restoring(slots: Slots, slot: Slot) -> Restoring | None:
    """Begin to read more of a slot's text from disk, all but its last token.

    Return None if there is nothing to read.
    """
    sessions = slots.sessions
    if sessions is None or not slot.owner.is_kept:
        return None
    text = before_images(slot.tokens[: len(slot.tokens) - 1])
    if len(text) < slot.n_past + LEAST_RESTORED:
        return None
    files = sessions.files
    if not sessions.shares:
        restoring = RestoringStates(slots, slot, files, text)
        return restoring if restoring.reads else None
    names = files.names(text, slot.owner.user)
    first = end = slot.n_past // files.part_tokens
    while end < len(names.parts) and files.has(names.parts[end]):
        end += 1
    if end * files.part_tokens < slot.n_past + LEAST_RESTORED:
        return None
    found = names.parts[:end]
    if files.has(names.ends[end]):
        found.append(names.ends[end])
    files.touch(found)
    return Restoring(slots, slot, files, found[first:])


class Restoring:
    """Reads parts of a text into its slot. Call `advance` until it is True, or `end`."""

    def __init__(self, slots: Slots, slot: Slot, files: CellFiles, names: list[str]) -> None:
        """`names`: of parts of the slot's text, the first of which begins at or before its first missing token."""
        self._slots, self._slot, self._files = slots, slot, files
        self._names = deque(names)
        self.reads: deque[Future[Cells | None]] = deque()
        self._begun, self._before = time.perf_counter(), slot.n_past
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._names and len(self.reads) < AHEAD:
            self.reads.append(self._files.get(self._names.popleft()))

    def advance(self, seconds: float, patient: bool) -> bool:
        """Load more of the text into the slot, for about so many seconds, and return True if that was all.

        `patient`: wait for the files.
        """
        over = time.perf_counter() + seconds
        while self.reads:
            if not patient and not self.reads[0].done():
                return False
            try:
                cells = self.reads[0].result(max(over - time.perf_counter(), 0.0))
            except TimeoutError:
                return False
            self.reads.popleft()
            self._read_ahead()
            if not self._load(cells):
                break
            if time.perf_counter() >= over and self.reads:
                return False
        self.end()
        return True

    def _load(self, cells: Cells | None) -> bool:
        """Load a part into the slot, in place of idle slots if there is no room. Return False after the last one."""
        slot, part = self._slot, self._files.part_tokens
        if cells is None:
            return False
        begin = slot.n_past // part * part
        end = begin + common_prefix(cells.head.tokens, slot.tokens[begin:-1])
        if end <= slot.n_past:
            return False
        while not load_part(slot, cells.records[0], end):
            if not self._slots.evict():
                return False
        slot.owner.n_persisted = slot.n_past
        return True

    def end(self) -> None:
        """Read no more."""
        for read in self.reads:
            read.cancel()
        self.reads.clear()
        self._names.clear()
        if (n := self._slot.n_past - self._before) > 0:
            log.info("restored %d tokens of a session in %.2f s", n, time.perf_counter() - self._begun)


class RestoringStates(Restoring):
    """Reads the states of memory that cannot be cut back, whose text is one file."""

    def __init__(self, slots: Slots, slot: Slot, files: CellFiles, text: list[int]) -> None:
        super().__init__(slots, slot, files, [])
        self._text = text
        self._tried: set[str] = set()
        self._look()

    def _look(self) -> None:
        """Begin to read the file that has the most of the text, LEAST_RESTORED more than the slot, if there is one."""
        self._n, self._name = self._slot.n_past + LEAST_RESTORED - 1, ""
        names: dict[int, str] = {}  # A beginning of this text, by its length, has one name.
        for file in self._files.present():
            for n, name in self._files.marks(file) if file not in self._tried else ():
                if self._n < n <= len(self._text):
                    names[n] = names.get(n) or self._files.name_of(self._text[:n], self._slot.owner.user)
                    if names[n] == name:
                        self._n, self._name = n, file
        if self._name:
            self._tried.add(self._name)
            self.reads.append(self._files.get(self._name))

    def _load(self, cells: Cells | None) -> bool:
        if cells is None:  # the file is gone: there may be another
            self._look()
            return True
        slot = self._slot
        self._files.touch([self._name])
        if load_states(slot, list(zip(cells.head.marks, cells.records, strict=True)), self._n):
            slot.owner.n_persisted = slot.n_past
        return False
