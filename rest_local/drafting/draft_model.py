"""Drafting with a small model of the same vocabulary: its next tokens and their probabilities.

Contract: the text of a request and a drafted path after it go in; the model's likeliest next tokens come out, with
their probabilities. Each request has a `DraftModelSequence`, which keeps the text in the KV cache of the small model
and evaluates only new tokens. A failure costs drafts, never an answer: it is logged once and the model is not queried
again. This module does not know when a query pays (`rest_local.planning.auto` does).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.tree import common_prefix
from rest_local.errors import ModelError, OptionError
from rest_local.llama import ladder, library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.vocabulary import Vocabulary

log = logging.getLogger("rest_local.drafting")

BATCH = 512
ABORTED = 2  # return code of `llama_decode`
CHUNK_TOKENS = 256  # at most so many tokens of a text are evaluated between two steps, because other requests wait
STALL_MS = 100.0  # and at most so long
INLINE_CATCHUP = 16  # missing tokens up to this number are evaluated together with a query, in one batch
TOP_K = 3  # candidates of one query
CONFIDENT = 0.9  # above this probability the first candidate is the only one
MIN_SHARED = 32  # a shared prefix of fewer tokens is evaluated again instead of copied

Likely = tuple[int, float]  # token, probability


class DraftModel:
    """A model and its KV cache for `n_texts` texts at a time. Use `with` or `close`. Only for the engine's thread.

    `pass_ms`: the time to evaluate one token and read the logits. `token_ms`: the time for each token of a longer text.
    Both are measured when the model is opened; `pass_ms` is then updated by real passes.
    """

    def __init__(self, model: Model, context: Context) -> None:
        self.model, self.context = model, context
        self.failed = False
        self._free = list(range(context.n_slots))
        self._sequences: list[DraftModelSequence] = []  # those with a sequence id, least recently used first
        self._work = np.empty(model.n_vocab, np.float32)
        self.pass_ms, self.token_ms = self._measure()

    @classmethod
    def open(
        cls,
        path: str | Path,
        vocabulary: Vocabulary,
        n_ctx: int,
        n_texts: int,
        *,
        threads: int = 0,
        n_gpu_layers: int | None = None,
        options: ModelOptions | None = None,
    ) -> DraftModel:
        """Load a model that drafts for one with `vocabulary`. A text has at most `n_ctx` tokens, or the number that the
        model was trained for. Costs the load time and a few passes. Raises ModelError (and what `Model.open` raises),
        and OptionError if the vocabularies differ.
        """
        gpu = library.supports_gpu() and n_gpu_layers != 0

        def context_settings(tried: ModelOptions, size: int) -> ContextSettings:
            return ContextSettings(
                n_ctx=size, n_cells=size * n_texts, n_slots=n_texts, n_branches=1, n_batch=min(BATCH, size),
                flash_attention=gpu and tried.flash_attention != "off", threads=threads, offload_kqv=tried.kv_offload,
            )  # fmt: skip

        chosen = ladder.choose(
            path, n_gpu_layers, options or ModelOptions(), lambda tried: [context_settings(tried, n_ctx)]
        )
        if chosen.warning:
            log.warning("%s", chosen.warning)
        model = Model.open(path, n_gpu_layers=chosen.n_gpu_layers, options=chosen.options)
        try:
            if model.vocabulary.hash != vocabulary.hash:
                raise OptionError(
                    f"draft model {path}: its vocabulary ({model.vocabulary.name}) is not the model's "
                    f"({vocabulary.name}); choose a smaller model of the same family"
                )
            if model.is_recurrent or model.is_hybrid or model.has_encoder:
                raise OptionError(f"draft model {path}: cannot roll back tokens; choose one with attention only")
            size = min(n_ctx, model.n_ctx_train or n_ctx)
            context = Context(model, context_settings(model.options, size))
            try:
                return cls(model, context)
            except BaseException:
                context.close()
                raise
        except BaseException:
            model.close()
            raise

    def evaluate(self, seq: int, tokens: Sequence[int], at: int) -> NDArray[np.float32] | None:
        """Replace the content of `seq` from position `at` on by `tokens`. Returns the logits of the last token, a view
        of float32 [n_vocab]; None if the decode was aborted, or failed: then the model is not used any more.
        """
        context, n = self.context, len(tokens)
        context.remove(seq, at)
        output = [0] * (n - 1) + [1]
        context.batch.load([int(token) for token in tokens], [*range(at, at + n)], [seq] * n, [1] * n, output)
        code = context.decode()
        if code == ABORTED:  # the program ends and aborts every context; this one did not fail
            return None
        if code:
            self.give_up(f"cannot be evaluated (llama_decode: {code})")
            return None
        row: NDArray[np.float32] = context.logits(1)[0]
        return row

    def give_up(self, why: str, error: Exception | None = None) -> None:
        """Stop querying the model, with one warning."""
        if not self.failed:
            self.failed = True
            log.warning("draft model %s %s; going on without it", self.model.path, why, exc_info=error)

    def likeliest(self, logits: NDArray[np.float32]) -> list[Likely]:
        """Up to TOP_K tokens, the likeliest first. Takes 0.15 ms for a vocabulary of 152 000."""
        work = np.subtract(logits, logits.max(), out=self._work)
        np.exp(work, out=work)
        whole = float(work.sum())
        found: list[Likely] = []
        while len(found) < TOP_K:
            token = int(work.argmax())
            found.append((token, float(work[token]) / whole))
            if found[-1][1] > CONFIDENT:
                break
            work[token] = -1.0
        return found

    def place(self, sequence: DraftModelSequence, text: Sequence[int]) -> int:
        """Assign a sequence id for a text, and copy the prefix that it shares with another text. Returns the length of
        that prefix. If no id is free, the least recently used sequence gives up its own.
        """
        like = max(self._sequences, key=lambda other: other.shared(text), default=None)
        shared = like.shared(text) if like else 0
        if not self._free:
            oldest = next(other for other in self._sequences if other is not like or len(self._sequences) == 1)
            oldest.leave()
        seq = sequence.seq = self._free.pop()
        self._sequences.append(sequence)
        self.context.remove(seq, 0)
        if like is None or like.seq is None or shared < MIN_SHARED:
            shared = 0
        else:
            self.context.copy(like.seq, seq, 0, shared)
        return shared

    def used(self, sequence: DraftModelSequence) -> None:
        """Mark a sequence as the most recently used one."""
        if self._sequences[-1] is not sequence:
            self._sequences.remove(sequence)
            self._sequences.append(sequence)

    def free(self, sequence: DraftModelSequence, seq: int) -> None:
        """Take back the id of a sequence."""
        self._sequences.remove(sequence)
        self._free.append(seq)

    def _measure(self) -> tuple[float, float]:
        """Milliseconds of a query that follows other queries, and of one token in a batch."""
        text = np.random.default_rng(0).integers(0, self.model.n_vocab, min(64, self.context.n_ctx // 2)).tolist()
        took = []
        for at, tokens in [(0, text), (0, text), *((len(text) + i, [text[i]]) for i in range(5))]:
            begun = time.perf_counter()
            logits = self.evaluate(0, tokens, at)
            if logits is None:
                raise ModelError(f"draft model {self.model.path}: llama.cpp cannot evaluate it; see the log")
            self.likeliest(logits)
            took.append(1e3 * (time.perf_counter() - begun))
        self.context.clear()
        one = float(np.median(took[2:]))
        return one, max(took[1] - one, 0.0) / len(text)

    def close(self) -> None:
        """Free the KV cache and the weights now. A second call does nothing."""
        self.context.close()
        self.model.close()

    def __enter__(self) -> DraftModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DraftModelSequence:
    """The text of one request in the KV cache of a draft model. `restart` sets the text, `ask` predicts what follows.

    The text is a list of the owner, which only grows between two calls of `restart`. `step_ms`: time spent on
    evaluation since `begin_step`; `query_ms`: the part of it that answered queries.
    """

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.seq: int | None = None  # sequence id in the model's context
        self._text: Sequence[int] = ()
        self._cached: list[int] = []  # tokens in the KV cache
        self._agreed = 0  # length of the prefix of `_cached` that is known to agree with the text
        self._waited_ms = 0.0
        self.step_ms = self.query_ms = 0.0

    def begin_step(self) -> None:
        """Reset the times, at the beginning of a step."""
        self.step_ms = self.query_ms = 0.0

    def restart(self, text: Sequence[int], same: int) -> None:
        """Set another text, which shares its first `same` tokens with the old one."""
        self._text = text
        self._agreed = min(self._agreed, same)
        self._waited_ms = 0.0

    def shared(self, text: Sequence[int]) -> int:
        """Length of the prefix of `text` in the KV cache."""
        return common_prefix(text, self._cached)

    @property
    def n_missing(self) -> int:
        """Number of tokens of the text that are not in the KV cache."""
        text, cached = self._text, self._cached
        limit = min(len(text), len(cached))
        while self._agreed < limit and text[self._agreed] == cached[self._agreed]:
            self._agreed += 1
        return len(text) - self._agreed

    @property
    def can_ask(self) -> bool:
        """Whether the context has room for one more token and the model has not failed."""
        return not self.model.failed and len(self._text) < self.model.context.n_ctx

    def caught_up(self, saves_ms: float) -> bool:
        """Whether `ask` can answer at once. Call it once a step; it evaluates missing tokens when that pays.

        Each step that passes without the model loses `saves_ms`. Once these losses add up to the cost of evaluating the
        text, the text is evaluated, one chunk for each step. So a short answer to a long prompt costs nothing, and a
        long answer costs at most twice the optimum, which needs to know its length.
        """
        missing = self.n_missing
        if missing <= INLINE_CATCHUP:
            return True
        self._waited_ms += saves_ms
        if self._waited_ms < missing * self.model.token_ms:
            return False
        begun = time.perf_counter()
        if self.seq is None:
            self._enter()
        start = self._agreed
        most = min(CHUNK_TOKENS, max(INLINE_CATCHUP, int(STALL_MS / max(self.model.token_ms, 1e-3))))
        chunk = self._text[start : min(start + most, len(self._text) - 1)]
        if chunk and not self.model.failed:
            del self._cached[start:]
            if self.model.evaluate(self._held, chunk, start) is not None:
                self._cached += chunk
        if self.n_missing <= INLINE_CATCHUP:
            self._waited_ms = 0.0
        self.step_ms += 1e3 * (time.perf_counter() - begun)
        return False

    def ask(self, path: Sequence[int]) -> list[Likely]:
        """The likeliest tokens after the text and the drafted `path`. Empty if the context is too short, too many
        tokens are missing, or the model failed. Evaluates the tokens that are not in the KV cache, and always the last.
        """
        begun = time.perf_counter()
        whole = len(self._text) + len(path)
        missing = self.n_missing
        if self.model.failed or whole > self.model.context.n_ctx or missing > INLINE_CATCHUP:
            return []
        if self.seq is None:
            self._enter()
        start, cached = min(self._agreed, whole - 1), self._cached
        wanted = [*self._text[start:], *path]
        same = 0
        while same < min(len(wanted) - 1, len(cached) - start) and wanted[same] == cached[start + same]:
            same += 1
        del cached[start + same :]
        self._agreed = min(self._agreed, len(cached))
        logits = self.model.evaluate(self._held, wanted[same:], start + same)
        if logits is None:
            return []
        cached += wanted[same:]
        likely = self.model.likeliest(logits)
        took = 1e3 * (time.perf_counter() - begun)
        self.step_ms += took
        self.query_ms += took
        if len(wanted) - same == 1:
            self.model.pass_ms += 0.05 * (min(took, 4 * self.model.pass_ms) - self.model.pass_ms)
        self.model.used(self)
        return likely

    def leave(self) -> None:
        """Give up the sequence id. The next query gets another one and evaluates the text again."""
        if self.seq is not None:
            self.model.free(self, self.seq)
        self.seq, self._cached, self._agreed = None, [], 0

    @property
    def _held(self) -> int:
        assert self.seq is not None
        return self.seq

    def _enter(self) -> None:
        shared = self.model.place(self, self._text)
        self._cached, self._agreed = list(self._text[:shared]), shared
