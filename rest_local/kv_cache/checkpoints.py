"""States to go back to, for memory that cannot be cut back (recurrent state).

- A checkpoint is kept in main memory. Each part of a prompt leaves one, and an answer one once in a while.
- Before a step whose draft is longer than what llama.cpp can roll back, the state is kept on the device (`protect`).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from rest_local.kv_cache.backend import Backend

MOST_CHECKPOINTS, LEAST_CHECKPOINTS = 32, 4  # A text keeps so many.
CHECKPOINT_BYTES = 2 << 30  # Those of all slots take so much main memory at most.
ANSWER_TOKENS, ANSWER_SHARE = 16, 0.02  # An answer leaves one after so many tokens, and for at most 2% of its time.
TURN_WEIGHT = 4.0  # Templates change texts where a prompt was cut, so that a checkpoint there is worth more.


@dataclass
class CheckpointCosts:
    """The costs of checkpoints of steps in a context, smoothed over some twenty of them.

    Milliseconds of one, and of going back to it; the share of them that were gone back to, and how many tokens were
    then evaluated again.
    """

    save_ms: float = 0.0
    restore_ms: float = 0.0
    rejected: float = 0.5
    again: float = 4.0
    _n_saved: int = 0
    _restored: int = 0

    def note_saved(self, ms: float) -> None:
        """Learn from a step that began with a checkpoint."""
        self._n_saved += 1
        self.save_ms += (ms - self.save_ms) / min(self._n_saved, 20)
        self.rejected -= self.rejected / 20

    def note_restored(self, ms: float, again: int) -> None:
        """Learn from a step that ended with going back to it."""
        self._restored += 1
        self.restore_ms += (ms - self.restore_ms) / min(self._restored, 20)
        self.again += (again - self.again) / min(self._restored, 20)
        self.rejected += 1 / 20


class Checkpoints:
    """The checkpoints of one sequence.

    is_on        whether this memory needs them
    states       tokens that were evaluated, and the state there; ascending
    turns        those where a prompt was cut or ended
    before_step  tokens and state before the newest step with a long draft; the state is on the device
    step_ms      what the newest step has taken for checkpoints
    costs        what they have cost; the slots of a context share it
    """

    def __init__(self, backend: Backend, seq: int, is_on: bool, costs: CheckpointCosts) -> None:
        self._backend, self._seq, self.is_on, self.costs = backend, seq, is_on, costs
        self.states: list[tuple[int, bytes]] = []
        self.turns = set[int]()
        self.before_step: tuple[int, bytes] | None = None
        self.step_ms = 0.0
        self._kept_at = self._keep_s = 0.0  # when the newest was kept, and what that took; seconds

    @property
    def newest(self) -> int:
        """Return how many tokens the newest checkpoint has."""
        return self.states[-1][0] if self.states else 0

    @property
    def size(self) -> int:
        """Return the bytes of main memory."""
        return sum(len(state) for _, state in self.states)

    def last_before(self, n: int) -> int:
        """Return how many tokens the last checkpoint has that has no more than `n`."""
        return max((at for at, _ in self.states if at <= n), default=0)

    def keep(self, n_past: int, is_turn: bool = False) -> None:
        """Keep the present state to come back to, if this memory needs that. About a millisecond.

        If there are too many, the one goes that is closest to the one before it, in proportion to how far both lie
        back. So a text that differs from some place on is evaluated again from about there, however long it is.
        """
        if not self.is_on or not n_past:
            return
        if is_turn:
            self.turns.add(n_past)
        if self.newest >= n_past:
            return
        begun = time.perf_counter()
        state = self._backend.save(self._seq, partial=True)
        if state:
            self.states.append((n_past, state))
        self._kept_at = time.perf_counter()
        self._keep_s = self._kept_at - begun
        most = CHECKPOINT_BYTES // (self._backend.n_slots * max(len(state), 1))
        if len(self.states) > max(LEAST_CHECKPOINTS, min(most, MOST_CHECKPOINTS)):
            places = [0, *(at for at, _ in self.states)]
            worth = [
                (TURN_WEIGHT if at in self.turns else 1.0) * (at - before) / (n_past - before)
                for before, at in itertools.pairwise(places[:-1])
            ]
            self.turns.discard(self.states.pop(worth.index(min(worth)))[0])

    def keep_in_answer(self, n_past: int) -> None:
        """Keep the state of an answer once in a while: templates often change its end."""
        if not self.is_on or n_past - self.newest < ANSWER_TOKENS:
            return
        if time.perf_counter() - self._kept_at > self._keep_s / ANSWER_SHARE:
            self.keep(n_past)

    def protect(self, n: int, n_past: int, n_again: int) -> int:
        """Make sure that a draft of `n` tokens can be taken back, by a checkpoint if llama.cpp cannot do it.

        Return how many tokens can. The state before the step is kept while its tokens are evaluated again.
        """
        self.step_ms = 0.0
        if n <= self._backend.rollback:
            return n
        at = n_past - n_again
        if self.before_step is None or self.before_step[0] != at or not n_again:
            begun = time.perf_counter()
            state = self._backend.save(self._seq, partial=True, on_device=True)
            self.before_step = (at, state) if state else None
            self.step_ms = 1e3 * (time.perf_counter() - begun)
        self.costs.note_saved(self.step_ms)
        return n if self.before_step else self._backend.rollback

    def drop_after(self, n_past: int) -> None:
        """Drop the checkpoints after the first `n_past` tokens, because the text was cut there."""
        while self.newest > n_past:
            self.states.pop()
        if self.before_step is not None and self.before_step[0] > n_past:
            self.before_step = None

    def clear(self) -> None:
        self.states = []
        self.turns.clear()
        self.before_step = None
