"""Which requests have a slot: fair queueing, and who goes where the cells run out.

Contract:

- A free slot goes to the client that has the fewest. Of several they take turns, and of one client the request that
  has waited longest is first. Where a client has no slot and another one at least two, the youngest request of the
  client that has the most gives up its slot, once the other one has waited as long as evaluating its text again takes.
- Where the cells run out, these go, in this order: idle slots, drafts, parts of prompts, the youngest request (back to
  the queue). So the oldest always makes progress, and a request that fits the context alone is served in the end.
- Requests in the background give up their slots and cells to others, and go on later from what their slots hold, or
  from their text.
- A request that shares a prompt with one that evaluates it now waits until that is done.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from rest_local.decoding.core import RequestState, Slot, error_of
from rest_local.decoding.prefill import Prefill
from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.slot import count_cells
from rest_local.kv_cache.slots import LEAST_SHARED, Slots
from rest_local.llama.placeholders import common_prefix

log = logging.getLogger("rest_local.scheduler")


class RequestQueue:
    """A request is in `waiting` (no slot), or in `admitted` (a slot; the oldest first), or done.

    `shares`: cells can be shared between slots. `prefill`: knows what evaluating a prompt takes.
    """

    def __init__(self, backend: Backend, slots: Slots, shares: bool, prefill: Prefill) -> None:
        self.waiting: deque[RequestState] = deque()
        self.admitted: list[RequestState] = []
        self._backend, self._slots, self._shares, self._prefill = backend, slots, shares, prefill
        self._out_of_cells = False  # A request was sent back, and none has ended since.
        # A request that waits until another one ends or gets on with its prompt.
        self._blocked: RequestState | None = None
        # The round of the request that was admitted last, and of the last one of each client, where that is to come.
        self._round, self._rounds = 0, dict[str, int]()

    def __iter__(self) -> Iterator[RequestState]:
        return iter([*self.admitted, *self.waiting])

    def add(self, state: RequestState) -> None:
        client = state.request.client
        state.fair_queue_round = self._rounds[client] = max(self._round, self._rounds.get(client, 0)) + 1
        if state.request.background:
            self.waiting.append(state)
        else:
            self.waiting.insert(self._n_before_background, state)

    def admit(self) -> tuple[RequestState, Slot] | None:
        """Give the next request a slot that holds what there is of its prompt; None where none can be admitted."""
        while (state := self._next()) is not None:
            text, keep, user = state.text.tokens[:-1], state.request.keep_prefix, state.request.owner
            match = self._slots.match(text, keep, user)
            if not self.admitted and self._slots.starts_anew(match.kept):
                self._slots.forget()
                match = self._slots.match(text, keep, user)
            cells = self.cells_in_use((match.source or match.slot, match.kept)) + len(state.text.tokens) - match.kept
            lacks_cells = bool(self.admitted) and cells > self._backend.n_cells  # It would only be sent back.
            if lacks_cells and self.give_way(state):
                continue
            if lacks_cells or (self._shares and keep and _comes_soon(state, self.admitted, match.kept)):
                self._blocked = state
                break
            self.waiting.remove(state)
            self._round = max(self._round, state.fair_queue_round)
            self._rounds = {client: last for client, last in self._rounds.items() if last > self._round}
            slot = self._slots.take(match)
            slot.owner = slot.owner.passed_to(user, keep, bool(state.request.session))
            state.text.enter(slot)
            self.admitted.append(state)
            return state, slot
        return None

    def _next(self) -> RequestState | None:
        """Return the request whose turn it is, if it may have a slot."""
        if not self.waiting:
            return None
        clients = Counter(each.request.client for each in self.admitted)
        others = [each for each in self.admitted if not each.request.background]
        if not self._has_place and len(others) == len(self.admitted):
            shared = len(clients) == len(others) or all(each.request.client in clients for each in self.waiting)
            if shared:  # The usual case where requests wait: none has to give way.
                return None
        ready = islice(self.waiting, self._n_before_background or None)
        first = min(ready, key=lambda each: (clients[each.request.client], each.fair_queue_round), default=None)
        if first is None or first is self._blocked or (first.request.background and others):
            return None
        if self._out_of_cells and (self.admitted if first.request.background else others):
            return None
        if not self._has_place and not self.give_way(first):
            self._give_share(first, clients)
        return first if self._has_place else None

    def _give_share(self, first: RequestState, clients: Counter[str]) -> None:
        """Send the youngest request of the client with the most slots back to the queue for one whose client has none,
        if that has waited long enough and would have the cells.
        """
        most = max(clients.values(), default=0)
        if clients[first.request.client] or most < 2:
            return
        youngest = next(each for each in reversed(self.admitted) if clients[each.request.client] == most)
        waited, per_token = 1e3 * (time.perf_counter() - first.submitted), self._prefill.per_token(self.cells_in_use())
        stay = [(each.text.slot, len(each.text.tokens)) for each in self.admitted if each is not youngest]
        cells = count_cells(stay) + len(first.text.tokens)
        if waited >= per_token * len(youngest.text.tokens) and cells <= self._backend.n_cells:
            self.send_back(youngest)

    def give_way(self, state: RequestState) -> bool:
        """Send the youngest in the background back for a request that is not; False where there is none."""
        youngest = next((each for each in reversed(self.admitted) if each.request.background), None)
        if youngest is None or state.request.background:
            return False
        self.send_back(youngest)
        return True

    @property
    def _n_before_background(self) -> int:
        """Return how many wait before the first in the background."""
        return next((n for n, each in enumerate(self.waiting) if each.request.background), len(self.waiting))

    @property
    def _has_place(self) -> bool:
        """Return True if one more request could be served: a pass needs a place for the root of each."""
        return self._slots.has_idle and len(self.admitted) < min(self._backend.n_batch, self._backend.max_outputs)

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
        """Put it at the head of the queue, or of those in the background; its text stays, its cells are freed."""
        self._slots.free(state.text.slot)
        self._release(state)
        self._blocked = None
        try:
            state.deliver()
        except Exception as error:
            state.finish("error", error_of(error))
        if not state.done:
            self.waiting.insert(self._n_before_background if state.request.background else 0, state)

    def remove(self, state: RequestState) -> None:
        """Take it out, wherever it is; its slot keeps what it holds until it is needed."""
        if state in self.waiting:
            self.waiting.remove(state)
        self._release(state)
        self._out_of_cells = False
        self._blocked = None

    def unblock(self) -> None:
        """Look again at the request that waits for another one: there is more to share now."""
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
    kind = (state.request.owner, state.request.background)
    together = [other for other in admitted if (other.request.owner, other.request.background) == kind]
    prefilling = (other.text.tokens[:-1] for other in together if other.text.is_prefilling)
    longest = max((common_prefix(text, state.text.tokens) for text in prefilling), default=0)
    return longest >= kept + LEAST_SHARED
