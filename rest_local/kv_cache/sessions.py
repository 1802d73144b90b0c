"""Sessions: the texts of slots on disk, so that a restart, an unload or an eviction does not cost evaluating them.

- *Saved* is what a slot loses (it is evicted, or another text takes its place), what is idle for IDLE_S, and all of it
  at the end: each part that is not on disk yet. Nothing is written while a conversation goes on.
- *Restored* is what the files hold of a prompt beyond what any slot holds (`restoring`).
- Only texts that are worth it: of LEAST_TOKENS and more, or of a session that has a name.
- A text has the tokens on disk that it had in memory, so that what follows is evaluated in the same batches: in exact
  settings the answer after a restore has the bits of the one without it.
- The thread that decodes copies cells, and nothing else; `CellFiles` hashes, writes and reads in threads of its own. A
  part takes 0.4 ms of it for the toy model (0.4 MB), by the bytes some 5 ms for a model of 8B (16 MB).

Where the memory cannot be cut back (recurrent state), a text is one file: the state after its last token and the
checkpoints before it. It is found where the prompt begins with the whole text, or with that of a checkpoint.

Of a text with images, what comes before the first one is kept.

An owner is who may have a text restored: on a server with keys, the client's key. Without an owner, a text is not
written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rest_local.kv_cache.cell_files import CellFiles
from rest_local.kv_cache.cell_format import LARGEST_STATE, PART, Head
from rest_local.kv_cache.cell_states import part_of, states_of
from rest_local.kv_cache.slot import Slot
from rest_local.llama.placeholders import is_placeholder

LEAST_TOKENS = 1024  # A text without a name has so many. A GPU evaluates fewer in less than a second.
IDLE_S = 30.0  # An agent calls again within seconds, and its text would be written before it grows.
LOSS_S = 1.0  # Requests wait so long at most while a text is saved that a slot is losing; the rest of it is lost.
STOP_S = 10.0  # The end may take so long; a service manager waits 40 s, 30 of them for answers.
SHARE = 0.05  # Saving idle slots may take this share of the time of passes.
LOOK_S = 0.001  # Idle slots are looked for once saving may take so long, and not after every pass.


class Sessions:
    """Saves texts of one context, in the thread that decodes. `shares`: memory can be cut back."""

    def __init__(self, files: CellFiles, shares: bool) -> None:
        self.files, self.shares = files, shares
        self._saving = True
        self._budget_s = 0.0

    def save_lost(self, slot: Slot) -> None:
        """Save the text that a slot is about to lose."""
        self._save(slot, LOSS_S)

    def save_whole(self, slot: Slot) -> bool:
        """Save a text, and return True if all of it can be restored: its cells can then be freed."""
        text = slot.tokens[: slot.n_past]
        if not (text and self.shares and slot.owner.is_kept and slot.draft_text is None and min(text) >= 0):
            return False
        self._save(slot, LOSS_S)
        names, part = self.files.names(text, slot.owner.user), self.files.part_tokens
        rest = names.ends[-1:] if len(text) % part else []
        return all(self.files.has(name) for name in (*names.parts, *rest))

    def _save(self, slot: Slot, seconds: float, first: int = 0) -> None:
        """Save the parts of the text of a slot that are not on disk, from part `first` on, for `seconds` at most."""
        over = time.perf_counter() + seconds
        if not self._is_worth_it(slot):
            return
        if not self.shares:
            self._save_states(slot)
            return
        files, part = self.files, self.files.part_tokens
        text = before_images(slot.tokens[: slot.n_past])
        names = files.names(text, slot.owner.user)
        for place, name in enumerate(names.parts[first:], first):
            if not files.has(name):
                if not files.writes.wait_for_room(over - time.perf_counter()) or not files.writes.is_open:
                    return
                if not self._save_part(slot, name, text, place):
                    break  # what follows is of no use without it
                if time.perf_counter() >= over:
                    slot.owner.n_persisted = (place + 1) * part
                    return
        else:
            if len(names.parts) * part < len(text):
                self._save_part(slot, names.ends[-1], text, len(names.parts))
        slot.owner.n_persisted = slot.n_past

    def _save_part(self, slot: Slot, name: str, text: list[int], place: int) -> bool:
        begin = place * self.files.part_tokens
        tokens = text[begin : begin + self.files.part_tokens]
        if state := part_of(slot, begin, begin + len(tokens)):
            self.files.put(name, Head(tokens, [len(tokens)]), [state], place)
        return bool(state)

    def _save_states(self, slot: Slot) -> None:
        files, user = self.files, slot.owner.user
        name = files.name_of(slot.tokens[: slot.n_past], user)
        has_images = len(before_images(slot.tokens)) < slot.n_past
        if not files.has(name) and not has_images and (states := states_of(slot, LARGEST_STATE)):
            marks, records = [n for n, _ in states], [state for _, state in states]
            names = [files.name_of(slot.tokens[:n], user) for n in marks]
            files.writes.wait_for_room(LOSS_S)
            files.put(name, Head([], marks, names), records)
        slot.owner.n_persisted = slot.n_past

    def _is_worth_it(self, slot: Slot) -> bool:
        owner = slot.owner
        if not owner.is_kept or not self._saving or not self.files.writes.is_open:
            return False
        least = PART if owner.persist_short else LEAST_TOKENS
        return slot.n_past >= least and slot.n_past > owner.n_persisted

    def wakes_in(self, slots: Sequence[Slot]) -> float | None:
        """Return the seconds until one of these slots has been idle for long enough to be saved.

        0: now. None: never.
        """
        now = time.monotonic()
        return min((max(slot.idle_since + IDLE_S - now, 0.0) for slot in self._unsaved(slots)), default=None)

    def _unsaved(self, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if slot.idle_since and self._is_worth_it(slot)]

    def use_idle_time(self, slots: Sequence[Slot], seconds: float) -> None:
        """Save an idle slot for so many seconds."""
        now = time.monotonic()
        for slot in self._unsaved(slots):
            if now - slot.idle_since >= IDLE_S:
                self._save(slot, seconds, slot.owner.n_persisted // self.files.part_tokens)
                return

    def after_pass(self, slots: Sequence[Slot], seconds: float) -> None:
        """Save a little of an idle slot after a pass of so many seconds, as far as SHARE allows."""
        self._budget_s = min(self._budget_s + SHARE * seconds, 0.1)
        if self._budget_s < LOOK_S:
            return
        begun = time.perf_counter()
        if self.wakes_in(slots) == 0.0:
            self.use_idle_time(slots, 0.0)
            self._budget_s -= time.perf_counter() - begun
        else:
            self._budget_s = 0.0

    def stop_saving(self) -> None:
        """Save no more, because the content of the cells is unknown."""
        self._saving = False

    def close(self, slots: Sequence[Slot]) -> None:
        """Save the texts of these slots, the newest first. A second call does nothing."""
        over = time.perf_counter() + STOP_S
        try:
            for slot in sorted(slots, key=lambda slot: -slot.idle_since):
                self._save(slot, over - time.perf_counter())
        finally:
            self._saving = False
            self.files.close(max(over - time.perf_counter(), 1.0))


def before_images(tokens: list[int]) -> list[int]:
    """Return the text before the first image. An image is kept whole or not at all, and may take fewer positions than
    rows.
    """
    if not tokens or min(tokens) >= 0:
        return tokens
    return tokens[: next(place for place, token in enumerate(tokens) if is_placeholder(token))]
