"""Build answers, in the parts that all protocols share. This module knows no HTTP.

The engine generates pieces. `Choice` turns them into one stream of `Part`s: text, deltas of a chat (content, reasoning,
calls), log-probabilities, progress. A protocol subclasses `Answer` and defines how a part becomes events and what the
whole answer looks like. Streamed and whole answers are made of the same parts, so they cannot differ.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic_core import to_json

from rest_local.api.bodies import GenerationBody
from rest_local.api.errors import ApiError
from rest_local.decoding.results import Timings, llama_timings
from rest_local.decoding.stream import Piece
from rest_local.llama.vocabulary import Detokenizer

if TYPE_CHECKING:
    from rest_local.chat.tools import AnswerParser, Delta
    from rest_local.decoding.engine import Engine
    from rest_local.decoding.logprobs import TokenLogprobs
    from rest_local.decoding.request import Request
    from rest_local.decoding.stream import Progress, Result

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
# A long prompt can take minutes, and proxies end a connection that was silent for one.
QUIET_SECONDS = 10.0
# Where steps are hidden, times are rounded, and tokens and text are sent in groups of fixed size.
COARSE_MS = 100
GROUP_TOKENS = 16
GROUP_CHARACTERS = 64  # about 15 tokens

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True)
class RequestContext:
    """The engine, model name and caller of one request."""

    engine: Engine
    model: str  # the name to answer with
    shows_steps: bool  # True if the answer may tell what was drafted and cached (`ServerSettings.shows_steps`)
    fingerprint: str  # OpenAI's `system_fingerprint`
    owner: str = ""  # the caller, see `server.settings.owner_of`


@dataclass(frozen=True)
class Usage:
    """The number of tokens in all prompts and answers; each protocol has its own names for them.

    `cached` tokens of the prompts were in memory. Other machines must not see them: they show what others have sent.
    """

    prompt: int
    cached: int
    completion: int

    @staticmethod
    def of(results: Sequence[Result], per_prompt: int = 1) -> Usage:
        """Count the tokens of these results. Each group of `per_prompt` neighbours answers one prompt."""
        firsts = Timings.total(result.timings for result in results[::per_prompt])
        completion = sum(len(result.tokens) for result in results)
        return Usage(firsts.cached_tokens + firsts.prompt_tokens, firsts.cached_tokens, completion)


class HasResult(Protocol):
    """A stream, or anything else whose result is complete when the answer is."""

    @property
    def result(self) -> Result: ...


class Call(Protocol):
    """A request of any protocol. Call `requests` first, in a worker thread (templates, grammars), then `answer`."""

    def requests(self) -> list[Request]:
        """Return the engine's requests, one for each answer. Raises ApiError and what the engine refuses."""
        ...

    def answer(self, answered: Sequence[HasResult]) -> Answer[Any]:
        """Return the answer. `answered` has one stream or result for each of the requests."""
        ...


