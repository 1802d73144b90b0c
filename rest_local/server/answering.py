"""The answers to one HTTP request as they grow: what all routes that generate share.

A route subclasses `Answer` and defines how a part becomes events and what the whole answer looks like. Streamed and
whole answers are made of the same parts, so they cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rest_local.decoding.results import Timings
from rest_local.decoding.stream import Piece
from rest_local.llama.vocabulary import Detokenizer
from rest_local.server.answer_fields import new_id, origins, timings, usage
from rest_local.server.bodies import GenerationBody
from rest_local.server.errors import ApiError
from rest_local.server.filters import GROUP_CHARACTERS, TextFilters
from rest_local.server.keys import owner_of
from rest_local.server.prompts import check_generates
from rest_local.server.state import State, state_of
from rest_local.server.streaming import DONE, EVENT_STREAM, EventStream, Pulse, StreamGroup, event, json_response

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.decoding.request import Request
    from rest_local.decoding.service import Service
    from rest_local.decoding.stream import Piece, Progress, Result
    from rest_local.decoding.streaming import Stream

GROUP_TOKENS = 16  # where steps are hidden, ids and log-probabilities are sent in groups of this size
LOG = "rest_local.log"

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True)
class Asked(Generic[BodyT]):
    """A checked body, and the engine that answers it. Knows no HTTP.

    model        the name to answer with
    shows_steps  the answer may tell what was drafted and what was cached (`Settings.shows_steps`)
    fingerprint  OpenAI's `system_fingerprint`
    """

    engine: Engine
    body: BodyT
    model: str
    shows_steps: bool
    fingerprint: str


class Answered(Protocol):
    """What an answer is made of: a stream, or what else has a result. It is complete when the answer is."""

    @property
    def result(self) -> Result: ...


@dataclass(frozen=True)
class Generating(Asked[BodyT]):
    """One HTTP request that generates."""

    state: State
    service: Service

    @staticmethod
    def of(request: HttpRequest, body: BodyT) -> Generating[BodyT]:
        """Raises ApiError 503 while the model loads, 404 for an unknown model; CannotGenerate."""
        state = state_of(request)
        service, engine = state.loaded()
        check_generates(engine)
        return Generating(
            engine,
            body,
            state.check_model(body.model),
            state.settings.shows_steps,
            f"rest-local-{state.started}",
            state,
            service,
        )

    async def submit(self, request: HttpRequest, prepare: Callable[[], Sequence[Request]]) -> StreamGroup:
        """Makes the engine's requests and submits all of them or none.

        `prepare` runs in a worker thread, because templates, tokenizing and grammars take time in which other requests
        go on. Raises what `prepare` and `Service.submit_all` raise, and ServiceClosed if the client disconnects or the
        server stops.
        """
        pulse, entries, owner = Pulse(), 1, owner_of(request.headers, self.state.settings)
        client = owner or str(request.client)

        def submit() -> list[Stream]:
            nonlocal entries
            made = [replace(each, owner=owner, client=client) for each in prepare()]
            entries = max((1 + (each.logprobs or 0) for each in made), default=1)
            return self.service.submit_all(made, pulse)

        streams = await self.state.workers.run(request, submit)
        return StreamGroup(streams, pulse, entries)


@dataclass
class Part:
    """What one event adds to an answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    origins: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # how many of the tokens in `origins` each forward pass gave

    progress: list[Progress] = field(default_factory=list)
    timings: dict[str, float] | None = None  # so far, where the client wants them with every part

    @property
    def extension(self) -> dict[str, Any]:
        """Further fields of an event: `timings` and `rest_local`, where they are sent."""
        fields: dict[str, Any] = {"rest_local": {"tokens": self.origins, "steps": self.steps}} if self.origins else {}
        return fields | ({"timings": self.timings} if self.timings else {})

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.logprobs or self.origins or self.progress)


