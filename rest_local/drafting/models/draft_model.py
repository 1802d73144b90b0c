"""Draft with a small model of the same vocabulary.

The text of a request and a drafted path after it go in; the model's likeliest next tokens come out, with their
probabilities. Each request has a `DraftModelText`, which keeps the text in the KV cache of the small model and
evaluates only new tokens. This module does not know when a query pays (`rest_local.planning.draft_scheduler` does).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.models.drafter import (
    BATCH,
    BRANCHES,
    INLINE,
    Drafter,
    DraftText,
    Likely,
    PassTimes,
    Query,
    likeliest,
    share_time,
)
from rest_local.errors import ModelError, ModelInvalid, OptionError
from rest_local.llama import library, load_fallback
from rest_local.llama.context import ABORTED, NO_ROOM, Context, ContextSettings
from rest_local.llama.gguf import trained_context
from rest_local.llama.model import Model
from rest_local.llama.options import ModelOptions
from rest_local.llama.placeholders import common_prefix
from rest_local.llama.vocabulary import Vocabulary

log = logging.getLogger("rest_local.drafting")

STALL_MS = 100.0  # A text is evaluated at most so long between two steps, because other requests wait.

Row = tuple[int, int, int, bool]  # A token, its position and sequence id, and whether its logits are wanted.


class DraftModel(Drafter):
    """A model and its KV cache for several texts at a time.

    `times` is measured when the model is opened, and updated by real passes. `token_ms` is the time for each token of a
    longer text.
    """

    name = "draft model"

    def __init__(self, model: Model, context: Context, n_vocab: int) -> None:
        """Draft for a target with `n_vocab` ids. Models of one vocabulary differ in the unused ids that pad it."""
        self.model, self.context = model, context
        self._n_vocab = min(n_vocab, model.n_vocab)
        self._free = list(range(0, context.n_slots * BRANCHES, BRANCHES))  # First sequence ids of texts.
        self._texts: list[DraftModelText] = []  # Those with sequence ids, least recently used first.
        self._tells_full = False  # Warn of the first text that is too long, where that of the target is longer.
        self.times, self.token_ms = self._measure()

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
        """Load a model that drafts for one with `vocabulary`, which takes the load time and a few passes.

        A text has at most `n_ctx` tokens, or the number that the model was trained for. Raises ModelError (and what
        `Model.open` raises), and OptionError if the vocabularies differ or the model cannot take back tokens.
        """
        gpu = library.supports_gpu() and n_gpu_layers != 0

        def context_settings(tried: ModelOptions, size: int) -> ContextSettings:
            return ContextSettings(
                n_ctx=size, n_cells=size * n_texts, n_slots=n_texts, n_branches=BRANCHES, n_batch=min(BATCH, size),
                flash_attention=gpu and tried.flash_attention != "off", threads=threads, offload_kqv=tried.kv_offload,
            )  # fmt: skip

        options = options or ModelOptions()
        size = min(n_ctx, trained_context(Path(path).expanduser(), options) or n_ctx)
        chosen = load_fallback.choose(path, n_gpu_layers, options, lambda tried: [context_settings(tried, size)])
        if chosen.warning:
            log.warning("%s", chosen.warning)
        model = Model.open(path, n_gpu_layers=chosen.n_gpu_layers, options=chosen.options)
        try:
            if model.vocabulary.hash != vocabulary.hash:
                raise OptionError(
                    f"model {path}: its vocabulary ({model.vocabulary.name}) is not that of the model that it would "
                    f"draft for ({vocabulary.name}); choose a smaller model of the same family"
                )
            if model.is_recurrent or model.is_hybrid or model.has_encoder:
                raise OptionError(f"model {path}: cannot roll back tokens; draft with one that has attention only")
            context = Context(model, context_settings(model.options, size))
            try:
                drafter = cls(model, context, vocabulary.size)
                drafter._tells_full = size < n_ctx
                return drafter
            except BaseException:
                context.close()
                raise
        except BaseException:
            model.close()
            raise

    def text(self) -> DraftModelText:
        """Make a new, empty text. It costs nothing until it is asked."""
        return DraftModelText(self)

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        """Return the likely tokens after each path, in one pass.

        There are none for a text that is too long or has too many missing tokens, or where no sequence id is left.
        """
        begun = time.perf_counter()
        rows: list[Row] = []
        places: list[int | None] = [None] * len(queries)  # The row that answers each query.
        texts: dict[int, DraftModelText] = {}
        logits = None
        try:
            for number in sorted(range(len(queries)), key=lambda number: len(queries[number].path)):
                text, path = queries[number]
                assert isinstance(text, DraftModelText)
                if id(text) not in texts:
                    texts[id(text)] = text
                    text.begin_pass([query.path for query in queries if query.text is text])
                places[number] = text.place(path, rows)
            logits = self.evaluate(rows) if rows else None
        finally:
            if logits is None:  # An interrupt comes here as well.
                for text in texts.values():
                    text.lose_pass()
        answers: list[Sequence[Likely]] = [() for _ in queries]
        if not rows:
            return answers
        if logits is not None:
            outputs = np.cumsum([wanted for _, _, _, wanted in rows]) - 1
            try:
                answers = [
                    () if place is None else likeliest(logits[outputs[place]][: self._n_vocab]) for place in places
                ]
            except FloatingPointError as error:
                self.give_up(f"returned {error}")
                answers = [() for _ in queries]
        took = 1e3 * (time.perf_counter() - begun)
        share_time(texts.values(), took)
        for text in texts.values():
            self.used(text)
        if len(rows) == len(queries):
            self.times.learn(len(rows), took)
        return answers

    def evaluate(self, rows: Sequence[Row]) -> NDArray[np.float32] | None:
        """Evaluate tokens. Returns the logits of those that are wanted, a view of float32 [wanted, n_vocab]; None if
        the decode was aborted or there was no room, or if it failed: then the model is not used any more.
        """
        code = self._decode(rows)
        if code in (ABORTED, NO_ROOM):  # The program ends and aborts every context; this one did not fail.
            return None
        if code:
            self.give_up(f"cannot be evaluated (llama_decode: {code})")
            return None
        n_wanted = sum(wanted for _, _, _, wanted in rows)
        return self.context.logits(n_wanted) if n_wanted else np.empty((0, 0), np.float32)

    def _decode(self, rows: Sequence[Row]) -> int:
        """Evaluate tokens. Returns the code of `llama_decode`."""
        token, position, seq, wanted = zip(*rows, strict=True)
        self.context.batch.load(list(token), list(position), list(seq), [1] * len(rows), [int(each) for each in wanted])
        return self.context.decode()

    def tell_full(self) -> None:
        """Warn once that a text is longer than the context, if that of the target is longer."""
        if self._tells_full:
            self._tells_full = False
            log.warning(
                "draft model %s: its context of %d tokens is full; going on without it in longer texts; one that was "
                "trained for longer texts would draft there",
                self.path,
                self.context.n_ctx,
            )

    def place(self, text: DraftModelText, tokens: Sequence[int]) -> int:
        """Assign sequence ids for a text, and copy the prefix that it shares with another text. Returns the length of
        that prefix. If no ids are free, the least recently used text gives up its own.
        """
        like = max(self._texts, key=lambda other: other.shared(tokens), default=None)
        shared = like.shared(tokens) if like else 0
        if not self._free:
            oldest = next(other for other in self._texts if other is not like or len(self._texts) == 1)
            oldest.leave()
        text.seq = self._free.pop()
        self._texts.append(text)
        for seq in range(text.seq, text.seq + BRANCHES):
            self.context.remove(seq, 0)
        if like is None or like.seq is None or shared <= INLINE:
            shared = 0
        else:
            self.context.copy(like.seq, text.seq, 0, shared)
        return shared

    def used(self, text: DraftModelText) -> None:
        """Mark a text as the most recently used one."""
        if text.seq is not None and self._texts[-1] is not text:
            self._texts.remove(text)
            self._texts.append(text)

    def free(self, text: DraftModelText, seq: int) -> None:
        """Take back the sequence ids of a text."""
        self._texts.remove(text)
        self._free.append(seq)

    def _measure(self) -> tuple[PassTimes, float]:
        """Measure a pass that follows other passes, and one token in a batch."""
        n = min(64, self.context.n_ctx // 2)
        text = np.random.default_rng(0).integers(0, self.model.n_vocab, n).tolist()
        prompt: list[Row] = [(token, at, 0, at == n - 1) for at, token in enumerate(text)]
        took: list[float] = []
        passes = [prompt, prompt, *([(text[i % n], n + i, 0, True)] for i in range(5))]
        four: list[Row] = [(text[i % n], n, 0, True) for i in range(1)]
        four += [(text[i % n], 0, seq, True) for i, seq in enumerate(range(1, BRANCHES))]
        for rows in (*passes, four, four, four):
            self.context.remove(0, rows[0][1])
            for seq in range(1, BRANCHES):
                self.context.remove(seq, 0)
            begun = time.perf_counter()
            if code := self._decode(rows):
                raise ModelError(
                    f"model {self.path}: llama.cpp cannot evaluate it (llama_decode: {code}); draft with another"
                )
            try:
                for row in self.context.logits(sum(wanted for _, _, _, wanted in rows)):
                    likeliest(row[: self._n_vocab])
            except FloatingPointError as error:
                raise ModelInvalid(self.path, f"returns {error}", "get the file again") from error
            took.append(1e3 * (time.perf_counter() - begun))
        self.context.clear()
        one = float(np.median(took[2:7]))
        several = float(np.median(took[7:]))
        return PassTimes(one, max(several - one, 0.0) / (BRANCHES - 1)), max(took[1] - one, 0.0) / n


class DraftModelText(DraftText):
    """The text of one request in the KV cache of a draft model.

    The text alone decides which tokens are valid, and `DraftModel.place` finds shared prefixes: `rewind` and `share` do
    nothing. The first sequence id holds the text and the path that was drafted first. Where that agrees with the tokens
    that the target then chooses, it stays. Another id holds another path, until the next step.
    """

    def __init__(self, drafter: DraftModel) -> None:
        super().__init__(drafter)
        self._drafter = drafter
        self.seq: int | None = None  # The first sequence id in the model's context.
        self._cached: list[int] = []  # Tokens of the first sequence id in the KV cache.
        self._agreed = 0  # The length of the prefix of `_cached` that is known to agree with the text.
        self._sure = 0  # Tokens of `_cached` that the running pass does not add.
        self._queried: Sequence[tuple[int, ...]] = ()
        self._branches: dict[int, tuple[int, ...]] = {}  # The drafted path that a further sequence id holds.

    def begin_step(self) -> None:
        """Reset the times, at the beginning of a step, and drop the branches of the last one."""
        super().begin_step()
        self._drop_branches()
        self._cut(len(self._text))
        if len(self._text) >= self._drafter.context.n_ctx:
            self._drafter.tell_full()

    def begin_pass(self, queried: Sequence[tuple[int, ...]]) -> None:
        """Make up a pass that answers the paths `queried`; `lose_pass` takes it back."""
        self._sure = len(self._cached)
        self._queried = queried

    def _is_queried(self, branch: tuple[int, ...]) -> bool:
        """Return True if a path of this pass begins with `branch`. Otherwise another path may take its sequence id."""
        return any(path[: len(branch)] == branch for path in self._queried)

    def _drop_branches(self) -> None:
        """Free the cells of all paths but the first."""
        for seq in self._branches:
            self._drafter.context.remove(seq, 0)
        self._branches.clear()

    def restart(self, text: Sequence[int], same: int) -> None:
        """Set another text, which shares its first `same` tokens with the old one."""
        super().restart(text, same)
        self._drop_branches()
        self._agreed = min(self._agreed, same)

    def shared(self, text: Sequence[int]) -> int:
        """Return the length of the prefix of `text` in the KV cache."""
        return common_prefix(text, self._cached)

    @property
    def n_missing(self) -> int:
        """Count the tokens of the text that are not in the KV cache."""
        text, cached = self._text, self._cached
        limit = min(len(text), len(cached))
        while self._agreed < limit and text[self._agreed] == cached[self._agreed]:
            self._agreed += 1
        return len(text) - self._agreed

    @property
    def can_ask(self) -> bool:
        """Return True if the context has room for one more token and the model has not failed."""
        return not self._drafter.failed and len(self._text) < self._drafter.context.n_ctx

    def passes(self, path: Sequence[int]) -> int:
        """Return 1: all tokens of a path are evaluated together."""
        return 1

    def caught_up(self, saves_ms: float) -> bool:
        """Return True if a query can be answered at once. Call it once a step.

        It evaluates missing tokens when that pays, and says so in the next step.

        Each step that passes without the model loses `saves_ms`. Once these losses add up to the cost of evaluating the
        text, the text is evaluated, one chunk for each step. So a short answer to a long prompt costs nothing, and a
        long answer costs at most twice the optimum, which needs to know its length.
        """
        missing, drafter = self.n_missing, self._drafter
        if missing <= INLINE:
            return True
        if not self.pays_by_now(saves_ms, missing * drafter.token_ms):
            return False
        begun = time.perf_counter()
        first = self._enter()
        start = self._agreed
        most = min(BATCH, max(INLINE, int(STALL_MS / max(drafter.token_ms, 1e-3))))
        chunk = self._text[start : min(start + most, len(self._text) - 1)]
        if chunk and not drafter.failed:
            self._cut(start)
            rows = [(int(token), start + i, first, i == len(chunk) - 1) for i, token in enumerate(chunk)]
            if drafter.evaluate(rows) is not None:
                self._cached += chunk
        self.count_part(begun, self.n_missing <= INLINE)
        return False

    def place(self, path: Sequence[int], rows: list[Row]) -> int | None:
        """Add the tokens to `rows` that are missing before `path` is answered, always its last.

        Returns the place of that one; None if the text and the path are too long, or cannot be placed.
        """
        whole, n_text = len(self._text) + len(path), len(self._text)
        if whole > self._drafter.context.n_ctx or self.n_missing > INLINE:
            return None
        first = self._enter()
        start, cached = min(self._agreed, whole - 1), self._cached
        wanted = [*self._text[start:], *path]
        same = 0
        while same < min(len(wanted) - 1, len(cached) - start) and wanted[same] == cached[start + same]:
            same += 1
        at = start + same  # The first position that differs from what the first sequence id holds.
        if n_text <= at < len(cached):
            placed = self._branch(path, rows)  # Another path goes on there in this step.
            if placed is not None or self._is_queried(tuple(cached[n_text:])):
                return placed
        self._cut(at)
        rows += [(int(token), at + i, first, i == len(wanted) - same - 1) for i, token in enumerate(wanted[same:])]
        cached += wanted[same:]
        return len(rows) - 1

    def _branch(self, path: Sequence[int], rows: list[Row]) -> int | None:
        """Place a path that leaves the one of the first sequence id."""
        context, n_text = self._drafter.context, len(self._text)
        first = self._enter()
        holder, held = first, common_prefix(self._cached[n_text:], path)
        for seq, branch in self._branches.items():
            if (same := common_prefix(branch, path)) > held:
                holder, held = seq, same
        held = min(held, len(path) - 1)
        if holder != first and held == len(self._branches[holder]):
            target = holder
        else:
            free = [seq for seq in range(first + 1, first + BRANCHES) if seq not in self._branches]
            free += [seq for seq, branch in self._branches.items() if not self._is_queried(branch)]
            parent_is_new = any(seq == holder and position == n_text + held - 1 for _, position, seq, _ in rows)
            if not free or parent_is_new:  # Cells that this same pass adds cannot be copied yet.
                return None
            target = holder if holder in free else free[0]
            if target == holder:
                context.remove(target, n_text + held)
            else:
                context.remove(target, 0)
                context.copy(holder, target, 0, n_text + held)
        self._branches[target] = tuple(path)
        missing = path[held:]
        rows += [(int(t), n_text + held + i, target, i == len(missing) - 1) for i, t in enumerate(missing)]
        return len(rows) - 1

    def lose_pass(self) -> None:
        """Take back a pass that failed: what it should have added to the cells is not there."""
        self._drop_branches()
        del self._cached[self._sure :]
        self._agreed = min(self._agreed, self._sure)
        if self.seq is not None:
            self._drafter.context.remove(self.seq, self._sure)

    def leave(self) -> None:
        """Give up the sequence ids. The next query gets others and evaluates the text again."""
        self._drop_branches()
        if self.seq is not None:
            self._drafter.free(self, self.seq)
        self.seq, self._cached, self._agreed = None, [], 0

    def _cut(self, at: int) -> None:
        """Leave only the first `at` tokens in the cells of the first sequence id."""
        if at < len(self._cached):
            self._drafter.context.remove(self._enter(), at)
            del self._cached[at:]
            self._agreed, self._sure = min(self._agreed, at), min(self._sure, at)

    def _enter(self) -> int:
        """Return the first sequence id, which it gets now if it has none."""
        if self.seq is None:
            shared = self._drafter.place(self, self._text)
            self._cached, self._agreed = list(self._text[:shared]), shared
            assert self.seq is not None
        return self.seq
