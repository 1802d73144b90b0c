"""A request on its way: waiting, evaluating its prompt, generating, done; and who is told what came of it.

Contract: the scheduler moves it along, on one thread; what came so far is read by `Stream` and `Ticket`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rest_local.decoding.faults import of_request
from rest_local.decoding.generation import Chooser, Generation, Taken
from rest_local.decoding.request import Request
from rest_local.decoding.stream import Answer, Piece, Result
from rest_local.errors import RestLocalError
from rest_local.kv_cache.slot import Slot


class OwnedChooser(Chooser, Protocol):
    """A sampler that is owned: closed when its request is done."""

    def close(self) -> None: ...


class Job:
    """`make` gives it a generation in the slot that it is admitted to. `wake`: told of pieces and of the end, in the
    thread that steps.
    """

    def __init__(
        self,
        request: Request,
        sampler: OwnedChooser,
        answer: Answer,
        make: Callable[[Slot], Generation],
        finished: Callable[[Result], None],
    ) -> None:
        self.request, self.sampler, self.answer = request, sampler, answer
        self.prompt: Sequence[int] = request.prompt
        self.generation: Generation | None = None
        self.slot: Slot | None = None
        self.done = False
        self.left = False  # nobody waits for it any more
        self.error: RestLocalError | None = None
        self.wake: Callable[[], None] | None = None
        self.submitted = time.perf_counter()
        self._make, self._finished = make, finished
        self._pieces: deque[Piece] = deque()
        self._taken: Taken | None = None  # the newest step, whose text is not delivered yet

    @property
    def result(self) -> Result:
        """What has come so far; complete when `done`."""
        return self.answer.result

    @property
    def text(self) -> Sequence[int]:
        """Everything that has to be in the cells, and the root behind it: the prompt and what was said. A copy."""
        generation = self.generation
        if generation is None:
            return self.prompt
        if self.slot is None:  # sent back to the queue
            return [*generation.pending, generation.root]
        return [*generation.slot.tokens, *generation.pending, generation.root]

    @property
    def n_tokens(self) -> int:
        """Of `text`, which copies it."""
        generation = self.generation
        if generation is None:
            return len(self.prompt)
        return (0 if self.slot is None else self.slot.n_past) + len(generation.pending) + 1

    @property
    def prefilling(self) -> bool:
        return self.generation is not None and bool(self.generation.pending)

    @property
    def has_news(self) -> bool:
        """Whether `take` would give something."""
        return bool(self._pieces)

    def leave(self) -> None:
        """Nobody waits for it any more: a pass that is broken off is not done again for it. From any thread."""
        self.left = True
        if self.generation is not None:
            self.generation.cancelled = True

    def admit(self, slot: Slot, text: Sequence[int]) -> None:
        """Go to work in `slot`. Raises PromptEmpty, PromptTooLong."""
        self.slot = slot
        if self.generation is None:
            self.generation = self._make(slot)
            if self.left:  # asked behind the line above, as `leave` asks for the generation behind its own
                self.generation.cancelled = True
            self.generation.begin(text)
            if len(self.request.prediction):
                self.generation.sources.predict(self.request.prediction)
        else:
            self.generation.resume(slot, text)

    def receive(self, taken: Taken, begun: float) -> None:
        """The tokens of a step that began at `begun`: only what decides whether the answer goes on. The rest is
        `deliver`, which the end of the job does, too.
        """
        self._taken = taken
        self.answer.receive(taken.tokens, begun)

    def deliver(self) -> None:
        """Finish the step that was received, and make its text readable; nothing where that was done."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        piece = self.answer.take(taken.finish())
        if piece.text or piece.tokens:
            self._pieces.append(piece)
            if self.wake:
                self.wake()

    def take(self) -> list[Piece]:
        """What has come since the last call; any thread."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return pieces

    def finish(self, reason: str, error: RestLocalError | None = None) -> None:
        """The end, however it came; again does nothing."""
        if self.done:
            return
        if self.generation is not None:
            self.generation.over = True
        try:
            self.deliver()
            if self.done:  # ended by the one that was woken for it
                return
            last = self.answer.end(reason)
            self.error = error
            self.sampler.close()
            self._finished(self.result)
            if last.text:
                self._pieces.append(last)
        except Exception as fault:
            self.result.finish_reason, self.error = "error", self.error or of_request(fault)
        finally:  # an interrupt in there finds it done
            self.done = True
            if self.wake:
                self.wake()
