"""Drafting by a small model of the same vocabulary: what it would say next, and how sure it is.

Contract: the text of a request and a drafted path below its end go in, the model's likeliest next tokens come out, with
their probabilities. Each request has a `Follower`, which keeps the text in the small model's own memory cells and
evaluates only what is new. Whatever goes wrong here costs drafts, never an answer: it is logged once and the model is
not asked again. Knows nothing about when it pays to ask (`rest_local.planning.auto`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from rest_local.errors import ModelError, OptionError
from rest_local.llama import ladder, library
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.vocabulary import Vocabulary

log = logging.getLogger("rest_local.drafting")

BATCH = 512
ABORTED = 2  # of `llama_decode`
PART = 256  # tokens of a text that are evaluated between two steps, at most: others wait meanwhile,
STALL_MS = 100.0  # and this long at most
SHORT = 16  # tokens that are evaluated with a question, as if they were one
MOST = 3  # candidates of one question
SURE = 0.9  # a likelier first candidate stays the only one
LEAST_SHARED = 32  # tokens that are worth copying from another text's cells

Likely = tuple[int, float]  # token, probability


class DraftModel:
    """A model and its memory cells, for `n_texts` texts at a time. Close it, or use `with`. On the engine's thread.

    `pass_ms`: one token, and reading what follows; `token_ms`: each token of a longer text. Measured when it is opened,
    `pass_ms` follows what real passes take.
    """

    def __init__(self, model: Model, context: Context) -> None:
        self.model, self.context = model, context
        self.failed = False
        self._free = list(range(context.n_slots))
        self._followers: list[Follower] = []  # that hold a sequence, least recently used first
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
        """A model that drafts for one with `vocabulary`; each text of `n_ctx` tokens at most, or what it was trained
        for. Takes its load time, and a few passes. Raises ModelError (and what `Model.open` does), OptionError where
        the vocabularies differ.
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
                raise OptionError(f"draft model {path}: cannot take back tokens; choose one with attention only")
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
        """Replace what `seq` holds from position `at` on by `tokens`; the logits of the last one, float32 [n_vocab], a
        view. None where it failed: the model is then out of use; or where it was aborted.
        """
        context, n = self.context, len(tokens)
        context.remove(seq, at)
        output = [0] * (n - 1) + [1]
        context.batch.load([int(token) for token in tokens], [*range(at, at + n)], [seq] * n, [1] * n, output)
        code = context.decode()
        if code == ABORTED:  # all contexts were, as the program ends; nothing is wrong with this one
            return None
        if code:
            self.give_up(f"cannot be evaluated (llama_decode: {code})")
            return None
        row: NDArray[np.float32] = context.logits(1)[0]
        return row

    def give_up(self, why: str, error: Exception | None = None) -> None:
        """Ask it no more, with one warning."""
        if not self.failed:
            self.failed = True
            log.warning("draft model %s %s; going on without it", self.model.path, why, exc_info=error)

    def likeliest(self, logits: NDArray[np.float32]) -> list[Likely]:
        """Up to MOST tokens, the likeliest first. 0.15 ms for 152 000."""
        work = np.subtract(logits, logits.max(), out=self._work)
        np.exp(work, out=work)
        whole = float(work.sum())
        found: list[Likely] = []
        while len(found) < MOST:
            token = int(work.argmax())
            found.append((token, float(work[token]) / whole))
            if found[-1][1] > SURE:
                break
            work[token] = -1.0
        return found

    def place(self, follower: Follower, text: Sequence[int]) -> int:
        """Give a follower a sequence for its text; how many of the tokens lie in it already: those that another text
        shares. Takes it from who was not asked for longest, if there is no free one.
        """
        like = max(self._followers, key=lambda other: other.shared(text), default=None)
        shared = like.shared(text) if like else 0
        if not self._free:
            oldest = next(other for other in self._followers if other is not like or len(self._followers) == 1)
            oldest.leave()
        seq = follower.seq = self._free.pop()
        self._followers.append(follower)
        self.context.remove(seq, 0)
        if like is None or like.seq is None or shared < LEAST_SHARED:
            shared = 0
        else:
            self.context.copy(like.seq, seq, 0, shared)
        return shared

    def used(self, follower: Follower) -> None:
        """It is the most recently used now."""
        if self._followers[-1] is not follower:
            self._followers.remove(follower)
            self._followers.append(follower)

    def free(self, follower: Follower, seq: int) -> None:
        """Its sequence is for others."""
        self._followers.remove(follower)
        self._free.append(seq)

    def _measure(self) -> tuple[float, float]:
        """A question behind other questions, and a token of a batch, in milliseconds."""
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
        """Free cells and weights now; again does nothing."""
        self.context.close()
        self.model.close()

    def __enter__(self) -> DraftModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Follower:
    """One text in a draft model's cells. `restart` and `extend` follow the text, `ask` says what may come next.

    `text` is the owner's own list, which only grows between two calls of `restart`. Since `begin_step`, `step_ms` is
    what evaluating took, and `asked_ms` what queries took of it.
    """

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.seq: int | None = None
        self._text: Sequence[int] = ()
        self._cells: list[int] = []  # tokens in the cells
        self._agreed = 0  # of them, those known to be the text's
        self._waited_ms = 0.0
        self.step_ms = self.asked_ms = 0.0

    def begin_step(self) -> None:
        """Count the time of another step."""
        self.step_ms = self.asked_ms = 0.0

    def restart(self, text: Sequence[int], same: int) -> None:
        """The text is another one, of which the first `same` tokens are those of the old one."""
        self._text = text
        self._agreed = min(self._agreed, same)
        self._waited_ms = 0.0

    def shared(self, text: Sequence[int]) -> int:
        """Tokens of `text` in the cells, from the first on."""
        limit = min(len(text), len(self._cells))
        differ = np.flatnonzero(np.asarray(text[:limit]) != np.asarray(self._cells[:limit]))
        return int(differ[0]) if len(differ) else limit

    @property
    def behind(self) -> int:
        """Tokens of the text that are not in the cells."""
        text, cells = self._text, self._cells
        limit = min(len(text), len(cells))
        while self._agreed < limit and text[self._agreed] == cells[self._agreed]:
            self._agreed += 1
        return len(text) - self._agreed

    @property
    def can_ask(self) -> bool:
        """Whether there is room for a longer text, and no failure so far."""
        return not self.model.failed and len(self._text) < self.model.context.n_ctx

    def caught_up(self, saves_ms: float) -> bool:
        """Whether `ask` can answer at once. If not: another step went by that would have saved `saves_ms` with it, and
        once these sum up to what it costs, the text is evaluated, a part at a time. So a short answer to a long prompt
        does not pay for it, and a long one at most twice what knowing its length would have cost.
        """
        behind = self.behind
        if behind <= SHORT:
            return True
        self._waited_ms += saves_ms
        if self._waited_ms < behind * self.model.token_ms:
            return False
        begun = time.perf_counter()
        if self.seq is None:
            self._enter()
        start = self._agreed
        most = min(PART, max(SHORT, int(STALL_MS / max(self.model.token_ms, 1e-3))))
        part = self._text[start : min(start + most, len(self._text) - 1)]
        if part and not self.model.failed:
            del self._cells[start:]
            if self.model.evaluate(self._held, part, start) is not None:
                self._cells += part
        if self.behind <= SHORT:
            self._waited_ms = 0.0
        self.step_ms += 1e3 * (time.perf_counter() - begun)
        return False

    def ask(self, path: Sequence[int]) -> list[Likely]:
        """The likeliest tokens behind the text and the drafted `path`; empty where it cannot say: too long, not caught
        up, failed. Evaluates what of both is not in the cells, the last token always.
        """
        begun = time.perf_counter()
        whole = len(self._text) + len(path)
        behind = self.behind
        if self.model.failed or whole > self.model.context.n_ctx or behind > SHORT:
            return []
        if self.seq is None:
            self._enter()
        start, cells = min(self._agreed, whole - 1), self._cells
        wanted = [*self._text[start:], *path]
        same = 0
        while same < min(len(wanted) - 1, len(cells) - start) and wanted[same] == cells[start + same]:
            same += 1
        del cells[start + same :]
        self._agreed = min(self._agreed, len(cells))
        logits = self.model.evaluate(self._held, wanted[same:], start + same)
        if logits is None:
            return []
        cells += wanted[same:]
        likely = self.model.likeliest(logits)
        took = 1e3 * (time.perf_counter() - begun)
        self.step_ms += took
        self.asked_ms += took
        if len(wanted) - same == 1:
            self.model.pass_ms += 0.05 * (min(took, 4 * self.model.pass_ms) - self.model.pass_ms)
        self.model.used(self)
        return likely

    def leave(self) -> None:
        """Give the cells to others; the next question begins anew."""
        if self.seq is not None:
            self.model.free(self, self.seq)
        self.seq, self._cells, self._agreed = None, [], 0

    @property
    def _held(self) -> int:
        assert self.seq is not None
        return self.seq

    def _enter(self) -> None:
        shared = self.model.place(self, self._text)
        self._cells, self._agreed = list(self._text[:shared]), shared
