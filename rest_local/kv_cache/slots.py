"""The prefix cache: the slots of one context, which of them a prompt gets, and which is freed first.

Contract:

- A slot is idle or in use. An idle slot keeps its tokens for the next request with the same prefix until its cells are
  needed. The least recently used one is freed first.
- Attention passes over the cells of idle slots as well, so keeping one costs every decode a little. It is kept until
  that has cost as much as evaluating it again would. The total is then at most twice the cost with a known future.
- The same holds for tokens above the holes that freed cells leave.
- Where the prefix of a prompt is in a slot that has to stay (it is in use, or holds a longer conversation), the cells
  themselves are shared, and nothing is evaluated.
- Users share nothing: neither answers nor their times tell one what another has sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.slot import Slot

WORTH_KEEPING = 0.5  # a slot that shares a smaller part with a prompt is another conversation: kept if possible
WHERE_EMPTY = 0.8  # likewise where an empty slot can take the prompt: two conversations have one system prompt
MASKED = 0.04  # of what a cell costs its own text; 3 000 cells of others: 0.34 of 8.4 ms (SmolLM2, 2 cores of a Zen 4)
LEAST_SHARED = 16  # tokens: sharing cells costs a pass over all of them for each branch


class Restoring(Protocol):
    """The cells of a text that are read into a slot from elsewhere. See `kv_cache.sessions`."""

    def advance(self, seconds: float, patient: bool) -> bool: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Match:
    """The slot that a prompt is to be evaluated in, and the slot whose prefix it shares."""

    slot: Slot
    kept: int  # tokens of the prompt that need no evaluation
    source: Slot | None  # the slot that holds them, if it is another one


class Slots:
    """`n_slots` of a backend. `shares`: its cells can be shared between sequences. `copies`: and a state be copied.
    `in_order`: an answer has the same bits only if its cells are in the order of its tokens.
    """

    def __init__(self, backend: Backend, shares: bool, copies: bool = True, in_order: bool = False) -> None:
        places = range(0, backend.n_slots * backend.n_branches, backend.n_branches)
        self.slots = [Slot(backend, first_id, checkpoints=not shares) for first_id in places]
        for slot in self.slots:
            slot.costs = self.slots[0].costs
        self._shares = shares
        self._copies = copies
        self._in_order = in_order and len(self.slots) > 1
        self._newest: Slot | None = None  # was taken last
        self._idle = list(self.slots)  # least recently used first
        self.holes = 0  # upper bound of the cells that were freed below others that stayed: attention passes over them
        self._fragmentation_ms = 0.0  # what the holes have cost
        self._per_token = 0.0  # milliseconds that evaluating a token again costs, at the last charge
        self._idle_ms = dict.fromkeys(self.slots, 0.0)  # what a cell has cost since the slot became idle
        self.before_loss: Callable[[Slot], None] = lambda slot: None  # of what an idle slot holds
        self.restore: Callable[[Slot], Restoring | None] = lambda slot: None  # begins to read more of its text

    @property
    def idle_cells(self) -> int:
        """Tokens that idle slots keep; cells they share count for each."""
        return sum(slot.n_past for slot in self._idle)

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    def match(self, prompt: Sequence[int], keep: bool, user: str = "") -> Match:
        """Where a prompt of a user would go. There has to be an idle slot."""
        if not keep:
            return Match(self._spare(), 0, None)
        same = {id(slot): slot.reusable(slot.common_prefix(prompt)) if slot.user == user else 0 for slot in self.slots}
        own = max(self._idle, key=lambda slot: (same[id(slot)], -slot.n_past))
        longest = max(self.slots, key=lambda slot: same[id(slot)]) if self._copies else own
        kept = same[id(own)]
        is_last = not self._copies or all(slot.n_past for slot in self._idle)
        least = WORTH_KEEPING if is_last else WHERE_EMPTY
        if kept >= least * own.n_past and kept >= same[id(longest)]:
            return Match(own, kept, None)
        spare = self._spare()
        if same[id(longest)] < LEAST_SHARED or longest is spare or not self._copies:
            return Match(spare, same[id(spare)], None)
        return Match(spare, same[id(longest)], longest)

    def take(self, match: Match) -> Slot:
        """Put a matched slot in use, with the shared prefix in it."""
        slot = match.slot
        if self._in_order and len(self._idle) == len(self.slots):
            for idle in self._idle:
                if idle not in (slot, match.source) and self._idle_ms[idle] > self._per_token > 0:
                    self.before_loss(idle)
                    idle.clear()
                    self._newest = None
        if match.source is not None or match.kept < WORTH_KEEPING * slot.n_past:
            self.before_loss(slot)
        self._idle.remove(slot)
        slot.is_idle, slot.idle_since = False, 0.0
        disturbed = slot is not self._newest or match.source is not None
        placed = self._in_order and disturbed and self._put_in_order(slot, match)
        self._newest = slot
        if match.source is not None and not placed:
            slot.share_prefix(match.source, match.kept)
        elif not match.kept:
            slot.clear()
        return slot

    def _put_in_order(self, slot: Slot, match: Match) -> bool:
        """Have what is kept of a prompt in the lowest cells that are free, in order. Another slot was in use since, and
        may have freed cells below those of this one. False where that cannot be done.
        """
        if match.kept:
            return slot.copy_in_order(match.source or slot, match.kept)
        slot.clear()
        if (donor := next((each for each in self.slots if each.n_past), None)) is not None:
            slot.use_lowest_cells(donor.part(donor.n_past - 1, donor.n_past))
        return True

    def release(self, slot: Slot) -> None:
        """The slot is idle from now on; its tokens are kept while there is room."""
        if slot not in self._idle:
            slot.settle()
            self._idle.append(slot)
            self._idle_ms[slot] = 0.0
            slot.is_idle, slot.idle_since = True, time.monotonic()

    def hold(self, slot: Slot) -> bool:
        """Take an idle slot as it is, until `release`; False where a request uses it."""
        if slot not in self._idle:
            return False
        self._idle.remove(slot)
        slot.is_idle = False
        return True

    def charge(self, per_cell: float, per_token: float) -> None:
        """Charge a decode over the cells of the idle slots. Milliseconds: what each cell cost it, and what evaluating a
        token again would cost. Frees the slots that have cost as much. Where cells have to be in order, that waits for
        the next request that runs alone: llama.cpp fills what is freed with the next tokens of a running answer.
        """
        if self._in_order:
            for slot in self._idle:
                self._idle_ms[slot] += MASKED * per_cell
            self._per_token = per_token
            return
        self._fragmentation_ms += per_cell * self.holes
        self._per_token = per_token
        for slot in self._idle:
            if slot.n_past:
                self._idle_ms[slot] += per_cell
                if self._idle_ms[slot] > per_token:
                    self.before_loss(slot)
                    self.holes += slot.n_past
                    slot.clear()
        if not any(slot.n_past for slot in self.slots):
            self._close_holes()

    def starts_anew(self, kept: int) -> bool:
        """Whether a request that could reuse `kept` tokens should give them up, with everything else that is kept, and
        use the lowest cells: the holes have cost as much by now as evaluating these tokens again would.
        """
        return self.holes > 0 and (kept < LEAST_SHARED or self._fragmentation_ms > kept * self._per_token)

    def evict(self) -> bool:
        """Free the cells of the least recently used idle slot; False where no idle slot has any."""
        for slot in self._idle:
            if slot.n_past:
                self.before_loss(slot)
                slot.clear()
                return True
        return False

    def forget(self) -> None:
        """Free the cells of every idle slot."""
        self._close_holes()
        for slot in self._idle:
            self.before_loss(slot)
            slot.clear()

    def _close_holes(self) -> None:
        self.holes, self._fragmentation_ms = 0, 0.0

    def _spare(self) -> Slot:
        """An empty idle slot, else the least recently used."""
        return next((slot for slot in self._idle if not slot.n_past), self._idle[0])
