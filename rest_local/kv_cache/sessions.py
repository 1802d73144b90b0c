"""Sessions: the texts of slots on disk, so that a restart, an unload or an eviction does not cost evaluating them.

- *Saved* is what a slot loses (it is evicted, or another text takes its place), what is idle for IDLE_S, and all of it
  at the end: each part that is not on disk yet. Nothing is written while a conversation goes on.
- *Restored* is what the files hold of a prompt beyond what any slot holds, part by part between the passes of other
  requests. The rest of the prompt is evaluated.
- Only texts that are worth it: of LEAST_TOKENS and more, or of a session that has a name.
- A text has the tokens on disk that it had in memory, so that what follows is evaluated in the same batches: in exact
  settings the answer after a restore has the bits of the one without it.
- The thread that decodes copies cells, and nothing else; `CellFiles` hashes, writes and reads in threads of its
  own. A part takes 0.4 ms of it for the toy model (0.4 MB), by the bytes some 5 ms for a model of 8B (16 MB).

Where the memory cannot be cut back (recurrent state), a text is one file: the state after its last token and the
checkpoints before it. It is found where the prompt begins with the whole text, or with that of a checkpoint.

Of a text with images, what comes before the first one is kept.

An owner is who may have a text restored: on a server with keys, the client's key. Without an owner, a text is not
written.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError

from rest_local.kv_cache.cell_files import CellFiles, Cells
from rest_local.kv_cache.cell_format import LARGEST_STATE, PART, Head
from rest_local.kv_cache.slot import Slot
from rest_local.llama.placeholders import common_prefix, is_placeholder

log = logging.getLogger("rest_local.sessions")

LEAST_TOKENS = 1024  # of a text without a name: evaluating fewer takes a GPU less than a second
LEAST_RESTORED = PART  # tokens that a file has to hold beyond the slots
IDLE_S = 30.0  # an agent calls again within seconds, and a text that is about to grow is written then
LOSS_S = 1.0  # that requests wait at most while a text is saved that a slot is losing; the rest of it is lost
STOP_S = 10.0  # that the end may take; a service manager waits 40 s, 30 of them for answers
SHARE = 0.05  # of the time of passes that may go into saving idle slots meanwhile
LOOK_S = 0.001  # of that time, before idle slots are looked for: not after every pass
AHEAD = 4  # parts that are read ahead


class Restoring:
    """What is read into a slot. `advance` until it is True."""

    def __init__(self, sessions: Sessions, slot: Slot, names: Sequence[str]) -> None:
        """`names`: of parts of the slot's text, the first of which begins at or before its first missing token."""
        self._sessions, self._slot = sessions, slot
        self._names = deque(names)
        self._reads: deque[Future[Cells | None]] = deque()
        self._begun, self._before = time.perf_counter(), slot.n_past
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._names and len(self._reads) < AHEAD:
            self._reads.append(self._sessions.files.get(self._names.popleft()))

    def advance(self, seconds: float, patient: bool) -> bool:
        """Have more of the text in the slot, for about so long; whether that was all. `patient`: wait for the files."""
        over = time.perf_counter() + seconds
        while self._reads:
            if not patient and not self._reads[0].done():
                return False
            try:
                cells = self._reads[0].result(max(over - time.perf_counter(), 0.0))
            except TimeoutError:
                return False
            self._reads.popleft()
            self._read_ahead()
            if cells is None or not self._add(cells):
                break
            if time.perf_counter() >= over and self._reads:
                return False
        self.end()
        return True

    def _add(self, cells: Cells) -> bool:
        slot, part = self._slot, self._sessions.files.part
        begin = slot.n_past // part * part
        end = begin + common_prefix(cells.head.tokens, slot.tokens[begin:-1])
        return end > slot.n_past and self._sessions.add_part(slot, cells.records[0], end)

    def end(self) -> None:
        """Read no more."""
        for read in self._reads:
            read.cancel()
        self._reads.clear()
        self._names.clear()
        self._sessions.note_restored(self._slot.n_past - self._before, time.perf_counter() - self._begun)


