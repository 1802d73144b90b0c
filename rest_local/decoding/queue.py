"""Decide which requests have a slot: fair queueing, and who gives up cells if they run out.

Contract:

- A free slot goes to the client that has the fewest. Of several they take turns, and of one client the request that
  has waited longest is first.
- If the cells run out, these give theirs up, in this order: idle slots, drafts, parts of prompts, the youngest request,
  which goes back to the queue. So the oldest always makes progress, and a request that fits the context alone is
  served in the end.
- A request that shares a prompt with one that evaluates it now waits until that is done.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from rest_local.decoding.core import RequestState, Slot, error_of
from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.slot import count_cells
from rest_local.kv_cache.slots import LEAST_SHARED, Slots
from rest_local.llama.placeholders import common_prefix

log = logging.getLogger("rest_local.scheduler")


class RequestQueue:
    """Decides which request gets a slot next, and which one gives up its own if the cells run out.

    A request is in `waiting` (no slot), or in `admitted` (a slot; the oldest first), or done. `shares`: cells can be
    shared between slots.
    """

    def __init__(self, backend: Backend, slots: Slots, shares: bool) -> None:
        self.waiting: deque[RequestState] = deque()
        self.admitted: list[RequestState] = []
        self._backend, self._slots, self._shares = backend, slots, shares
        self._out_of_cells = False  # A request was sent back, and none has ended since.
        # A request that waits until another one ends or gets on with its prompt.
        self._blocked: RequestState | None = None
        # Fair queueing: the round that is being served, and the last one in which a request of each client waits.
        self._current_round, self._last_rounds = 0, dict[str, int]()

    def __iter__(self) -> Iterator[RequestState]:
        return iter([*self.admitted, *self.waiting])

    def add(self, state: RequestState) -> None:
        client = state.request.client
        last = max(self._current_round, self._last_rounds.get(client, 0))
        state.fair_queue_round = self._last_rounds[client] = last + 1
        self.waiting.append(state)

    def admit(self) -> tuple[RequestState, Slot] | None:
        """Give the next request the slot that holds most of its prompt. Return None if none can be admitted."""
        state = self._next()
        if state is None:
            return None
        text, keep, user = state.text.tokens[:-1], state.request.keep_prefix, state.request.owner
        match = self._slots.match(text, keep, user)
        if not self.admitted and self._slots.starts_anew(match.n_cached):
            self._slots.forget()
            match = self._slots.match(text, keep, user)
        cells = self.cells_in_use((match.source or match.slot, match.n_cached))
        cells += len(state.text.tokens) - match.n_cached
        lacks_cells = bool(self.admitted) and cells > self._backend.n_cells  # It would only be sent back.
        if lacks_cells or (self._shares and keep and _comes_soon(state, self.admitted, match.n_cached)):
            self._blocked = state
            return None
        self.waiting.remove(state)
        self._current_round = max(self._current_round, state.fair_queue_round)
        self._last_rounds = {client: last for client, last in self._last_rounds.items() if last > self._current_round}
        slot = self._slots.take(match, len(state.text.tokens) - match.n_cached)
        slot.owner = slot.owner.passed_to(user, keep and state.request.session is not None, bool(state.request.session))
        state.text.enter(slot)
        self.admitted.append(state)
        return state, slot

    def _next(self) -> RequestState | None:
        """Return the request whose turn it is, if it may have a slot."""
        most = min(self._backend.n_batch, self._backend.max_outputs)  # A pass needs a place for the root of each.
        if not self.waiting or not self._slots.has_idle or len(self.admitted) >= most:
            return None
        if self._out_of_cells and self.admitted:
            return None
        clients = Counter(each.request.client for each in self.admitted)
        first = min(self.waiting, key=lambda each: (clients[each.request.client], each.fair_queue_round))
        return None if first is self._blocked else first

    def cells_in_use(self, *more: tuple[Slot, int]) -> int:
        """Count the cells of admitted requests, as many as they will have after their prompts, and `more`; shared cells
        count once.
        """
        return count_cells([*((state.text.slot, len(state.text.tokens)) for state in self.admitted), *more])

    # Back, and out

    def make_room(self) -> None:
        """Send the youngest request back, because there are not enough cells."""
        log.info("out of cells: a request waits for others to finish")
        self.send_back(self.admitted[-1])
        self._out_of_cells = True

    def send_back(self, state: RequestState) -> None:
        """Put a request at the head of the queue. Its text stays, its cells are freed."""
        self._slots.free(state.text.slot)
        self._release(state)
        self._blocked = None
        try:
            state.deliver()
        except Exception as error:
            state.finish("error", error_of(error))
        if not state.done:
            self.waiting.appendleft(state)

    def remove(self, state: RequestState) -> None:
        """Take a request out, waiting or admitted. Its slot keeps its tokens until the cells are needed."""
        if state in self.waiting:
            self.waiting.remove(state)
        self._release(state)
        self._out_of_cells = False
        self._blocked = None

    def unblock(self) -> None:
        """Look again at the request that waits for another one, because there is more to share now."""
        self._blocked = None

    def _release(self, state: RequestState) -> None:
        if state in self.admitted:
            self.admitted.remove(state)
        if (slot := state.text.leave()) is not None:
            self._slots.release(slot)
        state.speculation.leave()


def _comes_soon(state: RequestState, admitted: Sequence[RequestState], kept: int) -> bool:
    """Return True if another request is about to evaluate more of this prompt than the cells hold now.

    So eight requests with one system prompt that come together evaluate it once, and none of them is later for it.
    """
    together = [other.text for other in admitted if other.request.owner == state.request.owner]
    prefilling = (text.tokens[:-1] for text in together if text.is_prefilling)
    longest = max((common_prefix(text, state.text.tokens) for text in prefilling), default=0)
    return longest >= kept + LEAST_SHARED
