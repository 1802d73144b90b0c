"""The prefix cache: the slots of one context, which of them a prompt gets, and which is freed first.

Contract:

- A slot is idle or in use. An idle slot keeps its tokens for the next request with the same prefix until its cells are
  needed. The least recently used one is freed first, and saved to disk before, if sessions are kept.
- Attention passes over the cells of idle slots as well, so keeping one costs every decode a little. It is kept until
  that has cost as much as evaluating it again would. The total is then at most twice the cost with a known future.
- The same holds for tokens above the holes that freed cells leave.
- A long prompt pays much more for idle cells than a step. Where they can be saved to disk, they go before it.
- Where the prefix of a prompt is in a slot that has to stay (it is in use, or holds a longer conversation), the cells
  themselves are shared, and nothing is evaluated.
- Users share nothing: neither answers nor their times tell one what another has sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rest_local.drafting.models.drafter import Drafter
from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.cell_states import copy_in_order, part_of, share_prefix, use_lowest_cells
from rest_local.kv_cache.checkpoints import CheckpointCosts
from rest_local.kv_cache.sessions import Sessions
from rest_local.kv_cache.slot import Slot

WORTH_KEEPING = 0.5  # A slot that shares a smaller part with a prompt is another conversation, and kept if possible.
WHERE_EMPTY = 0.8  # The same, if an empty slot can take the prompt: two conversations can share a system prompt.
LEAST_SHARED = 16  # Fewer tokens are not shared: that costs a pass over all cells for each branch.
# What a cell costs the texts of others, next to its own: 3 000 cells took 0.34 of 8.4 ms (SmolLM2, 2 cores of a Zen 4).
MASKED = 0.04
# Idle texts that are on disk leave the cells for a prompt of so many new tokens. Behind 3 832 idle cells one of 1 594
# tokens took 1.14 times as long as in empty cells (SmolLM2, processor time), which is seconds, and now takes 0.96.
# Copying the text and reading it again took less than 0.1 s.
MAKES_WAY = 512


@dataclass(frozen=True)
class Match:
    """The slot that a prompt is to be evaluated in, and the slot whose prefix it shares."""

    slot: Slot
    n_cached: int  # tokens of the prompt that need no evaluation
    source: Slot | None  # the slot that holds them, if it is another one


class Slots:
    """The slots of one backend, and the choice of one for each prompt.

    `shares`: cells can be shared between sequences. `copies`: a state can be copied to another sequence. `in_order`: an
    answer has the same bits only if its cells are in the order of its tokens. `sessions`: saves what idle slots lose,
    if sessions are kept. `drafter`: follows the text of each slot, if there is one. `holes`: upper bound of the cells
    that were freed below others that stayed; attention passes over them.
    """

    def __init__(
        self,
        backend: Backend,
        shares: bool,
        copies: bool = True,
        in_order: bool = False,
        sessions: Sessions | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        costs = CheckpointCosts()
        self.slots = [
            Slot(backend, n, not shares, costs, drafter.text() if drafter else None) for n in range(backend.n_slots)
        ]
        self.sessions = sessions
        self.holes = 0
        self._copies = copies
        self._in_order = in_order and len(self.slots) > 1
        self._idle = list(self.slots)  # the least recently used first
        self._newest: Slot | None = None
        # Milliseconds: what the holes have cost, what a cell of each slot has cost since the slot became idle, and what
        # evaluating a token again costs, at the last charge.
        self._fragmentation_ms = 0.0
        self._idle_ms = dict.fromkeys(self.slots, 0.0)
        self._per_token = 0.0

    @property
    def idle_cells(self) -> int:
        """Return the tokens that idle slots keep. Cells that they share count for each."""
        return sum(slot.n_past for slot in self._idle)

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    def match(self, prompt: Sequence[int], keep: bool, user: str = "") -> Match:
        """Choose the slot for the prompt of a user. One slot at least has to be idle."""
        spare = next((slot for slot in self._idle if not slot.n_past), self._idle[0])
        if not keep:
            return Match(spare, 0, None)
        same = {slot: slot.reusable(prompt) if slot.owner.user == user else 0 for slot in self.slots}
        own = max(self._idle, key=lambda slot: (same[slot], -slot.n_past))
        longest = max(self.slots, key=lambda slot: same[slot]) if self._copies else own
        is_last = not self._copies or all(slot.n_past for slot in self._idle)
        least = WORTH_KEEPING if is_last else WHERE_EMPTY
        if same[own] >= least * own.n_past and same[own] >= same[longest]:
            return Match(own, same[own], None)
        if same[longest] < LEAST_SHARED or longest is spare or not self._copies:
            return Match(spare, same[spare], None)
        return Match(spare, same[longest], longest)

    def take(self, match: Match, n_new: int) -> Slot:
        """Put a matched slot in use, with the shared prefix in it. `n_new`: tokens of the prompt that it lacks."""
        slot, moved = match.slot, list[Slot]()
        if self._in_order and len(self._idle) == len(self.slots):
            for idle in self._idle:
                if idle not in (slot, match.source) and self._idle_ms[idle] > self._per_token > 0:
                    self.free(idle)
                    self._newest = None
            if n_new >= MAKES_WAY and self.sessions is not None:
                moved = [idle for idle in self._idle if idle is not slot and self.sessions.save_whole(idle)]
        if match.source is not None or match.n_cached < WORTH_KEEPING * slot.n_past:
            self._save(slot)
        self._idle.remove(slot)
        slot.idle_since = 0.0
        disturbed = slot is not self._newest or match.source is not None or bool(moved)
        placed = self._in_order and disturbed and self._put_in_order(slot, match, moved)
        self._newest = slot
        if match.source is not None and not placed:
            share_prefix(slot, match.source, match.n_cached)
        elif not match.n_cached:
            slot.clear()
        return slot

    def _put_in_order(self, slot: Slot, match: Match, moved: Sequence[Slot]) -> bool:
        """Move the reusable cells of a prompt to the lowest free cells, in order, and empty the slots `moved` before.

        Another slot was in use since, and may have freed cells below those of this one. Return False if it fails.
        """
        if match.n_cached:
            return copy_in_order(slot, match.source or slot, match.n_cached, moved)
        for each in (slot, *moved):
            each.clear()
        if (donor := next((each for each in self.slots if each.n_past), None)) is not None:
            use_lowest_cells(slot, part_of(donor, donor.n_past - 1, donor.n_past))
        return True

    def release(self, slot: Slot) -> None:
        """Make a slot idle from now on. Its tokens are kept while there is room."""
        if slot not in self._idle:
            slot.settle()
            self._idle.append(slot)
            self._idle_ms[slot] = 0.0
            slot.idle_since = time.monotonic()

    def charge(self, per_cell: float, per_token: float) -> None:
        """Charge a decode over the cells of the idle slots, and free the slots whose cells have cost too much.

        Milliseconds: what each cell cost it, and what evaluating a token again would cost. A slot is freed when its
        cells have cost more than that. If cells have to be in order, that waits for the next request that runs alone:
        llama.cpp fills what is freed with the next tokens of a running answer.
        """
        self._per_token = per_token
        if self._in_order:
            for slot in self._idle:
                self._idle_ms[slot] += MASKED * per_cell
            return
        self._fragmentation_ms += per_cell * self.holes
        for slot in self._idle:
            if slot.n_past:
                self._idle_ms[slot] += per_cell
                if self._idle_ms[slot] > per_token:
                    self.holes += slot.n_past
                    self.free(slot)
        if not any(slot.n_past for slot in self.slots):
            self.holes, self._fragmentation_ms = 0, 0.0

    def starts_anew(self, n_cached: int) -> bool:
        """Return True if a request that could reuse `n_cached` tokens should give them up, with all other texts, and
        use the lowest cells: the holes have cost as much by now as evaluating these tokens again would.
        """
        return self.holes > 0 and (n_cached < LEAST_SHARED or self._fragmentation_ms > n_cached * self._per_token)

    def evict(self) -> bool:
        """Free the cells of the least recently used idle slot. Return False if no idle slot has any."""
        for slot in self._idle:
            if slot.n_past:
                self.free(slot)
                return True
        return False

    def forget(self) -> None:
        """Free the cells of every idle slot."""
        self.holes, self._fragmentation_ms = 0, 0.0
        for slot in self._idle:
            self.free(slot)

    def free(self, slot: Slot) -> None:
        """Free the cells of a slot, once its text is saved."""
        self._save(slot)
        slot.clear()

    def _save(self, slot: Slot) -> None:
        if self.sessions is not None:
            self.sessions.save_lost(slot)