class RestoringStates:
    """The same of memory that cannot be cut back, whose text is one file."""

    def __init__(self, sessions: Sessions, slot: Slot, text: list[int]) -> None:
        self._sessions, self._slot, self._text = sessions, slot, text
        self._begun = time.perf_counter()
        self._look()

    def _look(self) -> None:
        """Begin to read the file that has the most of the text, if there is one."""
        self._n, self._name = self._sessions.longest(self._slot, self._text)
        self._read = self._sessions.files.get(self._name) if self._name else None

    @property
    def found(self) -> bool:
        """Whether there is something to read."""
        return self._read is not None

    def advance(self, seconds: float, patient: bool) -> bool:
        """Have the states in the slot once they are read; whether that was all. `patient`: wait for them."""
        over = time.perf_counter() + seconds
        while self._read is not None:
            if not patient and not self._read.done():
                return False
            try:
                cells = self._read.result(max(over - time.perf_counter(), 0.0))
            except TimeoutError:
                return False
            if cells is not None:
                self._read = None
                self._sessions.load(self._slot, self._name, cells, self._n, self._begun)
            else:  # then the file is gone: there may be another
                self._sessions.drop(self._name)
                self._look()
        return True

    def end(self) -> None:
        """Read no more."""
        if self._read is not None:
            self._read.cancel()
            self._read = None