class Choice:
    """The state of one answer.

    shows_steps    text is sent as the steps give it, else in groups of fixed size
    sends_origins  each token is sent with its source
    """

    def __init__(
        self,
        engine: Engine,
        *,
        shows_steps: bool,
        sends_origins: bool,
        n_indent: int = 0,
        milliseconds: float | None = None,
    ) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._held = Part()
        self._group = 1 if shows_steps else GROUP_TOKENS
        self._filters = TextFilters(n_indent, milliseconds, 0 if shows_steps else GROUP_CHARACTERS)
        self._texts = Detokenizer(engine.model.vocabulary.piece) if shows_steps and sends_origins else None

    @property
    def can_end(self) -> bool:
        """Whether a filter may end the answer, so that its text has to be read while it is generated."""
        return self._filters.can_end

    @property
    def ended(self) -> bool:
        """Whether a filter has ended the answer."""
        return self._filters.ended

    def feed(self, pieces: Sequence[Piece]) -> Part:
        """What can be sent of these pieces and of those before."""
        part = Part()
        for piece in pieces:
            part.progress += (piece.progress,) if piece.progress else ()
            part.text += piece.text
            self._held.tokens += piece.tokens
            self._held.logprobs += piece.logprobs
            if self._texts is not None and piece.tokens:
                part.origins += origins([self._texts.feed(token) for token in piece.tokens], piece)
                part.steps.append(len(piece.tokens))
        part.text = self._filters.feed(part.text)
        return self._release(part, self._group)

    def finish(self) -> Part:
        """What was held back."""
        return self._release(Part(self._filters.finish()), 1)

    def _release(self, part: Part, group: int) -> Part:
        """Moves whole groups of what is held back to the part, and adds the part to the answer."""
        held = self._held
        tokens = len(held.tokens) - len(held.tokens) % group
        entries = len(held.logprobs) - len(held.logprobs) % group
        part.tokens, part.logprobs = held.tokens[:tokens], held.logprobs[:entries]
        self._held = Part("", held.tokens[tokens:], held.logprobs[entries:])
        self.text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        return part


class Answer(Generic[BodyT]):
    """The answers to one request. `answered`: what each is made of. `per_prompt`: answers to each prompt, which are
    neighbours in `choices`.

    MEDIA_TYPE     of a stream; a protocol without server-sent events has another one
    QUIET_SECONDS  after so long without an event of a stream, `quiet` makes one; None: never
    """

    MEDIA_TYPE = EVENT_STREAM
    QUIET_SECONDS: float | None = None

    def __init__(
        self, asked: Asked[BodyT], answered: Sequence[Answered], *, per_prompt: int = 1, n_indent: int = 0
    ) -> None:
        self.asked, self.engine, self.body = asked, asked.engine, asked.body
        self.per_prompt = per_prompt
        self.shows_steps = asked.shows_steps
        self.sends_origins = self.shows_steps and bool(self.body.rest_local and self.body.rest_local.origins)
        self.remaining = len(answered)  # answers that are not complete
        self._answered = list(answered)
        self.choices = [
            Choice(
                self.engine,
                shows_steps=self.shows_steps,
                sends_origins=self.sends_origins,
                n_indent=n_indent,
                milliseconds=self.body.t_max_predict_ms,
            )
            for _ in answered
        ]

    def begin(self) -> list[bytes]:
        """Events before the first part."""
        return []

    def advance(self, number: int, part: Part) -> list[bytes]:
        """Events for a part of answer `number`, which `Choice` has already added."""
        raise NotImplementedError

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        """Events before the first part of answer `number`: `prompt_progress`, and `timings` where the client wants
        them.
        """
        return []

    def complete(self, number: int) -> list[bytes]:
        """Events when answer `number` is complete; `remaining` is 0 at the last one."""
        raise NotImplementedError

    def end(self) -> list[bytes]:
        """Events when all answers are complete."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer to a request that is not streamed."""
        raise NotImplementedError

    def quiet(self) -> list[bytes]:
        """Events of a stream in which nothing has happened for `QUIET_SECONDS`, so that its client goes on waiting."""
        return []

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that fails after it has begun."""
        return event(error.body)

    @property
    def results(self) -> list[Result]:
        """One for each answer; final once `end` or `whole` is called."""
        return [answered.result for answered in self._answered]

    def finish_reason(self, number: int) -> str:
        """`stop` or `length`."""
        return "length" if self.choices[number].ended else self.results[number].finish_reason

    async def respond(self, request: HttpRequest, streams: StreamGroup) -> Response:
        """The response. The streams, of which the answer was made, run until it is sent or the client disconnects."""
        if self.body.stream:
            streams.bound()
            return EventStream(streams, self._events(request, streams), self.MEDIA_TYPE, self.error_event)
        async with streams.attended(request.receive):
            async for news in streams.pieces(meanwhile=any(choice.can_end for choice in self.choices)):
                for number, pieces in news:
                    self._add(number, pieces, streams)
        self._note(request)
        return json_response(self.whole())

    def completed(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer where all results are complete and none was added yet."""
        for number, result in enumerate(self.results):
            self.choices[number].feed([Piece(result.text, tuple(result.tokens), (), tuple(result.logprobs))])
            self.choices[number].finish()
        self.remaining = 0
        return self.whole()

    async def _events(self, request: HttpRequest, streams: StreamGroup) -> AsyncIterator[bytes]:
        """The events of a stream; events of one moment are sent together."""
        if begin := self.begin():
            yield b"".join(begin)
        sent = time.monotonic()
        async for news in streams.pieces(every=self.QUIET_SECONDS):
            events: list[bytes] = []
            for number, pieces in news:
                if part := self._add(number, pieces, streams):
                    events += self._advanced(number, part, streams)
                if pieces is None:
                    events += self.complete(number)
            if not self.remaining:
                self._note(request)
                events += self.end()
            if not events and self.QUIET_SECONDS is not None and time.monotonic() - sent >= self.QUIET_SECONDS:
                events = self.quiet()
            if events:
                yield b"".join(events)
                sent = time.monotonic()

    def _advanced(self, number: int, part: Part, streams: StreamGroup) -> list[bytes]:
        """The events of a part. How fast a prompt is evaluated and what each step gave are told where steps are shown:
        they tell what other clients sent, and what a datastore holds.
        """
        if not self.shows_steps:
            part.progress = []
        timed = self.shows_steps and self.body.timings_per_token
        events: list[bytes] = []
        for progress in part.progress:
            more = {"timings": progress.timings.to_dict()} if timed else {}
            events += self.progressed(number, {"prompt_progress": progress.to_dict()} | more)
        if timed:
            part.timings = streams.streams[number].timings.to_dict()
        part.progress = []
        return events + (self.advance(number, part) if part else [])

    def _add(self, number: int, pieces: Sequence[Piece] | None, streams: StreamGroup) -> Part:
        """Adds pieces to an answer, or ends it for None; what can be sent."""
        choice = self.choices[number]
        if pieces is None:
            self.remaining -= 1
            return choice.finish()
        part = choice.feed(pieces)
        if choice.ended:
            streams.stop(number)
        return part

    def _note(self, request: HttpRequest) -> None:
        """Counts for the log of requests. They say nothing about the text."""
        total = Timings.total(result.timings for result in self.results)
        request.scope[LOG] = {
            "prompt_tokens": total.cached_tokens + total.prompt_tokens,
            "cached_tokens": total.cached_tokens,
            "completion_tokens": sum(len(r.tokens) for r in self.results),
            "finish": [r.finish_reason for r in self.results],
        }