def event(value: Any, name: str | None = None) -> bytes:
    """Encode a server-sent event with a JSON value, and with a name if the protocol names its events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


def named_events(values: Sequence[dict[str, Any]]) -> list[bytes]:
    """Encode events whose names are their `type`."""
    return [event(value, value["type"]) for value in values]


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass
class Part:
    """An addition to an answer by one event. In a chat, `deltas` split its text into content, reasoning and calls."""

    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    origins: list[dict[str, Any]] = field(default_factory=list)
    # How many of the tokens in `origins` each forward pass gave.
    steps: list[int] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    timings: dict[str, float] | None = None  # present if the client wants them with every part

    @property
    def extension(self) -> dict[str, Any]:
        """Return the fields `timings` and `rest_local` of an event, if they are sent."""
        fields: dict[str, Any] = {"rest_local": {"tokens": self.origins, "steps": self.steps}} if self.origins else {}
        return fields | ({"timings": self.timings} if self.timings else {})

    def __bool__(self) -> bool:
        return bool(self.text or self.deltas or self.tokens or self.logprobs or self.origins or self.progress)


class Choice:
    """The state of one answer.

    `parser` splits the text of a chat's answer. `shows_steps` sends text after each step, not in groups of fixed size,
    and `sends_origins` the source of each token. The filters in `ending` may end the answer before the model does.
    """

    def __init__(
        self,
        engine: Engine,
        parser: AnswerParser | None,
        *,
        shows_steps: bool,
        sends_origins: bool,
        ending: Sequence[Indentation | TimeLimit],
    ) -> None:
        self.text = ""
        self.deltas: list[Delta] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.parser, self._ending = parser, ending
        self._pending = Part()
        self._groups = (1, 1) if shows_steps else (GROUP_TOKENS, GROUP_CHARACTERS)
        self._texts = Detokenizer(engine.model.vocabulary.piece) if shows_steps and sends_origins else None

    @property
    def can_end(self) -> bool:
        """Return True if a filter may end the answer, so its text has to be read while it is generated."""
        return bool(self._ending)

    @property
    def ended(self) -> bool:
        return any(each.ended for each in self._ending)

    def feed(self, pieces: Sequence[Piece]) -> Part:
        part = Part()
        for piece in pieces:
            part.progress += (piece.progress,) if piece.progress else ()
            part.text += piece.text
            self._pending.tokens += piece.tokens
            self._pending.logprobs += piece.logprobs
            if self._texts is not None and piece.tokens:
                part.origins += origins([self._texts.feed(token) for token in piece.tokens], piece)
                part.steps += piece.steps
        for each in self._ending:
            part.text = each.feed(part.text)
        return self._release(part, *self._groups)

    def finish(self, *, cut: bool) -> Part:
        """Return what was held back. `cut` means that something other than the model ended the answer."""
        part = Part()
        for each in self._ending:
            part.text = each.feed(part.text) + each.finish()
        part = self._release(part, 1, 1)
        if self.parser is not None:
            rest = self.parser.finish(cut=cut)
            part.deltas += rest
            self.deltas += rest
        return part

    def _release(self, part: Part, tokens: int, characters: int) -> Part:
        """Move whole groups of the pending text and tokens to the part, and add the part to the answer."""
        pending = self._pending
        text = pending.text + part.text
        end = len(text) - len(text) % characters
        ids = len(pending.tokens) - len(pending.tokens) % tokens
        entries = len(pending.logprobs) - len(pending.logprobs) % tokens
        part.text, part.tokens, part.logprobs = text[:end], pending.tokens[:ids], pending.logprobs[:entries]
        self._pending = Part(text[end:], [], pending.tokens[ids:], pending.logprobs[entries:])
        if self.parser is not None and part.text:
            part.deltas = self.parser.feed(part.text)
        self.text += part.text
        self.deltas += part.deltas
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        return part


class Indentation:
    """llama-server's `n_indent`: ends the text before a later line that is empty or indented less."""

    def __init__(self, least: int) -> None:
        self._least = least
        # The indentation of a line after the first, until it is known to be deep enough.
        self._blanks: str | None = None
        self.ended = False

    def feed(self, text: str) -> str:
        """Return the beginning of `text` that belongs to the answer."""
        kept: list[str] = []
        while text and not self.ended:
            if self._blanks is not None:
                text, self._blanks = self._blanks + text, None
                content = text.lstrip(" \t")
                if len(text) - len(content) < self._least:
                    self._blanks = "" if content else text
                    self.ended = bool(content)
                    break
            line, newline, text = text.partition("\n")
            kept.append(line + newline)
            self._blanks = "" if newline else None
        return "".join(kept)

    def finish(self) -> str:
        """Return the blanks that were held back. They belong to the answer."""
        rest, self._blanks = self._blanks or "", None
        return rest