class Sessions:
    """Those of one context, for the thread that decodes. `shares`: memory can be cut back."""

    def __init__(self, files: CellFiles, slots: Sequence[Slot], shares: bool) -> None:
        self.files = files
        self.restored = 0  # tokens
        self.evict: Callable[[], bool] = lambda: False  # free an idle slot, if there is one
        self._slots, self._shares = slots, shares
        self._saving = True
        self._budget = 0.0  # seconds
        self._marks: dict[str, list[tuple[int, str]]] = {}  # by file: where a text can be gone on with

    # Restoring

    def restore(self, slot: Slot) -> Restoring | RestoringStates | None:
        """Begin to have more of the slot's text in it, as the disk has, but the last token. None: nothing."""
        if not slot.is_kept:
            return None
        text = _before_images(slot.tokens[: len(slot.tokens) - 1])
        if len(text) < slot.n_past + LEAST_RESTORED:
            return None
        if not self._shares:
            restoring = RestoringStates(self, slot, text)
            return restoring if restoring.found else None
        part = self.files.part
        first = slot.n_past // part
        names = self.files.names(text, slot.user)
        end = first
        while end < len(names.parts) and self.files.has(names.parts[end]):
            end += 1
        if end * part < slot.n_past + LEAST_RESTORED:
            return None
        found = names.parts[:end]
        if self.files.has(names.ends[end]):
            found.append(names.ends[end])
        self.files.touch(found)
        return Restoring(self, slot, found[first:])

    def add_part(self, slot: Slot, state: bytes, end: int) -> bool:
        """Have a part of the text of a slot in it, up to `end`; where there is no room, in the place of idle slots."""
        while not slot.add_part(state, end):
            if not self.evict():
                return False
        slot.n_saved = slot.n_past
        return True

    def note_restored(self, n: int, seconds: float) -> None:
        """So many tokens were restored."""
        self.restored += n
        if n:
            log.info("restored %d tokens of a session in %.2f s", n, seconds)

    def longest(self, slot: Slot, text: list[int]) -> tuple[int, str]:
        """Return how much of a text a file has, and its name; "" where none has LEAST_RESTORED more than the slot."""
        best, best_name = slot.n_past + LEAST_RESTORED - 1, ""
        names: dict[int, str] = {}  # of the beginnings of this text, by their length
        for file in self.files.present():
            for n, name in self._marks_of(file):
                if best < n <= len(text):
                    names[n] = names.get(n) or self.files.name_of(text[:n], slot.user)
                    if names[n] == name:
                        best, best_name = n, file
        return best, best_name

    def drop(self, name: str) -> None:
        """Look for no text in this file."""
        self._marks[name] = []

    def load(self, slot: Slot, name: str, cells: Cells, n: int, begun: float) -> None:
        """Have the first `n` tokens of a text from such a file in its slot. `begun`: when it was looked for."""
        self.files.touch([name])
        if slot.load_states(list(zip(cells.head.marks, cells.records, strict=True)), n):
            slot.n_saved = slot.n_past
            self.note_restored(n, time.perf_counter() - begun)

    def _marks_of(self, file: str) -> list[tuple[int, str]]:
        """Where a text can be gone on with: lengths, and the names of the texts up to there."""
        marks = self._marks.get(file)
        if marks is None:
            if len(self._marks) > 4096:
                self._marks.clear()
            head = self.files.head(file)
            marks = self._marks[file] = list(zip(head.marks, head.names, strict=False)) if head else []
        return marks

    # Saving

    def lose(self, slot: Slot) -> None:
        """The slot is about to lose what it holds: save it."""
        self.save(slot, LOSS_S)

    def save(self, slot: Slot, seconds: float, first: int = 0) -> bool:
        """Save what is not on disk of the text of a slot, from part `first` on, for so long at most; whether all is."""
        over = time.perf_counter() + seconds
        if not self._is_worth_it(slot):
            return True
        if not self._shares:
            return self._save_whole(slot)
        text = _before_images(slot.tokens[: slot.n_past])
        part, names = self.files.part, self.files.names(text, slot.user)
        for place, name in enumerate(names.parts[first:], first):
            if not self.files.has(name):
                if not self.files.writes.wait_for_room(over - time.perf_counter()) or not self.files.writes.is_open:
                    return False
                state = slot.part(place * part, (place + 1) * part)
                if not state:
                    break  # what follows is of no use without it
                self._put(name, text[place * part : (place + 1) * part], state, place)
                if time.perf_counter() >= over:
                    slot.n_saved = (place + 1) * part
                    return False
        else:
            place = len(names.parts)  # of what follows the whole parts
            if place * part < len(text) and (state := slot.part(place * part, len(text))):
                self._put(names.ends[-1], text[place * part :], state, place)
        slot.n_saved = slot.n_past
        return True

    def _put(self, name: str, tokens: Sequence[int], state: bytes, place: int) -> None:
        self.files.put(name, Head(self.files.made, tokens, "parts", [len(tokens)]), [state], place)

    def _is_worth_it(self, slot: Slot) -> bool:
        if not slot.is_kept or not self._saving or not self.files.writes.is_open:
            return False
        least = PART if slot.is_named else LEAST_TOKENS
        return slot.n_past >= least and slot.n_past > slot.n_saved

    def _save_whole(self, slot: Slot) -> bool:
        name = self.files.name_of(slot.tokens[: slot.n_past], slot.user)
        if not self.files.has(name) and len(_before_images(slot.tokens)) >= slot.n_past:
            states = slot.states(LARGEST_STATE)
            if states is None:
                slot.n_saved = slot.n_past
                return True
            marks, records = [n for n, _ in states], [state for _, state in states]
            names = [self.files.name_of(slot.tokens[:n], slot.user) for n in marks]
            self.files.writes.wait_for_room(LOSS_S)
            self.files.put(name, Head(self.files.made, [], "states", marks, names), records)
            self._marks[name] = list(zip(marks, names, strict=True))
        slot.n_saved = slot.n_past
        return True

    # When

    def wakes_in(self) -> float | None:
        """Seconds until there is an idle slot to save; 0: now. None: none."""
        now = time.monotonic()
        waits = [max(slot.idle_since + IDLE_S - now, 0.0) for slot in self._unsaved()]
        return min(waits, default=None)

    def _unsaved(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.idle_since and self._is_worth_it(slot)]

    def use_idle_time(self, seconds: float) -> None:
        """Save idle slots for so long."""
        now = time.monotonic()
        for slot in self._unsaved():
            if now - slot.idle_since >= IDLE_S:
                self.save(slot, seconds, slot.n_saved // self.files.part)
                return

    def after_pass(self, seconds: float) -> None:
        """A pass took so long: save a little of an idle slot, where that takes SHARE of the time of passes at most."""
        self._budget = min(self._budget + SHARE * seconds, 0.1)
        if self._budget < LOOK_S:
            return
        begun = time.perf_counter()
        if self.wakes_in() == 0.0:
            self.use_idle_time(0.0)
            self._budget -= time.perf_counter() - begun
        else:
            self._budget = 0.0

    def stop_saving(self) -> None:
        """What the cells hold is not known any more."""
        self._saving = False

    def close(self) -> None:
        """Save all that is held, the newest first; a second call does nothing."""
        over = time.perf_counter() + STOP_S
        try:
            for slot in sorted(self._slots, key=lambda slot: -slot.idle_since):
                self.save(slot, over - time.perf_counter())
        finally:
            self._saving = False
            self.files.close(max(over - time.perf_counter(), 1.0))


def _before_images(tokens: list[int]) -> list[int]:
    """The text before the first image: an image is kept whole or not at all, and may take fewer positions than rows."""
    if not tokens or min(tokens) >= 0:
        return tokens
    return tokens[: next(place for place, token in enumerate(tokens) if is_placeholder(token))]
