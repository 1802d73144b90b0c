"""The text of a slot in a file of its own: for a conversation of `chat`, and for slots that clients save by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from rest_local import stop
from rest_local.errors import OptionError, ServiceClosed, SlotBusy
from rest_local.kv_cache.cell_files import NAMED
from rest_local.kv_cache.cell_format import LARGEST_STATE, SUFFIX, Head, Reader, Unusable, write
from rest_local.kv_cache.cell_states import begin_anew, load_part, load_states, part_of, states_of
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import Slot
from rest_local.kv_cache.slots import Slots

NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9 ._-]{0,126}[A-Za-z0-9_-])?")
USER_DIGITS = 32  # So many digits of the digest of a key are in the names of its files.

T = TypeVar("T")


class Run(Protocol):
    """Calls something in the thread that decodes, between two passes."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


def directly(call: Callable[[], T]) -> T:
    """Be the `Run` of the thread that decodes itself."""
    return call()


class Moved(NamedTuple):
    """Tokens and bytes that were written or read."""

    tokens: int
    size: int


def plan(
    slot: Slot, made: Mapping[str, str], part: int, shares: bool, most: int = LARGEST_STATE
) -> tuple[Head, list[bytes]] | None:
    """Decide how to save the text of a slot, in the thread that decodes. Return the first record and the others, or no
    others if they are parts that `save` copies one by one; None where the state has more than `most` bytes.
    """
    tokens = slot.tokens[: slot.n_past]
    if shares and min(tokens) >= 0 and part_of(slot, 0, min(part, len(tokens))):
        return Head(made, tokens, "parts", [*range(part, len(tokens), part), len(tokens)]), []
    if (states := states_of(slot, most)) is None:
        return None
    return Head(made, tokens, "states", [n for n, _ in states]), [state for _, state in states]


def save(slot: Slot, path: Path, head: Head, states: list[bytes], run: Run = directly) -> Moved:
    """Write the text of a slot to a file, as `plan` says. Raises OSError."""

    def copies() -> Iterator[bytes]:
        for begin, end in zip([0, *head.marks], head.marks, strict=False):
            stop.check()
            yield run(partial(part_of, slot, begin, end))

    return Moved(len(head.tokens), write(path, head, states or copies()))


def load(
    slot: Slot,
    path: Path,
    made: Mapping[str, str],
    run: Run = directly,
    begin: Callable[[Slot, list[int]], None] = begin_anew,
) -> Moved:
    """Have the text of a file in a slot, in the place of what it held. `begin`: gives the slot its tokens. Raises
    OSError, and Unusable; the slot is empty then, or as it was.
    """
    with Reader(path) as reader:
        reader.check(made, slot.backend.n_ctx)
        head, records = reader.head, zip(reader.head.marks, reader.records(), strict=True)
        calls: Iterable[Callable[[], bool]] = (partial(load_part, slot, record, end) for end, record in records)
        if head.kind == "states":
            calls = [partial(load_states, slot, list(records), len(head.tokens))]
        try:
            run(partial(begin, slot, list(head.tokens)))
            for call in calls:
                stop.check()
                if not run(call):
                    raise Unusable("there is no room for it, or it is of another context")
        except BaseException:
            run(slot.clear)
            raise
        return Moved(len(head.tokens), reader.size)


class NamedSlots:
    """Saves slots of one context by name, and restores them, while other requests go on.

    Any thread may call. A step in the thread that decodes copies the cells of one part at most, and the file is read
    and written in the caller's thread. The slot has to be idle, and no request gets it meanwhile; where there is no
    other, requests wait. `user`: as in `Slot`; the files and texts of others are not there. Raises OSError, SlotBusy,
    OptionError.
    """

    def __init__(self, sessions: Sessions, slots: Slots, run: Run, user: str = "") -> None:
        self._files, self._shares = sessions.files, sessions.shares
        self._slots, self._run, self._user = slots, run, user

    def save(self, number: int, name: str) -> Moved:
        """Write the text of a slot to the file of that name."""
        path = self._path(name)
        with self._held(number) as slot:
            head, states, size = self._run(partial(self._plan, slot, number))
            self._files.folder.make_room(size)
            return save(slot, path, head, states, self._run)

    def _plan(self, slot: Slot, number: int) -> tuple[Head, list[bytes], int]:
        if not slot.n_past or slot.owner.user != self._user:
            raise OptionError(f"id_slot: slot {number} holds nothing")
        if min(slot.tokens[: slot.n_past]) < 0:
            raise OptionError(f"id_slot: slot {number} holds images, which are not saved")
        planned = plan(slot, self._files.made, self._files.part, self._shares)
        if planned is None:
            raise OptionError(f"id_slot: the state of slot {number} has more than {LARGEST_STATE >> 20} MB")
        head, states = planned
        return head, states, sum(map(len, states)) or slot.backend.state_size(slot.branches.first_id)

    def restore(self, number: int, name: str) -> Moved:
        """Have a saved text in a slot, in the place of what it holds."""
        path = self._path(name)
        try:
            with self._held(number) as slot:
                moved = load(slot, path, self._files.made, self._run, self._begin)
                path.touch()
                return moved
        except Unusable as error:
            raise OptionError(f"filename: {name!r} is not restored: {error}") from error

    def _begin(self, slot: Slot, tokens: list[int]) -> None:
        self._slots.free(slot)
        begin_anew(slot, tokens)
        slot.owner = slot.owner.passed_to(self._user, is_kept=True)

    def erase(self, number: int) -> int:
        """Forget what a slot holds, and return how many tokens."""
        with self._held(number) as slot:
            n = slot.n_past if slot.owner.user == self._user else 0
            if n:
                self._run(slot.clear)
            return n

    @contextlib.contextmanager
    def _held(self, number: int) -> Iterator[Slot]:
        """Reserve a slot, so that no request gets it meanwhile."""
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
        path = path_of(self._files.folder.home, name, self._user)
        if path is None:
            raise OptionError(f"filename: {name!r} is no plain name of letters, digits, spaces and . _ -")
        return path


def path_of(home: Path, name: str, user: str = "") -> Path | None:
    """Return the file of that name, of a user (a digest, or empty); None for no plain name.

    Makes the folder of the file (OSError).
    """
    if not NAME.fullmatch(name):
        return None
    folder = home / NAMED
    folder.mkdir(mode=0o700, exist_ok=True)
    of_user = f"+{user[:USER_DIGITS]}" if user else ""  # no name has a +
    return folder / f"slot{of_user}-{name}{SUFFIX}"