class TimeLimit:
    """llama-server's `t_max_predict_ms`: ends the text after the first line that is complete when the time is over.

    So an editor offers whole lines, and at least one. The time counts from the first text. `clock` returns seconds.
    """

    def __init__(self, milliseconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = milliseconds / 1e3
        self._clock = clock
        self._begun: float | None = None
        self.ended = False

    def feed(self, text: str) -> str:
        """Return the beginning of `text` that belongs to the answer."""
        if self.ended or not text:
            return ""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        if "\n" in text and now - self._begun > self._seconds:
            self.ended = True
            return text[: text.index("\n") + 1]
        return text

    def finish(self) -> str:
        return ""


class Answer(Generic[BodyT]):
    """The answers to one request. A protocol defines `begin`, `advance`, `complete`, `end` and `whole`.

    In a chat, each of the `answered` streams or results has one of the `parsers`. Each group of `per_prompt` neighbours
    answers one prompt.
    """

    MEDIA_TYPE = EVENT_STREAM
    SENDS_APART = False  # True sends each event by itself, False those of one moment together

    def __init__(
        self,
        context: RequestContext,
        body: BodyT,
        answered: Sequence[HasResult],
        parsers: Sequence[AnswerParser] = (),
        *,
        per_prompt: int = 1,
        n_indent: int = 0,
    ) -> None:
        self.context, self.engine, self.body = context, context.engine, body
        self.per_prompt = per_prompt
        self.shows_steps = context.shows_steps
        self.sends_origins = self.shows_steps and bool(body.rest_local and body.rest_local.origins)
        self.sends_timings = self.shows_steps and bool(body.timings_per_token)
        self.remaining = len(answered)  # the number of incomplete answers
        self._answered = list(answered)
        limit = body.t_max_predict_ms or 0.0
        self.choices = [
            Choice(
                self.engine,
                parsers[number] if parsers else None,
                shows_steps=self.shows_steps,
                sends_origins=self.sends_origins,
                ending=[*([Indentation(n_indent)] if n_indent > 0 else []), *([TimeLimit(limit)] if limit > 0 else [])],
            )
            for number in range(len(answered))
        ]

    def begin(self) -> list[bytes]:
        return []

    def advance(self, number: int, part: Part) -> list[bytes]:
        """Return the events for a part of answer `number`. `Choice` has already added the part."""
        raise NotImplementedError

    def progressed(self, number: int, fields: dict[str, Any]) -> list[bytes]:
        """Return the events for `prompt_progress`, and for `timings` if wanted, before the first part of an answer."""
        return []

    def complete(self, number: int) -> list[bytes]:
        """Return the events when answer `number` is complete. `remaining` is 0 at the last one."""
        return []

    def end(self) -> list[bytes]:
        return []

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        raise NotImplementedError

    def quiet(self) -> list[bytes]:
        """Return the events for a stream in which nothing has happened for QUIET_SECONDS.

        A comment keeps the connection alive, and clients of server-sent events skip it. llama-server sends the same.
        """
        return [b":\n\n"]

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""
        return event(error.body)

    @property
    def results(self) -> list[Result]:
        """Return one result for each answer. They are final once `end` or `whole` is called."""
        return [answered.result for answered in self._answered]

    def finish_reason(self, number: int) -> str:
        """Return `stop` or `length`."""
        return "length" if self.choices[number].ended else self.results[number].finish_reason

    def add(self, number: int, pieces: Sequence[Piece] | None) -> Part:
        """Add pieces to an answer, or end it for None, and return the part that can be sent."""
        choice = self.choices[number]
        if pieces is not None:
            return choice.feed(pieces)
        self.remaining -= 1
        return choice.finish(cut=choice.ended or self.results[number].cut)

    def events(self, number: int, pieces: Sequence[Piece] | None, timings: Timings | None) -> list[bytes]:
        """Return the events for these pieces, or for the end of the answer for None.

        The progress of a prompt and the tokens of each step are sent only where steps are shown: they reveal what other
        clients have sent and what a datastore contains.
        """
        part = self.add(number, pieces)
        part.timings = timings.to_dict() if timings else None
        progress, part.progress = part.progress if self.shows_steps else [], []
        events: list[bytes] = []
        for each in progress:
            more = {"timings": each.timings.to_dict()} if self.sends_timings else {}
            events += self.progressed(number, {"prompt_progress": each.to_dict()} | more)
        if part:
            events += self.advance(number, part)
        return events if pieces is not None else events + self.complete(number)

    def completed(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Build the answer once every result is complete."""
        for number, result in enumerate(self.results):
            self.add(number, [Piece(result.text, tuple(result.tokens), (), tuple(result.logprobs))])
            self.add(number, None)
        return self.whole()

    def counts(self) -> dict[str, Any]:
        """Return counts for the request log. They say nothing about the text."""
        usage = Usage.of(self.results, self.per_prompt)
        cut_off = bool(usage.prompt) and not usage.completion  # The next try goes on after what was evaluated.
        evaluated = {"evaluated_tokens": sum(result.n_evaluated for result in self.results)} if cut_off else {}
        return {
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            **evaluated,
            "completion_tokens": usage.completion,
            "finish": [result.finish_reason for result in self.results],
        } | ({"loop": loops} if any(loops := [result.loop for result in self.results]) else {})


def timings(results: Sequence[Result], shows_steps: bool) -> dict[str, float]:
    """Return llama-server's `timings`, summed over all answers.

    Without `shows_steps`, drafts are not counted and nothing shows how much of the prompt was cached: `prompt_n` is the
    whole prompt, without a time, and the time of the answer is rounded.
    """
    total = Timings.total(result.timings for result in results)
    if not shows_steps:
        rounded = COARSE_MS * round(total.predicted_ms / COARSE_MS)
        answer = llama_timings("predicted", total.predicted_tokens, rounded)
        return {"prompt_n": total.cached_tokens + total.prompt_tokens} | answer
    return total.to_dict()


def prediction_counts(results: Sequence[Result]) -> dict[str, int]:
    """Count the accepted and rejected tokens of the client's prediction."""
    counts = [result.draft.of_source("prediction") for result in results]
    accepted = sum(each.accepted for each in counts)
    rejected = sum(each.drafted for each in counts) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def origins(texts: Sequence[str], piece: Piece) -> list[dict[str, Any]]:
    """Return the text and the source of each token of a piece, for the page."""
    names = ("file", "line", "match", "probability")
    origin_of = piece.origins or (None,) * len(piece.tokens)
    return [
        {"text": text, "token": token, "source": source} | {name: getattr(origin, name, None) for name in names}
        for text, token, source, origin in zip(texts, piece.tokens, piece.sources, origin_of, strict=True)
    ]
