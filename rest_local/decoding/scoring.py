"""The log-probabilities of a text's own tokens: for `echo` with `logprobs`, and to measure models by likelihood.

Contract: uses a context of its own, because the context that generates does not compute the rows of a prompt, and its
cells belong to other requests. A text is evaluated in parts, so that the thread can do other work between them. Knows
nothing about requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rest_local.decoding.logprobs import TokenLogprobs, logprobs_of
from rest_local.errors import DecodeFailed, PromptEmpty, PromptTooLong
from rest_local.llama.context import MAX_OUTPUTS, Context, ContextSettings

if TYPE_CHECKING:
    from rest_local.decoding.engine import Engine

Part = Callable[[], None]


class Scorer:
    """Close it before the model. One text at a time; other calls wait. Raises ModelError where memory is short."""

    def __init__(self, engine: Engine) -> None:
        named: dict[str, Any] = {field.name: engine.settings[field.name] for field in fields(ContextSettings)}
        like = ContextSettings.from_dict(named)
        settings = replace(like, n_batch=MAX_OUTPUTS, n_ubatch=0, n_branches=1, n_slots=1, n_cells=0, n_rs_seq=0)
        self._context = Context(engine.model, settings)
        self._lock = threading.Lock()

    def score(self, tokens: Sequence[int], top: int, run: Callable[[Part], object]) -> list[TokenLogprobs]:
        """Those of each token after the first, given the tokens before it; natural logarithms. `top`: how many of the
        likeliest tokens to report in addition.

        `run` gets the parts one after another and calls each in the thread that decodes, in which it may do other work
        between them. Raises PromptEmpty, PromptTooLong, DecodeFailed, and what `run` raises.
        """
        if not len(tokens):
            raise PromptEmpty
        if len(tokens) > self._context.n_ctx:
            raise PromptTooLong(len(tokens), self._context.n_ctx)
        scored: list[TokenLogprobs] = []

        def part() -> None:
            if not scored:
                self._context.clear()
            scored.extend(self._part(tokens, len(scored), top))

        with self._lock:
            while len(scored) < len(tokens) - 1:
                run(part)
        return scored

    def _part(self, tokens: Sequence[int], begin: int, top: int) -> list[TokenLogprobs]:
        context = self._context
        end = min(begin + context.max_outputs, len(tokens) - 1)
        context.batch.fill(tokens[begin:end], np.arange(begin, end), 0, 1, 1)
        if code := context.decode():
            raise DecodeFailed(code, end - begin)
        rows = context.logits(end - begin)
        return [logprobs_of(row, tokens[begin + at + 1], top) for at, row in enumerate(rows)]

    def close(self) -> None:
        """Free the context now."""
        self._context.close()
