"""From tokens to text: a generation as a stream of pieces, with stop strings, and its result.

Contract: text is held back while it may be the beginning of a stop string or of a character; the concatenated pieces
are the text of the result. Ends by itself, by `cancel`, or by an exception in the loop, after which the engine is
usable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from rest_local.decoding.generation import Generation
from rest_local.errors import DecodeFailed
from rest_local.llama.detokenizer import Detokenizer

NO_ROOM = 1  # of `llama_decode`


@dataclass(frozen=True)
class Piece:
    """Text that became certain in one step, and the step's tokens with the source of each (`model`: nobody drafted
    it).
    """

    text: str
    tokens: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass
class Result:
    """A finished generation. `timings` has llama-server's names, `draft` what drafting did; times in milliseconds."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    finish_reason: str = "cancelled"
    timings: dict[str, float] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "text": self.text,
            "tokens": len(self.tokens),
            "finish_reason": self.finish_reason,
            "timings": self.timings,
            "draft": self.draft,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


class StopFinder:
    """Finds the first stop string in text that arrives in parts; holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is certain, and whether a stop string was found behind it."""
        self._held += text
        hits = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if hits:
            certain, self._held = self._held[: min(hits)], ""
            return certain, True
        keep = max((self._overlap(s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain, False

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class Stream:
    """Iterate it for pieces; afterwards `result` is complete. Until then it holds what has come so far."""

    def __init__(
        self,
        generation: Generation,
        detokenizer: Detokenizer,
        max_tokens: int,
        stop: tuple[str, ...],
        on_close: Callable[[], None],
    ) -> None:
        self.result = Result()
        self.statistics = generation.statistics
        self._generation = generation
        self._detokenizer = detokenizer
        self._stops = StopFinder(stop)
        self._left = max_tokens
        self._on_close: Callable[[], None] | None = on_close
        self._predicted_ms = 0.0
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cancel(self) -> None:
        """End now; the text so far stays in `result`, the engine is free for the next."""
        self._pieces.close()
        self._finish()

    def _run(self) -> Generator[Piece, None, None]:
        try:
            while self._left > 0 and self._generation.room > 0:
                try:
                    piece, ended = self._advance()
                except DecodeFailed as error:
                    if error.code != NO_ROOM:
                        raise
                    break  # the cells are full before the context is: as if it were
                if ended:
                    self.result.finish_reason = "stop"
                if piece.text or piece.tokens:
                    yield piece
                if ended:
                    return
            self.result.finish_reason = "length"
            rest, found = self._stops.feed(self._detokenizer.finish())
            rest += "" if found else self._stops.finish()
            if rest:
                self.result.text += rest
                yield Piece(rest, (), ())
        finally:
            self._finish()

    def _advance(self) -> tuple[Piece, bool]:
        """One step, and whether the generation ended in it."""
        begun = time.perf_counter()
        step = self._generation.step(self._left)
        text, ended, kept = "", False, 0
        for token, _ in step:
            if self._generation.ends(token):
                ended = True
                rest, found = self._stops.feed(self._detokenizer.finish())
                text += rest + ("" if found else self._stops.finish())
                break
            kept += 1
            certain, ended = self._stops.feed(self._detokenizer.feed(token))
            text += certain
            if ended:
                break
        tokens = tuple(t for t, _ in step[:kept])
        sources = tuple(s for _, s in step[:kept])
        self._left -= kept
        self._predicted_ms += 1e3 * (time.perf_counter() - begun)
        self.result.text += text
        self.result.tokens.extend(tokens)
        self.result.sources.extend(sources)
        return Piece(text, tokens, sources), ended

    def _finish(self) -> None:
        if self._on_close is None:
            return
        close, self._on_close = self._on_close, None
        try:
            self._complete()
        finally:  # last: an interrupt in there finds the result complete
            close()

    def _complete(self) -> None:
        if self.result.finish_reason == "cancelled":  # what was held back was said all the same
            self.result.text += self._stops.feed(self._detokenizer.finish())[0] + self._stops.finish()
        s = self.statistics
        evaluated = s.prompt_tokens - s.cached_tokens
        predicted = len(self.result.tokens)
        self.result.timings = {
            "cache_n": s.cached_tokens,
            "prompt_n": evaluated,
            "prompt_ms": round(s.prompt_ms, 3),
            "prompt_per_second": round(1e3 * evaluated / s.prompt_ms, 2) if s.prompt_ms else 0.0,
            "predicted_n": predicted,
            "predicted_ms": round(self._predicted_ms, 3),
            "predicted_per_second": round(1e3 * predicted / self._predicted_ms, 2) if self._predicted_ms else 0.0,
            "draft_n": s.drafted,
            "draft_n_accepted": s.accepted,
        }
        self.result.draft = s.to_dict()
