"""Draft from the target's hidden states: what MTP layers, EAGLE-3 heads and block drafters have in common.

After each forward pass of the target, `observe` takes the hidden states (features) of the tokens that were
committed. A pair of a token and the feature of the token before it is one position of the head. The pair of the root,
whose token the target has just chosen, predicts the first drafted token; further tokens of a path are paired with the
head's own hidden state.

- The cells of the head follow those of the target, slot by slot: `DraftText.rewind` and `share` come from the slot.
- Pairs wait until a query is made, and are evaluated together with the root, in one pass; those of a prompt before, in
  parts, once the steps that passed without the head have lost what that costs. So a head that does not pay costs no
  time. At most KEPT_BYTES of features wait; older tokens are then out of the head's sight.
- Cells of drafted tokens are dropped in the next step: they were computed with the head's own states.
- A gap (cells that were loaded from a file) makes a text begin anew at the next token.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.models.drafter import (
    BATCH,
    BRANCHES,
    INLINE,
    Drafter,
    DraftText,
    Evaluated,
    Likely,
    PassTimes,
    Query,
    likeliest,
    share_time,
)
from rest_local.errors import ModelError, ModelInvalid, OptionError
from rest_local.llama import features as states
from rest_local.llama.context import ABORTED, NO_ROOM, Context, ContextSettings, use_threads
from rest_local.llama.model import Model
from rest_local.retrieval.rows import MAX_DEPTH

log = logging.getLogger("rest_local.drafting")

Floats = NDArray[np.float32]
# So many of the newest features of a text are kept, to go on from where it is cut back. As many pending pairs do not
# wait once the text was caught up with: a step may have copied a long passage.
KEPT = MAX_DEPTH
# Each text may keep so many bytes of waiting features: 4 096 tokens of a model of width 4 096, 1 365 for EAGLE-3.
KEPT_BYTES = 64 << 20


class Head(Drafter):
    """A head and its KV cache.

    A feature of the target has `width` floats. A token is paired with the feature of the token `lag` places before it,
    and a pair stands `shift` positions before its token.
    """

    target_model: Model
    shift: int = 0
    lag: int = 1
    n_layers = 1  # More than one are chained (`rest_local.drafting.models.head_kinds`).

    def __init__(self, model: Model, context: Context, target: Context, width: int) -> None:
        self.model, self.context, self.target, self.width = model, context, target, width
        self.n_hidden = context.batch.features.shape[1]
        self._free = list(range(0, context.n_slots * BRANCHES, BRANCHES))
        self._warned_of_room = False
        self.times = _measured(self)

    @property
    def pair_ms(self) -> float:
        """Return the milliseconds that each of many waiting pairs takes."""
        return self.times.further * self.n_layers

    def text(self) -> HeadText:
        """Make a new, empty text, which keeps its sequence ids. Raises ValueError if none are left."""
        if not self._free:
            raise ValueError("the head has no sequence ids for another text")
        return HeadText(self, self._free.pop(0))

    def place_of(self, pair: int) -> int:
        """Return the position of a pair in the cells."""
        return max(pair - self.shift, 0)

    # What the target gives

    @abstractmethod
    def features(self, n: int) -> Floats:
        """Return the features of the target's last batch, float32 [n, width], as a view or a copy."""

    @abstractmethod
    def spoil(self, n: int) -> None:
        """Overwrite these features, to see whether the next decode writes them."""

    def encoded(self, rows: Floats) -> Floats | None:
        """Turn features [n, width] into the hidden states to pair with tokens, float32 [n, n_hidden]. None if that
        failed or was aborted.
        """
        return rows

    def observe(self, evaluated: Sequence[Evaluated]) -> None:
        """Take the features of the target's last batch."""
        if self.failed or not evaluated:
            return
        try:
            given = self.features(1 + max(max(each.rows) for each in evaluated))
            for text, start, tokens, rows in evaluated:
                assert isinstance(text, HeadText)
                text.take(start, tokens, given[list(rows)])
        except Exception as error:  # It costs drafts, never an answer.
            self.give_up("failed", error)
        except BaseException:  # After an interrupt, some of it was taken.
            for each in evaluated:
                each.text.reset(forget=True)  # type: ignore[attr-defined]
            raise

    # Passes

    def prepare_trial(self) -> None:
        """Free all cells, because a pass is tried over nothing."""
        self.context.clear()

    def load_trial(self, n: int) -> None:
        """Put the tokens of `n` queries over nothing into the batch."""
        self.context.batch.load([0] * n, [0] * n, list(range(n)), [1] * n, [1] * n)

    def answer(self, queries: Sequence[Query]) -> list[Sequence[Likely]]:
        """Return the likely tokens after each path, evaluated level by level, each in one pass."""
        begun = time.perf_counter()
        asked = [(query.text, query.path) for query in queries if isinstance(query.text, HeadText)]
        texts = {id(text): text for text, _ in asked}
        try:
            rows, passes = self._evaluate(asked)
        except BaseException:  # An interrupt comes here as well.
            for text in texts.values():
                text.reset(forget=True)
            raise
        took = 1e3 * (time.perf_counter() - begun)
        share_time(texts.values(), took)
        if rows:
            self.times.learn(rows, took / passes)
        return [() if self.failed else text.likely(path) for text, path in asked]

    def _evaluate(self, asked: Sequence[tuple[HeadText, tuple[int, ...]]]) -> tuple[int, int]:
        """Evaluate what is missing of these paths. Return the rows with an output of a pass and the passes, or zeros
        if passes had different rows.
        """
        passes = rows = 0
        while not self.failed:
            batch = Rows()
            for text, path in sorted(asked, key=lambda each: len(each[1])):
                text.place(path, batch)
            if not batch.tokens or not self._run(batch):
                break
            passes, rows = passes + 1, len(batch.outputs)
        return (rows, 1) if passes == 1 else (0, 0)

    def try_pass(self, n: int) -> int:
        """Evaluate `n` queries over nothing and search their logits. Return the code of `llama_decode`. Raises
        ModelError, and FloatingPointError for values that are not numbers.
        """
        context = self.context
        hidden = self.encoded(np.zeros((n, self.width), np.float32))
        if hidden is None:
            raise ModelError(f"{self.name} {self.path}: llama.cpp cannot encode with it; see the log")
        self.load_trial(n)
        context.batch.features[:n] = hidden
        if code := context.decode():
            return code
        states.nextn_rows(context, n, self.n_hidden)
        for row in context.logits(n):
            likeliest(row)
        return 0

    def _run(self, batch: Rows) -> bool:
        """Evaluate rows and hand their results to the texts. False if that failed."""
        hidden = self._paired(batch)
        if hidden is None:
            return False
        if code := self._decode(batch, hidden, bool(batch.outputs)):
            self._failed(batch, code)
            return False
        if batch.outputs:  # Then every row has an output: some architectures give a state for every row.
            n = len(batch.tokens)
            logits = self.context.logits(n)
            own = states.nextn_rows(self.context, n, self.n_hidden)
            try:
                for row, text, path in batch.outputs:
                    text._states[path] = (batch.seqs[row], own[row].copy(), likeliest(logits[row]))
            except FloatingPointError as error:
                self.give_up(f"returned {error}")
                return False
        for text in batch.caught_up:
            text.commit_pending()
        return True

    def _decode(self, batch: Rows, hidden: Floats, wanted: bool) -> int:
        """Evaluate rows, all of them with an output if any are `wanted`. Returns the code of `llama_decode`."""
        n = len(batch.tokens)
        self.context.batch.load(batch.tokens, batch.positions, batch.seqs, [1] * n, [int(wanted)] * n)
        self.context.batch.features[:n] = hidden[:n]
        return self.context.decode()

    def _paired(self, batch: Rows) -> Floats | None:
        """Make the hidden states of the rows: encoded features of the target, and own states of the head."""
        of_target = [i for i, own in enumerate(batch.own) if not own]
        hidden = np.empty((len(batch.tokens), self.n_hidden), np.float32)
        if of_target:
            encoded = self.encoded(np.stack([batch.hidden[i] for i in of_target]))
            if encoded is None:
                return None
            hidden[of_target] = encoded
        for i, own in enumerate(batch.own):
            if own:
                hidden[i] = batch.hidden[i]
        return hidden

    def _failed(self, batch: Rows, code: int) -> None:
        """Begin anew with what a decode touched that did not succeed."""
        for text in {id(text): text for text in batch.texts}.values():
            text.reset()
        if code == NO_ROOM:
            if not self._warned_of_room:
                self._warned_of_room = True
                log.warning("%s %s: its context is full; it begins anew with the newest tokens", self.name, self.path)
        elif code != ABORTED:  # The program ends and aborts every context; this one did not fail.
            self.give_up(f"cannot be evaluated (llama_decode: {code})")

    def close(self) -> None:
        """Free the KV cache, and the weights if they are the head's own. A second call does nothing."""
        self.context.close()
        if self.model is not self.target_model:
            self.model.close()


