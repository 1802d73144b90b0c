"""The nouns of decoding, which all other modules speak of.

- `Request`: what is asked; frozen.
- `RequestState`: how far it is. It waits (its text has no slot), or is admitted (the slot holds its text: it evaluates
  its prompt, then generates), or is done. The scheduler moves it along, on one thread. Its `text` is prompt and answer,
  its `speculation` makes the steps, its `answer` is what the caller gets.
- `Slot`: place for one text in the cells.
- `Pass`: requests that are evaluated together, in one `llama_decode`.
- `StepResult`: what a pass gave one request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rest_local.decoding.images import Encode
from rest_local.decoding.request import Request
from rest_local.decoding.results import PassClock, StepResult
from rest_local.decoding.speculation import Speculation
from rest_local.decoding.stream import Answer, Outbox, Result
from rest_local.decoding.text import Text
from rest_local.decoding.verify import Verifier
from rest_local.drafting.origins import Decode
from rest_local.drafting.sources import Lookup
from rest_local.errors import PromptEmpty, PromptTooLong, RestLocalError, Unexpected
from rest_local.kv_cache.slot import Slot
from rest_local.kv_cache.slots import Slots
from rest_local.planning.policy import Policy

__all__ = ["Outcome", "Part", "Pass", "Request", "RequestState", "Slot", "StepResult", "error_of"]

log = logging.getLogger("rest_local.faults")


class RequestState:
    """The state of one request from its submission to its end. `admit` gives it a slot.

    connect     gives the sources to draft from, for the slot that it is first admitted to
    finished    called once, at the end
    wake        called when there are pieces, and with True at the end, in the thread that steps
    others      of `Text` and `Speculation`
    """

    def __init__(
        self,
        request: Request,
        policy: Policy,
        verifier: Verifier,
        answer: Answer,
        connect: Callable[[Slot], Lookup],
        finished: Callable[[RequestState], None] = lambda state: None,
        *,
        wake: Callable[[bool], None] | None = None,
        decode: Decode | None = None,
        encode: Encode | None = None,
        is_control: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.request, self.answer, self.statistics = request, answer, answer.statistics
        self.text = Text(request, encode, is_control)
        self.speculation = Speculation(self.text, policy, verifier, answer.statistics, decode)
        self.outbox = Outbox(wake)
        self.fair_queue_round = 0
        self.undelivered: StepResult | None = None  # The newest step, until its text is read.
        self.done = False
        self.left = False  # Its owner does not wait for it any more.
        self.error: RestLocalError | None = None
        self._connect, self._finished = connect, finished
        self._resumed = False  # It has got another slot after a pause.

    @property
    def result(self) -> Result:
        """Return what has come so far; it is complete when `done`."""
        return self.answer.result

    def leave(self) -> None:
        """Note that its owner waits no longer, so that a pass that is broken off is not repeated for it. Any thread."""
        self.left = True

    def admit(self, slot: Slot, slots: Slots | None = None) -> None:
        """Put the request into `slot`, at first or after a pause. Cells that no slot of `slots` holds come from disk.

        Raises PromptEmpty, PromptTooLong.
        """
        begun, text, speculation = time.perf_counter(), self.text, self.speculation
        text.enter(slot)
        self.result.slot = slot.number
        if speculation.sources is not None:
            self._resumed = True
            text.follow(slots)
            speculation.follow(speculation.sources)
            return
        n_prompt = len(text.tokens)
        if not n_prompt:
            raise PromptEmpty
        if n_prompt >= slot.backend.n_ctx:
            raise PromptTooLong(n_prompt, slot.backend.n_ctx)
        self.outbox.begin()
        sources = self._connect(slot)
        self.statistics.prompt_tokens = n_prompt
        self.statistics.cached_tokens = text.follow(slots)
        speculation.follow(sources)
        sources.restart(text.tokens)
        speculation.policy.begin(n_prompt)
        self.statistics.prompt_ms = 1e3 * (time.perf_counter() - begun)
        self.result.timings = self.answer.timings  # The result of a prompt that is cut off has them.
        sources.predict(self.request.prediction)

    def restore(self, seconds: float, patient: bool) -> None:
        """Read more cells of its text from disk, as `Text.restore`."""
        begun = time.perf_counter()
        n = self.text.restore(seconds, patient)
        if not self._resumed:
            self.statistics.cached_tokens += n
            self.statistics.prompt_ms += 1e3 * (time.perf_counter() - begun)
            self.result.timings = self.answer.timings

    # News for its owner

    def report_progress(self) -> None:
        """Report how much of the prompt is evaluated if the request wants it: before the first part, after each part,
        and all of it before the first token.
        """
        if self.answer.begun:
            return
        self.result.n_evaluated = self.text.slot.n_past
        if not self.request.progress:
            return
        is_whole = self.undelivered is not None
        self.outbox.report(self.statistics.prompt_tokens if is_whole else self.text.slot.n_past, self.statistics)

    def receive(self, result: StepResult, begun: float) -> None:
        """Count the tokens of a step that began at `begun`, and see if the answer goes on. `deliver` does the rest."""
        self.undelivered = result
        self.report_progress()
        self.answer.receive(result.verdict.tokens, time.perf_counter() if self.speculation.n_prompt else begun)

    def deliver(self) -> None:
        """Finish the step that was received, and make its text readable. A second call does nothing."""
        result, self.undelivered = self.undelivered, None
        if result is not None:
            piece = self.answer.take(self.speculation.finish(result))
            if piece.text or piece.tokens:
                self.outbox.put(piece)

    def finish(self, reason: str, error: RestLocalError | None = None) -> None:
        """End the request for whatever reason. A second call does nothing."""
        if self.done:
            return
        try:
            self.deliver()
            if self.done:  # Its owner cancelled it when it was woken.
                return
            last = self.answer.end(reason)
            self.error = error
            self.speculation.verifier.sampler.close()
            self._finished(self)
            if last.text:
                self.outbox.pieces.append(last)
        except Exception as fault:
            self.result.finish_reason, self.error = "error", self.error or error_of(fault)
        finally:  # An interrupt in there finds it done.
            self.done = True
            self.outbox.wake(True)


def error_of(error: Exception) -> RestLocalError:
    """Return the error to show to the owner of a request. Errors that are not of this program are logged."""
    if isinstance(error, RestLocalError):
        return error
    log.error("a request ends with an error that was not expected", exc_info=error)
    told = Unexpected(error)
    told.__cause__ = error
    return told


# A request, and how many of its pending tokens a pass evaluates.
Part = tuple[RequestState, int]
# What a pass gives one request: a step, nothing (to a part of a prompt), or an error that concerns no other request.
Outcome = StepResult | RestLocalError | None


class Pass:
    """One forward pass: `running` requests with their trees, and `parts` of prompts.

    It keeps what the slots held before, because a request that ends meanwhile has no slot any more. `idle_cells`:
    tokens that idle slots keep. `with_parts`: it was planned with parts of prompts, if there are any.

    `chosen`: samplers were asked, so the pass cannot be done again. `broken_off`: its decode ended neither well nor
    with everything restored.
    """

    def __init__(
        self, running: Sequence[RequestState], parts: Sequence[Part] = (), idle_cells: int = 0, with_parts: bool = True
    ) -> None:
        self.running, self.parts, self.with_parts = running, parts, with_parts
        self.states = [*running, *(state for state, _ in parts)] if parts else running
        self.slots = [state.text.slot for state in self.states]
        self.before = [slot.n_past for slot in self.slots]
        prompted = bool(parts) or any(state.text.is_prefilling for state in running)
        self.clock = PassClock(sum(self.before) + idle_cells, len(running), prompted)
        self.n_decodes = 1
        self.chosen = self.broken_off = False
