"""Saving a slot to a file that was named, and restoring it, while other requests go on.

Contract: any thread may call. `run` does something in the thread that decodes, between two passes; a step copies the
cells of PART tokens at most, and the file is read and written in the caller's thread. The slot has to be idle, and no
request gets it meanwhile; where there is no other, requests wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rest_local import stop
from rest_local.decoding.lane import Lane
from rest_local.errors import OptionError, ServiceClosed, SlotBusy
from rest_local.kv_cache import saved, slot_file
from rest_local.kv_cache.owner import Owner
from rest_local.kv_cache.session_files import SessionFiles, Unusable
from rest_local.kv_cache.sessions import LARGEST_STATE
from rest_local.kv_cache.slot import Slot

T = TypeVar("T")


class Run(Protocol):
    """Calls something in the thread that decodes, between two passes."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


class SlotFileUnusable(OptionError):
    """The file of a slot cannot be used here."""

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"filename: {name!r} is not restored: {cause}")


@dataclass(frozen=True)
class Moved:
    """Tokens and bytes that were written or read."""

    tokens: int
    size: int


class SlotFiles:
    """Those of one lane, for one `user`, as in `Slot`: the files and texts of others are not there. `run`: see above.
    Raises OSError, SlotBusy, SlotFileUnusable, OptionError.
    """

    def __init__(self, lane: Lane, run: Run, user: str = "") -> None:
        assert lane.sessions is not None
        self._lane, self._run, self._user = lane, run, user
        self._files: SessionFiles = lane.sessions.files
        self._slots = lane.scheduler.slots
        self._made = saved.made_with(lane.model, lane.context.settings, lane.exact)

    def save(self, number: int, name: str) -> Moved:
        """Write what a slot holds."""
        path = self._path(name)
        with self._held(number) as slot:
            head, states, size = self._run(partial(self._begin, slot, number))
            self._files.make_room(size)
            written = slot_file.write(path, head, states or self._parts(slot, head.marks))
        return Moved(len(head.tokens), written)

    def _begin(self, slot: Slot, number: int) -> tuple[slot_file.Head, list[bytes], int]:
        """In the thread that decodes: what is to be saved; states, if it is not parts; and how large it is."""
        tokens, part = slot.tokens[: slot.n_past], self._files.part
        if not tokens or slot.user != self._user:
            raise OptionError(f"id_slot: slot {number} holds nothing")
        if min(tokens) < 0:
            raise OptionError(f"id_slot: slot {number} holds images, which are not saved")
        if self._lane.capability.shares and slot.part(0, min(part, len(tokens))):
            marks = [*range(part, len(tokens), part), len(tokens)]
            size = slot.backend.state_size(slot.first_id)
            return slot_file.Head(self._made, tokens, "parts", marks), [], size
        states = slot.states(LARGEST_STATE)
        if states is None:
            raise OptionError(f"id_slot: the state of slot {number} has more than {LARGEST_STATE >> 20} MB")
        given = [state for _, state in states]
        return slot_file.Head(self._made, tokens, "states", [n for n, _ in states]), given, sum(map(len, given))

    def _parts(self, slot: Slot, marks: Sequence[int]) -> Iterator[bytes]:
        for begin, end in zip([0, *marks], marks, strict=False):
            stop.check()
            yield self._run(partial(slot.part, begin, end))

    def restore(self, number: int, name: str) -> Moved:
        """Have a saved text in a slot, in the place of what it holds."""
        path = self._path(name)
        try:
            with self._held(number) as slot, slot_file.Reader(path, self._made) as reader:
                n = len(reader.head.tokens)
                if not 0 < n < self._lane.context.n_ctx:
                    raise Unusable(f"its {n} tokens do not fit the context")
                try:
                    self._run(partial(self._clear, slot, list(reader.head.tokens)))
                    for call in self._fills(slot, reader):
                        stop.check()
                        if not self._run(call):
                            raise Unusable("there is no room for it, or it is of another context")
                except BaseException:
                    self._run(slot.clear)
                    raise
                path.touch()
                return Moved(n, reader.size)
        except Unusable as error:
            raise SlotFileUnusable(name, str(error)) from error

    def _clear(self, slot: Slot, tokens: list[int]) -> None:
        self._slots.before_loss(slot)
        slot.clear()
        slot.tokens, slot.saved, slot.owner, slot.n_saved = tokens, (), Owner(self._user), 0
        slot.user = self._user

    def _fills(self, slot: Slot, reader: slot_file.Reader) -> Iterator[Callable[[], bool]]:
        """What has the content of a file in a slot, call by call."""
        head = reader.head
        if head.kind == "states":
            states = list(zip(head.marks, reader.records(), strict=True))
            yield partial(slot.load_states, states, len(head.tokens))
            return
        for end, record in zip(head.marks, reader.records(), strict=True):
            yield partial(slot.add_part, record, end)

    def erase(self, number: int) -> int:
        """Forget what a slot holds; how many tokens."""
        with self._held(number) as slot:
            n = slot.n_past if slot.user == self._user else 0
            if n:
                self._run(slot.clear)
            return n

    @contextlib.contextmanager
    def _held(self, number: int) -> Iterator[Slot]:
        """A slot, which no request gets meanwhile."""
        if not 0 <= number < len(self._slots.slots):
            raise OptionError(f"id_slot: there are slots 0 to {len(self._slots.slots) - 1}")
        slot = self._slots.slots[number]
        if not self._run(partial(self._slots.hold, slot)):
            raise SlotBusy(number)
        try:
            yield slot
        finally:
            with contextlib.suppress(ServiceClosed):
                self._run(partial(self._slots.release, slot))

    def _path(self, name: str) -> Path:
        path = slot_file.path_of(self._files.home, name, self._user)
        if path is None:
            raise OptionError(f"filename: {name!r} is no plain name of letters, digits, spaces and . _ -")
        return path