class LayerHead(Head):
    """A head that reads the inputs of several layers of the target, side by side."""

    has_last = False  # It may read the output of the last layer, too.
    n_read: int | None = None  # The number of layers that it reads, if that is fixed.

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int, n_features: int) -> None:
        """Draft with `model`, in a context of its own whose batches have `n_features` numbers for each token.

        Raises ModelError if llama.cpp cannot compute with the head, OptionError for the head of another model.
        """
        self.target_model = target_model
        if lacking := states.missing((*states.NEXTN, *states.LAYERS)):
            raise ModelError(
                f"{self.name} {model.path}: it needs {lacking[0]}, which this llama.cpp lacks; install a newer one"
            )
        self.layers, n_layer, n_embd = states.target_layers(model), target_model.n_layer, target_model.n_embd
        width = self.target_width(model)
        last = n_layer if self.has_last else n_layer - 1
        if len(self.layers) != (self.n_read or len(self.layers)) or max(self.layers) > last or width != n_embd:
            raise OptionError(
                f"{self.name} {model.path}: it reads layers {self.layers} of {width} numbers, and the model has "
                f"{n_layer} layers of {n_embd}; it belongs to another model"
            )
        context = Context(model, settings_for(target, n_texts), other=target, n_features=n_features)
        try:
            states.give_layers(target, [layer for layer in self.layers if layer < n_layer])
            if n_layer in self.layers:
                states.give_nextn(target, every_token=True)
            self.prepare(context)
            super().__init__(model, context, target, len(self.layers) * n_embd)
        except BaseException:
            context.close()
            raise

    @abstractmethod
    def target_width(self, model: Model) -> int:
        """Return how many numbers of each layer it reads."""

    @abstractmethod
    def prepare(self, context: Context) -> None:
        """Set what its context computes."""

    def features(self, n: int) -> Floats:
        """Return the inputs of the layers in the target's last batch, float32 [n, width]."""
        return np.concatenate(self._rows(n), axis=1)

    def spoil(self, n: int) -> None:
        """Overwrite the features of the target's last batch."""
        for rows in self._rows(n):
            rows[:] = np.nan

    def _rows(self, n: int) -> list[Floats]:
        """Return a view of the inputs of each layer."""
        target, n_layer, width = self.target, self.target_model.n_layer, self.target_model.n_embd
        return [
            states.layer_rows(target, layer, n, width) if layer < n_layer else states.nextn_rows(target, n, width)
            for layer in self.layers
        ]