class OpenAIAnswer(Answer[BodyT]):
    """What OpenAI's two calls share: an id, the time, and counts at the end."""

    ID_PREFIX: str
    EVENT_KIND: str

    def __init__(self, asked: Asked[BodyT], answered: Sequence[Answered], *, per_prompt: int) -> None:
        super().__init__(asked, answered, per_prompt=per_prompt)
        self._id, self._created = new_id(self.ID_PREFIX), int(time.time())

    def end(self) -> list[bytes]:
        if not self._includes_usage:
            return [DONE]
        return [event(self._head(self.EVENT_KIND) | {"choices": []} | self._counts()), DONE]

    @property
    def _includes_usage(self) -> bool:
        """Whether the client requested the counts in an event of their own."""
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _counts(self) -> dict[str, Any]:
        counts = usage(self.results, self.per_prompt, self.body.prediction is not None, self.shows_steps)
        return {"usage": counts, "timings": timings(self.results, self.shows_steps)}

    def _closing(self, number: int) -> dict[str, Any]:
        """Further fields of the last event of an answer."""
        fields = self._counts() if not self._includes_usage and not self.remaining else {}
        if self.sends_origins:
            fields["rest_local"] = {"draft": self.results[number].draft.to_dict()}
        return fields

    def _head(self, kind: str) -> dict[str, Any]:
        named = {"id": self._id, "object": kind, "created": self._created, "model": self.asked.model}
        return named | {"system_fingerprint": self.asked.fingerprint}

    def _event(
        self,
        index: int,
        content: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Any = None,
        **fields: Any,
    ) -> bytes:
        """One event of an answer; `content`: its text or delta."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._head(self.EVENT_KIND) | {"choices": [choice]} | fields)
