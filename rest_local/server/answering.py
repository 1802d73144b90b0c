"""One HTTP request's answers as they grow: what all generating routes have in common.

A route subclasses `Answering` and says how a part becomes an event, and what the whole answer looks like. The same
parts make both, so a streamed answer and one at once cannot differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.results import Timings
from rest_local.llama.detokenizer import Detokenizer
from rest_local.server.answers import origins
from rest_local.server.filters import GATHERED, Gathered, Indentation, TimeLimit
from rest_local.server.running import EventStream, Pulse, Running, json_response
from rest_local.server.state import State, state_of

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.decoding.request import Request
    from rest_local.decoding.service import Service, Ticket
    from rest_local.decoding.stream import Piece, Result
    from rest_local.server.bodies import Generation

GATHERED_TOKENS = 16  # where steps must not be seen, ids and log-probabilities go out in groups of as many
LOG = "rest_local.log"


@dataclass
class Part:
    """What was said since the last one: what an event adds to an answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    origins: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # how many of the tokens in `origins` each forward pass gave

    @property
    def told(self) -> dict[str, Any]:
        """What the page reads: the field `rest_local` of an event, or nothing."""
        return {"rest_local": {"tokens": self.origins, "steps": self.steps}} if self.origins else {}

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.logprobs or self.origins)


class Choice:
    """One answer. `steps`: text goes out as the steps give it; `tells`: with where each token was drafted from."""

    def __init__(
        self, engine: Engine, *, steps: bool, tells: bool, n_indent: int = 0, milliseconds: float | None = None
    ) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._held = Part()
        self._group = 1 if steps else GATHERED_TOKENS
        self._indentation = Indentation(n_indent)
        self._limit = TimeLimit(milliseconds)
        self._gathered = Gathered(0 if steps else GATHERED)
        self._texts = Detokenizer(engine.model.vocabulary.piece) if steps and tells else None

    @property
    def may_end(self) -> bool:
        """Whether the text has to be read while it comes, since it may be complete although the model would go on."""
        return self._indentation.cuts or self._limit.cuts

    @property
    def ended(self) -> bool:
        """Whether the answer is complete although the model would go on."""
        return self._indentation.ended or self._limit.passed

    def feed(self, pieces: Sequence[Piece]) -> Part:
        """What can be sent now; the pieces came together."""
        part = Part()
        for piece in pieces:
            part.text += piece.text
            self._held.tokens += piece.tokens
            self._held.logprobs += piece.logprobs
            if self._texts is not None and piece.tokens:
                part.origins += origins([self._texts.feed(token) for token in piece.tokens], piece)
                part.steps.append(len(piece.tokens))
        part.text = self._gathered.feed(self._limit.feed(self._indentation.feed(part.text)))
        return self._let_go(part, self._group)

    def finish(self) -> Part:
        """What was held back."""
        return self._let_go(Part(self._gathered.feed(self._indentation.finish()) + self._gathered.finish()), 1)

    def _let_go(self, part: Part, group: int) -> Part:
        """Adds whole groups of what is held to the part, and the part to the answer."""
        held = self._held
        tokens = len(held.tokens) - len(held.tokens) % group
        entries = len(held.logprobs) - len(held.logprobs) % group
        part.tokens, part.logprobs = held.tokens[:tokens], held.logprobs[:entries]
        self._held = Part("", held.tokens[tokens:], held.logprobs[entries:])
        self.text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        return part


class Answering:
    """The answers to one request. `per_prompt`: how many of them belong to each prompt, next to each other."""

    def __init__(
        self,
        state: State,
        engine: Engine,
        body: Generation,
        running: Running,
        *,
        model: str,
        per_prompt: int = 1,
        n_indent: int = 0,
    ) -> None:
        self.state, self.engine, self.body, self.model = state, engine, body, model
        self.per_prompt = per_prompt
        self.shows_steps = state.settings.shows_steps
        self.tells = self.shows_steps and bool(body.rest_local and body.rest_local.origins)
        self._running = running
        self.remaining = len(running.tickets)  # answers that are not complete
        limit = body.t_max_predict_ms
        self.choices = [
            Choice(engine, steps=self.shows_steps, tells=self.tells, n_indent=n_indent, milliseconds=limit)
            for _ in running.tickets
        ]

    def begin(self) -> list[bytes]:
        """Events before the first part."""
        return []

    def advance(self, number: int, part: Part) -> list[bytes]:
        """Events for a part of answer `number`; `Choice` has it already."""
        raise NotImplementedError

    def complete(self, number: int) -> list[bytes]:
        """Events when answer `number` is complete; `remaining` is 0 at the last one."""
        raise NotImplementedError

    def end(self) -> list[bytes]:
        """Events when all are."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer of a request that is not streamed."""
        raise NotImplementedError

    @property
    def results(self) -> list[Result]:
        """Complete once `end` or `whole` is called."""
        return [ticket.result for ticket in self._running.tickets]

    def finish_reason(self, number: int) -> str:
        """`stop` or `length`."""
        return "length" if self.choices[number].ended else self.results[number].finish_reason

    async def respond(self, request: HttpRequest) -> Response:
        """The response; the tickets run until it is sent, or the client is gone."""
        if self.body.stream:
            self._running.bound()
            return EventStream(self._running, self._events(request))
        async with self._running.attended(request.receive):
            async for news in self._running.pieces(meanwhile=any(choice.may_end for choice in self.choices)):
                for number, pieces in news:
                    self._add(number, pieces)
        self._note(request)
        return json_response(self.whole())

    async def _events(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """Events of one moment in one part, as they are sent."""
        if begin := self.begin():
            yield b"".join(begin)
        async for news in self._running.pieces():
            events: list[bytes] = []
            for number, pieces in news:
                if part := self._add(number, pieces):
                    events += self.advance(number, part)
                if pieces is None:
                    events += self.complete(number)
            if not self.remaining:
                self._note(request)
                events += self.end()
            if events:
                yield b"".join(events)

    def _add(self, number: int, pieces: Sequence[Piece] | None) -> Part:
        """What pieces, or the end, add to an answer."""
        choice = self.choices[number]
        if pieces is None:
            self.remaining -= 1
            return choice.finish()
        part = choice.feed(pieces)
        if choice.ended:
            self._running.stop(number)
        return part

    def _note(self, request: HttpRequest) -> None:
        """Counts for the log: nothing of what was said."""
        total = Timings.total(result.timings for result in self.results)
        request.scope[LOG] = {
            "prompt_tokens": total.cached_tokens + total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "completion_tokens": sum(len(r.tokens) for r in self.results),
            "finish": [r.finish_reason for r in self.results],
        }


async def submitted(request: HttpRequest, service: Service, prepare: Callable[[], Sequence[Request]]) -> Running:
    """Makes the engine's requests in a thread of its own, since templates, tokenizing and grammars take time that
    others should not wait for, and submits them: all of them or none. Raises what `prepare` and `submit` raise, and
    ServiceClosed where the client goes away or the server stops meanwhile.
    """
    pulse, entries = Pulse(), 1

    def submit() -> list[Ticket]:
        nonlocal entries
        tickets: list[Ticket] = []
        try:
            for made in prepare():
                entries = max(entries, 1 + (made.logprobs or 0))
                tickets.append(service.submit(made, pulse))
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    tickets = await state_of(request).workers.run(request, submit)
    return Running(tickets, pulse, entries)