def settings_for(target: Context, n_texts: int) -> ContextSettings:
    """Return the settings of a head's context: a text for each slot of the target, of the same length."""
    of_target = target.settings
    size = target.n_ctx
    return ContextSettings(
        n_ctx=size,
        n_cells=max(size, min(target.n_cells, size * n_texts)) + 2 * BATCH,
        n_slots=n_texts,
        n_branches=BRANCHES,
        n_batch=min(BATCH, size),
        flash_attention=of_target.flash_attention,
        threads=of_target.threads,
        threads_batch=of_target.threads_batch,
        offload_kqv=of_target.offload_kqv,
        rope=of_target.rope,
    )


def _measured(head: Head) -> PassTimes:
    """Measure a pass, with all threads or with one, whichever is quicker: on a busy machine threads wait for each other
    at each of many small operations. Raises ModelError if the head cannot be evaluated.
    """
    most = head.context.threads
    times = _pass_times(head)
    if most > 1:
        use_threads(head.context, 1)
        alone = _pass_times(head)
        if alone.one < times.one:
            return alone
        use_threads(head.context, most)
    return times


def _pass_times(head: Head) -> PassTimes:
    """Measure a pass of one row and of several."""
    took: dict[int, list[float]] = {1: [], BRANCHES: []}
    for _ in range(3):
        for n in took:
            head.prepare_trial()
            begun = time.perf_counter()
            try:
                code = head.try_pass(n)
            except FloatingPointError as error:
                raise ModelInvalid(head.path, f"returns {error}", "get the file again") from error
            if code:
                raise ModelError(f"{head.name} {head.path}: llama.cpp cannot evaluate it ({code}); see the log")
            took[n].append(1e3 * (time.perf_counter() - begun))
    head.context.clear()
    one, several = min(took[1]), min(took[BRANCHES])
    return PassTimes(one, max(several - one, 0.0) / (BRANCHES - 1))


class Rows:
    """The rows of one pass. Each has in `hidden` a feature of the target, or if it is `own` a state of the head."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seqs: list[int] = []
        self.hidden: list[Floats] = []
        self.own: list[bool] = []
        self.texts: list[HeadText] = []
        self.outputs: list[tuple[int, HeadText, tuple[int, ...]]] = []  # Rows whose prediction is wanted.
        self.caught_up: list[HeadText] = []  # Texts whose pending pairs are all in these rows.
        self.placed: set[tuple[int, tuple[int, ...]]] = set()

    def add(
        self,
        text: HeadText,
        path: tuple[int, ...],
        token: int,
        position: int,
        seq: int,
        hidden: Floats,
        *,
        own: bool,
        wanted: bool,
    ) -> None:
        """Add a row. If it is `wanted`, its output predicts what follows `path`."""
        self.tokens.append(token)
        self.positions.append(position)
        self.seqs.append(seq)
        self.hidden.append(hidden)
        self.own.append(own)
        self.texts.append(text)
        if wanted:
            self.outputs.append((len(self.tokens) - 1, text, path))
            self.placed.add((id(text), path))


class HeadText(DraftText):
    """The text of one slot in the cells of a head.

    Pair q is token q with the feature of token q - lag. Pairs below `_done` are in the cells of the first sequence id,
    at position q - shift; the following ones wait in `_pending`.
    """

    def __init__(self, drafter: Head, seq: int) -> None:
        """Begin an empty text of a head, whose first sequence id is `seq`."""
        super().__init__(drafter)
        self._head, self.seq = drafter, seq
        self._seen = 0  # Tokens of the text whose features were given.
        self._recent: list[Floats] = []  # Features of the newest of them.
        self._done = 0
        self._pending: list[tuple[int, Floats]] = []  # Token and feature of the pairs from `_done` on.
        # The sequence id and the head's state after a path, and what it predicts there.
        self._states: dict[tuple[int, ...], tuple[int, Floats, Sequence[Likely]]] = {}
        self._tips: dict[int, tuple[int, ...]] = {}  # The path that the cells of a sequence id end with.
        self._follows = False  # The text was caught up with before.

    def begin_step(self) -> None:
        """Reset the times, and drop the cells of the drafted tokens of the last step."""
        super().begin_step()
        self._drop_drafted()

    @property
    def n_waiting(self) -> int:
        """Return how many pairs wait to be evaluated."""
        return len(self._pending)

    def drop_uncommitted(self) -> None:
        """Free the cells of everything that comes after the committed pairs."""
        self._head.context.remove(self.seq, self._head.place_of(self._done))

    def _drop_drafted(self) -> None:
        """Free the cells of drafted tokens, and forget what was predicted after them."""
        if not self._tips:
            return
        for seq in self._tips:
            self._head.context.remove(seq, self._head.place_of(self._done) if seq == self.seq else 0)
        self._states.clear()
        self._tips.clear()

    def restart(self, text: Sequence[int], same: int) -> None:
        """Set another text. What the cells hold of it is the target's affair: `rewind`."""
        super().restart(text, same)
        self._follows = False

    def rewind(self, n: int) -> None:
        """Cut back to the first `n` tokens, because the target holds only those any more."""
        self._drop_drafted()
        first = self._seen - len(self._recent)  # The position of the first kept feature.
        if n < self._seen:
            self._recent = self._recent[: max(n - first, 0)]
            self._seen = n
        del self._pending[max(n - self._done, 0) :]
        if self._done > n:
            if not self._head.context.remove(self.seq, self._head.place_of(n)) or n == 0:
                self.reset()
            self._done = n

    def reset(self, forget: bool = False) -> None:
        """Free all cells. The text goes on with the next token that the target evaluates.

        With `forget`, nothing of the text is known any more, whatever state it is in.
        """
        if forget:
            self._seen, self._recent = 0, []
        for seq in range(self.seq, self.seq + BRANCHES):
            self._head.context.remove(seq, 0)
        self._states.clear()
        self._tips.clear()
        self._pending.clear()
        self._done = self._seen

    def share(self, other: DraftText, n: int) -> None:
        """Take the first `n` tokens of another text of the same head: its cells are shared, and so are its waiting
        pairs.
        """
        assert isinstance(other, HeadText)
        self.reset(forget=True)
        held = min(other._done, n)
        if held:
            self._head.context.copy(other.seq, self.seq, 0, self._head.place_of(held))
        self._done, self._pending = held, other._pending[: max(n - held, 0)]
        self._seen = min(other._seen, n)  # If it is less than `n`, a gap follows.
        first = other._seen - len(other._recent)
        self._recent = other._recent[: max(n - first, 0)]

    # What the target gives

    def take(self, start: int, tokens: Sequence[int], rows: Floats) -> None:
        """Take `tokens` that the target has committed at `start`, with the features `rows`, float32 [n, width]."""
        self._drop_drafted()
        if start < self._seen:
            self.rewind(start)
        if start > self._seen:  # There is a gap.
            self._seen = start
            self._recent = []
            self.reset()
        before = self._before_root() if start else np.zeros(self._head.width, np.float32)
        if not start:
            self._done = max(self._done, self._head.shift)
        given = [before, *rows[:-1]] if self._head.lag else rows
        for i, token in enumerate(tokens):
            pair = start + i
            if pair >= self._done + len(self._pending):
                self._pending.append((int(token), given[i]))
        self._seen = start + len(tokens)
        self._recent.extend(rows if len(rows) <= KEPT else rows[-KEPT:].copy())  # A view would keep all of a prompt's.
        del self._recent[:-KEPT]
        most = max(KEPT, KEPT_BYTES // (4 * self._head.width))
        if (excess := len(self._pending) - most) > KEPT:  # It is not done at every step.
            self._make_room(excess)

    def _make_room(self, n: int) -> None:
        """Forget the `n` oldest waiting pairs, and begin anew after them."""
        pending, done = self._pending[n:], self._done + n
        self.reset()
        self._pending, self._done = pending, done

    # Queries

    @property
    def can_ask(self) -> bool:
        """Return True if the features of all tokens before the root are known, and there is room for one more."""
        head, length = self._head, len(self._text)
        return not head.failed and bool(self._seen) and self._seen == length - 1 and length < head.context.n_ctx

    def caught_up(self, saves_ms: float) -> bool:
        """Return True if a query can be answered at once.

        It evaluates waiting pairs, one batch a step, once the steps that passed without the head have lost `saves_ms`
        often enough to pay for that.
        """
        head = self._head
        if len(self._pending) <= INLINE:
            return True
        pays = self.pays_by_now(saves_ms, len(self._pending) * head.pair_ms)
        if not pays and not (self._follows and len(self._pending) <= KEPT):
            return False
        begun = time.perf_counter()
        self._drop_drafted()
        batch, n = Rows(), min(len(self._pending), head.context.n_batch)
        self.place_waiting(batch, n)
        try:
            if head._run(batch):
                del self._pending[:n]
                self._done += n
        except BaseException:  # After an interrupt, these pairs are in the cells, perhaps.
            self.reset(forget=True)
            raise
        if caught_up := len(self._pending) <= INLINE:
            self._follows = True
        self.count_part(begun, caught_up)
        return caught_up and not head.failed

    def passes(self, path: Sequence[int]) -> int:
        """Count a pass for each token of the path that was not evaluated in this step, and one for the root."""
        known = sum(tuple(path[:n]) in self._states for n in range(len(path) + 1))
        return max(len(path) + 1 - known, 1)

    def likely(self, path: tuple[int, ...]) -> Sequence[Likely]:
        """Return what was predicted after a path in this step; nothing where it was not evaluated."""
        found = self._states.get(path)
        return () if found is None else found[2]

    def commit_pending(self) -> None:
        """Note that the pending pairs and the root are in the cells."""
        self._done = self._seen + 1
        self._pending.clear()

    def place(self, path: tuple[int, ...], batch: Rows) -> None:
        """Add what has to be evaluated next for a path to a pass: the root, or the first token of it that was not."""
        if not self.can_ask:
            return
        known = next((n for n in range(len(path), -1, -1) if path[:n] in self._states), -1)
        if known == len(path):
            return
        if known < 0:
            self._place_root(batch)
            return
        parent, node = path[:known], path[: known + 1]
        if (id(self), node) in batch.placed or len(batch.tokens) >= self._head.context.max_outputs:
            return
        place = self.place_after(parent)
        if (seq := self.seq_after(parent, place)) is None:
            return
        self._tips[seq] = node
        batch.add(self, node, int(node[-1]), place, seq, self._states[parent][1], own=True, wanted=True)

    def place_after(self, path: tuple[int, ...]) -> int:
        """Return the position of a token that is drafted after a path."""
        return self._head.place_of(len(self._text) - 1) + len(path) + 1

    def seq_after(self, path: tuple[int, ...], place: int) -> int | None:
        """Return the sequence id for a token at `place` after a path: the path's own, or if another token has that, a
        free one that shares its cells. None if there is none.
        """
        seq = self._states[path][0]
        if self._tips.get(seq) == path:
            return seq
        free = next((each for each in range(self.seq, self.seq + BRANCHES) if each not in self._tips), None)
        if free is not None:
            self._head.context.copy(seq, free, 0, place)
        return free

    def place_waiting(self, batch: Rows, n: int) -> None:
        """Add the `n` oldest waiting pairs to a pass."""
        for i, (token, row) in enumerate(self._pending[:n]):
            batch.add(self, (), token, self._head.place_of(self._done + i), self.seq, row, own=False, wanted=False)

    def _place_root(self, batch: Rows) -> None:
        """Add the pending pairs and the root to a pass."""
        if (id(self), ()) in batch.placed or len(batch.tokens) + len(self._pending) >= self._head.context.max_outputs:
            return
        root = len(self._text) - 1
        if self._done > root:  # It was evaluated, but its state was dropped with the drafted tokens.
            self._head.context.remove(self.seq, self._head.place_of(root))
            self._done = root
        self.place_waiting(batch, len(self._pending))
        self._tips[self.seq] = ()
        token = int(self._text[root])
        batch.add(self, (), token, self._head.place_of(root), self.seq, self._before_root(), own=False, wanted=True)
        batch.caught_up.append(self)

    def _before_root(self) -> Floats:
        """Return the feature that is paired with the root."""
        return self._recent[-1] if self._recent else np.zeros(self._head.width, np.float32)
