"""One text in the KV cache: how many of its tokens are in the cells, and the sequence ids of its branches.

Contract:

- The text is the token list of the sequence that is at work here, not a copy. Nothing here changes it.
- The first branch id is attached to the whole committed prefix. Another id is brought up to it when a tree has a leaf
  for it.
- Every `remove` and `copy` passes over all cells of the context, those of other slots too (12 us at 23 000 cells). So a
  step makes one for each leaf, not for each id. A copy covers what an id missed (all of 7 000 cells take 0.6 ms).
- A failed removal is never ignored: the cells are cleared, and the tokens are evaluated again at the next use.
- Memory that cannot be cut back (recurrent state) goes back to a checkpoint. Each part of a prompt leaves one, and so
  does a step whose draft is longer than what llama.cpp can roll back (`protect`). After a rejection the state is that
  before the step, and the tokens that were accepted are evaluated again with the next step (`n_again`).
- Rows of images stand in the text as negative ids (`llama.placeholders`). An image is kept whole or not at all. Where a
  model has M-RoPE, an image takes fewer positions than rows: `position` says where a token is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rest_local.drafting.tree import DraftTree, Layout
from rest_local.errors import DecodeFailed
from rest_local.kv_cache.backend import Backend, remove_tail
from rest_local.llama.context import Batch
from rest_local.llama.placeholders import common_prefix, whole

if TYPE_CHECKING:
    from rest_local.drafting.models.drafter import DraftText


@dataclass(slots=True)
class BatchBuilder:
    """The tokens of a batch, of any number of slots. Plain lists: numpy is no faster for so few."""

    token: list[int] = field(default_factory=list)
    pos: list[int] = field(default_factory=list)
    first_id: list[int] = field(default_factory=list)
    n_ids: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def load(self, batch: Batch) -> None:
        """Make this the content of the batch. Raises ValueError where it does not fit."""
        batch.load(self.token, self.pos, self.first_id, self.n_ids, self.output)


MOST_CHECKPOINTS, LEAST_CHECKPOINTS = 32, 4  # of the text of a slot
CHECKPOINT_BYTES = 2 << 30  # of main memory, for those of all slots
SAVED_CHECKPOINTS = 6  # on disk, with the text
GENERATED, GENERATED_SHARE = 16, 0.02  # tokens between checkpoints of an answer, and of its time for them
TURN_WEIGHT = 4.0  # of a checkpoint where a prompt was cut, against others: templates change texts there
LOST = -100  # no code of `llama_decode`: cells of images were lost, and the text has to be evaluated as a prompt again
_runs = itertools.count()


@dataclass
class CheckpointCosts:
    """What checkpoints of steps have cost in a context, smoothed over some twenty of them: milliseconds of one, and of
    going back to it; the share of them that were gone back to, and how many tokens were then evaluated again.
    """

    save_ms: float = 0.0
    restore_ms: float = 0.0
    rejected: float = 0.5
    again: float = 4.0
    _saved: int = 0
    _restored: int = 0

    def note_saved(self, ms: float) -> None:
        """A step has begun with one."""
        self._saved += 1
        self.save_ms += (ms - self.save_ms) / min(self._saved, 20)
        self.rejected -= self.rejected / 20

    def note_restored(self, ms: float, again: int) -> None:
        """A step has ended with going back to it."""
        self._restored += 1
        self.restore_ms += (ms - self.restore_ms) / min(self._restored, 20)
        self.again += (again - self.again) / min(self._restored, 20)
        self.rejected += 1 / 20


def count_cells(held: Iterable[tuple[Slot, int]]) -> int:
    """Cells that these slots hold with so many tokens each; shared cells count once."""
    ends: dict[tuple[int, int], int] = {}
    for slot, n_tokens in held:
        following = [*(begin for begin, _ in slot.runs[1:]), n_tokens]
        for run, end in zip(slot.runs, following, strict=True):
            if run[0] < n_tokens:
                ends[run] = max(min(end, n_tokens), ends.get(run, 0))
    return sum(end - begin for (begin, _), end in ends.items())


class Slot:
    """Place for one text in the cells of a context. `checkpoints`: whether states are kept to go back to."""

    def __init__(
        self, backend: Backend, first_id: int = 0, n_branches: int | None = None, checkpoints: bool = False
    ) -> None:
        self._keeps_checkpoints = checkpoints
        self._checkpoints: list[tuple[int, bytes]] = []  # tokens evaluated, and the state there; ascending
        self._turns = set[int]()  # of them, those where a prompt was cut
        self._saved_at = self._save_s = 0.0  # when the newest was made, and what that took; seconds
        self._before_step: tuple[int, bytes] | None = None  # likewise; on the device
        self.n_again = 0  # tokens at the end of `n_past` that the next step evaluates again; else a rewind forgets them
        self.costs = CheckpointCosts()
        self.checkpoint_ms = 0.0  # that the newest step has taken for checkpoints
        self.backend = backend
        self.first_id = first_id
        self.n_branches = n_branches or backend.n_branches
        self.tokens: list[int] = []  # the text: the list of the sequence at work, or of the last one; it only grows
        self.n_past = 0  # how many of them are in the cells: the position of the next token
        self.runs = [(0, next(_runs))]  # cells that hold them: (first position, number), the same where they are shared
        self.draft_text: DraftText | None = None  # what a drafting model knows of these cells
        self.user = ""  # whose text it is: only requests of this user may share it, or have it restored from disk
        self.is_kept = self.is_named = False  # on disk; and however short it is
        self.n_saved = 0  # of `n_past`, tokens that were written to disk or need not be
        self.is_idle = True  # no request uses it
        self.idle_since = 0.0  # by `time.monotonic`; 0: in use, or it was never used
        self.saved: Sequence[tuple[int, int]] = ()  # end of each image that saves positions, and how many up to there
        self._joined = self.n_branches  # so many ids, from the first on, are attached to all tokens
        self._held = [0] * self.n_branches  # of the others: to how many

    @property
    def number(self) -> int:
        """Its place among the slots of the context."""
        return self.first_id // self.n_branches

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the cells hold, from the first on; no part of an image."""
        return whole(tokens, common_prefix(self.tokens[: self.n_past], tokens))

    def reusable(self, n: int) -> int:
        """How many of the first `n` committed tokens could be kept if those after them were freed."""
        if not self._keeps_checkpoints or n >= self.n_past - self.n_again:
            return n if not self._keeps_checkpoints else min(n, self.n_past - self.n_again)
        return max((at for at, _ in self._checkpoints if at <= n), default=0)

    @property
    def checkpoint_bytes(self) -> int:
        """Main memory of the checkpoints."""
        return sum(len(state) for _, state in self._checkpoints)

    def follow(self, tokens: list[int], saved: Sequence[tuple[int, int]] = ()) -> int:
        """Make `tokens` the text of this slot. Keep what the cells share with it, without its last token, and free the
        rest; return how many tokens are kept. `saved`: as the attribute, of this text.
        """
        kept = min(self.common_prefix(tokens), len(tokens) - 1)
        self.saved = saved  # what is kept has the same images in both
        self.rewind(kept)  # even to the end: an interrupt may leave cells that were never committed
        self.checkpoint(is_turn=True)  # after an answer, before what is new
        self.tokens = tokens
        if self.draft_text:
            self.draft_text.restart(tokens, self.n_past)
        return self.n_past

    def position(self, n: int) -> int:
        """The position of token `n` of the text, which is `n` unless there are images that take fewer."""
        if not self.saved:
            return n
        return n - max((saved for end, saved in self.saved if end <= n), default=0)

    def share_prefix(self, other: Slot, n: int) -> None:
        """Begin anew with the first `n` tokens of another slot: the cells themselves are shared, nothing is evaluated.

        Costs a pass over the cells. Memory that cannot remove a tail needs a checkpoint of the other slot at `n`
        (`reusable`), whose state is copied.
        """
        self.clear()
        self.backend.copy(other.first_id, self.first_id, 0, other.position(n))
        if self._keeps_checkpoints:
            state = dict(other._checkpoints).get(n, b"")
            if not state or not self.backend.restore(self.first_id, state, partial=True) or not self._remove_all(n):
                self.clear()
                return
            self._checkpoints = [each for each in other._checkpoints if each[0] <= n]
            self._turns = {at for at in other._turns if at <= n}
        self.tokens, self.n_past, self.saved = other.tokens, n, other.saved
        self.runs = [*(run for run in other.runs if run[0] < n), (n, next(_runs))]
        self._joined, self._held = 1, [0] * self.n_branches
        if self.draft_text and other.draft_text:
            self.draft_text.share(other.draft_text, n)
        if self._lacks_window():
            self.clear()

    def own(self, user: str, is_kept: bool, is_named: bool = False) -> None:
        """The text is that of `user` from now on; `is_kept`, `is_named`: as the attributes."""
        if not (self.is_kept and is_kept and self.user == user):
            self.n_saved = 0
        self.user, self.is_kept, self.is_named = user, is_kept, is_named

    def begin_anew(self, tokens: list[int]) -> None:
        """Free the cells; `part` or `states` of this text come next."""
        self.clear()
        self.tokens, self.saved, self.n_saved = tokens, (), 0

    def part(self, begin: int, end: int) -> bytes:
        """The state of the committed tokens at [begin, end), for `add_part`; nothing where some of them have left a
        sliding window. For memory that can remove a tail, and slots with more than one sequence id.
        """
        self.release_branches()
        spare = self.first_id + 1
        try:
            self.backend.copy(self.first_id, spare, begin, end)
            # of a sliding window, too, llama.cpp keeps all positions after the first one that it has
            return self.backend.save(spare) if self.backend.begin(spare) == begin else b""
        finally:
            self.backend.remove(spare, 0, -1)

    def add_part(self, state: bytes | memoryview, end: int) -> bool:
        """Have the next tokens of the text, up to `end`, in the cells, from a state of `part` that ends there or later
        and begins at `n_past` or before. False where there is no room for it, or it is not of such a context.
        """
        self.release_branches()
        spare = self.first_id + 1
        try:
            if not self.backend.restore(spare, state):
                return False
            self.backend.copy(spare, self.first_id, self.n_past, end)
        finally:
            self.backend.remove(spare, 0, -1)
        self.n_past = end
        return True

    def copy_in_order(self, source: Slot, n: int) -> bool:
        """Begin anew with copies of the first `n` cells of a slot, this one or another, and return True if that worked.
        The copies are in the order of the tokens, and no cell below them is free (`use_lowest_cells`).

        Images and what a drafting model knows are not copied, nor texts that have left a sliding window: then this
        returns False, and the slot is as it was, or empty. Takes the time of copying the state twice.
        """
        tokens = source.tokens
        if self.draft_text is not None or min(tokens[:n]) < 0:
            return False
        state, newest = source.part(0, n), source.part(n - 1, n)
        if not state:
            return False
        n_saved = min(self.n_saved, n) if source is self else 0
        self.begin_anew(tokens)
        self.use_lowest_cells(newest)
        if not self.add_part(state, n):
            self.clear()
            return False
        self.n_saved = n_saved
        return True

    def use_lowest_cells(self, newest: bytes) -> None:
        """Have the next tokens of this empty slot in the lowest cells that are free. `newest`: the state of one cell.

        llama.cpp looks for room after the last place, and from the lowest cell on only where the tokens that come at
        once are few for the free cells below. So a prompt may go above cells that its answer then fills, and attention
        adds up in another order than that of the tokens. A single cell goes to the lowest place, and freeing it again
        leaves that as the place where the next search begins.
        """
        self.backend.restore(self.first_id, newest)
        self.clear()

    def states(self, most: int) -> list[tuple[int, bytes]] | None:
        """What memory that cannot be cut back holds: the whole state with the number of its tokens, then checkpoints
        before it, the newest first, as far as `most` bytes hold them. None where these do not hold the state.
        """
        self.settle()
        most -= self.backend.state_size(self.first_id)
        if most < 0:
            return None
        states = [(self.n_past, self.backend.save(self.first_id))]
        for at, state in list(reversed(self._checkpoints))[: SAVED_CHECKPOINTS + 1]:
            most -= len(state)
            if at < self.n_past and most >= 0:
                states.append((at, state))
        return states[: SAVED_CHECKPOINTS + 1]

    def load_states(self, states: Sequence[tuple[int, bytes | memoryview]], n: int) -> bool:
        """Have such states in the place of what the slot holds, cut back to the first `n` tokens of its text, which are
        those of one of the states and hold no image. False where that fails; the slot is then empty.
        """
        self.clear()
        n_whole, state = states[0]
        if not self.backend.restore(self.first_id, state):
            return False
        self.n_past, self.runs = n_whole, [(0, next(_runs))]
        self._joined, self._held = 1, [0] * self.n_branches
        self._checkpoints = [(at, bytes(each)) for at, each in reversed(states[1:])][-MOST_CHECKPOINTS:]
        if n_whole == n:
            self.checkpoint()
        else:
            self.rewind(n)
        return self.n_past == n

    def rewind(self, n_past: int, broken_off: bool = False) -> None:
        """Free the cells from position `n_past` on, drafts included. Where the model cannot do that, go back to the
        last checkpoint before, or to nothing.

        `broken_off`: a decode did not finish; recurrent state is then half written, whatever its position says. It is
        not reliable either where committed tokens are removed: llama.cpp says that it rolled back, but has kept only
        the states of the last decode.
        """
        self.settle()
        n_past = min(whole(self.tokens, n_past), self.n_past)
        suspect = self._keeps_checkpoints and (broken_off or n_past < self.n_past)
        self._forget(n_past)
        removed = self._remove_all(n_past)
        while self._checkpoints and self._checkpoints[-1][0] > n_past:
            self._checkpoints.pop()
        if self._before_step is not None and self._before_step[0] > n_past:
            self._before_step = None
        if ((suspect or not removed) and not self._go_back()) or self._lacks_window():
            self.clear()

    def _lacks_window(self) -> bool:
        """Whether cells of the sliding window before the next token are gone. A file of llama.cpp has only those of the
        window before its last token, and others of this memory may be used again; without them logits are wrong.
        """
        n_swa = self.backend.n_swa
        if not n_swa or not self.n_past:
            return False
        begin = self.backend.begin(self.first_id)
        return begin < 0 or begin > max(0, self.position(self.n_past) - n_swa)

    def commit(self, n: int, is_turn: bool = False) -> None:
        """The next n tokens of the text were evaluated; `is_turn`: the prompt was cut after them, or ends."""
        self.n_past += n
        self.checkpoint(is_turn)

    def rebuild(self, cut_back: bool) -> None:
        """Have the committed tokens, and no others, in the cells again: evaluated from nothing or, with `cut_back`,
        from the last position that the memory can be taken back to. Raises DecodeFailed; `n_past` is then less than
        before.
        """
        n_tokens = self.n_past
        if cut_back:
            self.rewind(n_tokens, broken_off=True)
        else:
            self.clear()
        while self.n_past < n_tokens:
            part = self.tokens[self.n_past : min(n_tokens, self.n_past + self.backend.n_batch)]
            if min(part) < 0:  # the sequence evaluates images, as parts of its prompt
                raise DecodeFailed(LOST, len(part))
            batch = BatchBuilder()
            self.add_prompt(batch, part)
            batch.load(self.backend.batch)
            if code := self.backend.decode():
                raise DecodeFailed(code, len(part))
            self.commit(len(part))

    def checkpoint(self, is_turn: bool = False) -> None:
        """Keep the state so far to come back to, if this memory needs that. About a millisecond.

        Where there are too many, that one goes which is closest to the one before it, in proportion to how far both lie
        back. So a text that differs from some place on is evaluated again from about there, however long it is.
        """
        if not self._keeps_checkpoints or not self.n_past or self.n_again:
            return
        if is_turn:
            self._turns.add(self.n_past)
        kept = self._checkpoints
        if kept and kept[-1][0] >= self.n_past:
            return
        begun = time.perf_counter()
        state = self.backend.save(self.first_id, partial=True)
        if state:
            kept.append((self.n_past, state))
        self._saved_at = time.perf_counter()
        self._save_s = self._saved_at - begun
        most = CHECKPOINT_BYTES // (self.backend.n_slots * max(len(state), 1))
        if len(kept) > max(LEAST_CHECKPOINTS, min(most, MOST_CHECKPOINTS)):
            places = [0, *(at for at, _ in kept)]
            worth = [
                (TURN_WEIGHT if at in self._turns else 1.0) * (at - before) / (self.n_past - before)
                for before, at in itertools.pairwise(places[:-1])
            ]
            self._turns.discard(kept.pop(worth.index(min(worth)))[0])

    def checkpoint_answer(self) -> None:
        """Once in a while, while an answer is generated: templates often change its end. At most 2% of the time."""
        if self._keeps_checkpoints and not self.n_again:
            newest = self._checkpoints[-1][0] if self._checkpoints else 0
            waited = time.perf_counter() - self._saved_at > self._save_s / GENERATED_SHARE
            if waited and self.n_past - newest >= GENERATED:
                self.checkpoint()

    def protect(self, n: int) -> int:
        """See to it that a draft of `n` tokens can be taken back, by a checkpoint if llama.cpp cannot; how many can."""
        self.checkpoint_ms = 0.0
        if n <= self.backend.rollback:
            return n
        at = self.n_past - self.n_again
        if self._before_step is None or self._before_step[0] != at or not self.n_again:
            begun = time.perf_counter()
            state = self.backend.save(self.first_id, partial=True, on_device=True)
            self._before_step = (at, state) if state else None
            self.checkpoint_ms = 1e3 * (time.perf_counter() - begun)
        self.costs.note_saved(self.checkpoint_ms)
        return n if self._before_step else self.backend.rollback

    def settle(self) -> None:
        """Leave the tokens that were to be evaluated again to whatever evaluates the text next."""
        if self.n_again:
            n_past, self.n_again = self.n_past - self.n_again, 0
            self._forget(n_past)

    def _go_back_before_step(self) -> bool:
        """Go to the state before the step, and leave its accepted tokens to the next one."""
        if self._before_step is None:
            return False
        begun, (at, state) = time.perf_counter(), self._before_step
        if not (self.backend.restore(self.first_id, state, partial=True, on_device=True) and self._remove_all(at)):
            self._before_step = None
            return False
        self.n_again = self.n_past - at
        ms = 1e3 * (time.perf_counter() - begun)
        self.checkpoint_ms += ms
        self.costs.note_restored(ms, self.n_again)
        if self.n_again >= self.backend.n_batch // self.backend.n_slots:  # all slots together would not fit a batch
            self.settle()
        return True

    def _go_back(self) -> bool:
        """Go to the last checkpoint that works."""
        newest = self._checkpoints[-1][0] if self._checkpoints else 0
        if self._before_step is not None and self._before_step[0] >= newest and self._go_back_before_step():
            self.settle()
            return True
        while self._checkpoints:
            n_past, state = self._checkpoints[-1]
            if self.backend.restore(self.first_id, state, partial=True) and self._remove_all(n_past):
                self._forget(n_past)
                return True
            self._checkpoints.pop()
        return False

    def clear(self) -> None:
        self._checkpoints = []
        self._turns.clear()
        self._before_step, self.n_again = None, 0
        self._forget(0)
        self._joined = self.n_branches
        if not self._remove_all(0):
            self.backend.clear()

    def _forget(self, n_past: int) -> None:
        """Uncommit the tokens from there on. Other cells will replace theirs, even where another slot keeps these."""
        if self.draft_text:
            self.draft_text.rewind(n_past)
        if n_past < self.n_past:
            self.n_past = n_past
            self.n_saved = min(self.n_saved, n_past)
            self.runs = [*(run for run in self.runs if run[0] < n_past), (n_past, next(_runs))]

    def add_prompt(self, batch: BatchBuilder, tokens: Sequence[int]) -> None:
        """Put the next tokens to commit into the batch, without logits."""
        n, begin = len(tokens), self.position(self.n_past)
        batch.token += tokens
        batch.pos += range(begin, begin + n)
        batch.first_id += [self.first_id] * n
        batch.n_ids += [self._joined] * n
        batch.output += [0] * n

    def add_step(self, batch: BatchBuilder, tree: DraftTree, layout: Layout | None, n_before: int = 0) -> None:
        """Put the root, which is the next token of the text, and its draft into the batch, with the logits of each;
        before them what is evaluated again, or the `n_before` tokens of the prompt that the batch ends with so far.
        """
        first_id, begin = self.first_id, self.position(self.n_past + n_before)
        if self.n_again:
            again = self.n_again
            batch.token += self.tokens[self.n_past - again : self.n_past]
            batch.pos += range(begin - again, begin)
            batch.first_id += [first_id] * again
            batch.n_ids += [self._joined] * again
            batch.output += [0] * again
        if tree.n_leaves > self._joined:
            self._join(tree.n_leaves)
        batch.token.append(self.tokens[self.n_past + n_before])
        batch.pos.append(begin)
        batch.first_id.append(first_id)
        batch.n_ids.append(self._joined)
        batch.output.append(1)
        if layout is not None:
            token, depth = tree.token, tree.depth
            batch.token += [token[node] for node in layout.order]
            batch.pos += [begin + depth[node] for node in layout.order]
            batch.first_id += [first_id + layout.low[node] for node in layout.order]
            batch.n_ids += [layout.count[node] for node in layout.order]
            batch.output += [1] * len(layout.order)

    def fill_step(self, tree: DraftTree, layout: Layout | None) -> None:
        """A batch of this slot's step alone."""
        self.protect(len(tree))
        batch = BatchBuilder()
        self.add_step(batch, tree, layout)
        batch.load(self.backend.batch)

    def accept(self, tree: DraftTree, layout: Layout | None, path: Sequence[int]) -> bool:
        """Commit the root and the accepted nodes, free the others. False: the cells were lost and must be rebuilt.

        The text has the tokens of the accepted nodes after the root, or gets them next.
        """
        start = self.n_past
        self.n_past += 1 + len(path)
        self.n_again = 0
        if layout is None:
            return True
        if len(tree) - len(path) > self.backend.rollback:
            return self._go_back_before_step()
        along = [0] * tree.n_leaves  # by leaf: how many accepted nodes lie on the way to it
        for depth, node in enumerate(path, 1):
            for leaf in range(layout.low[node], layout.low[node] + layout.count[node]):
                along[leaf] = depth
        below = bool(tree.children[path[-1]] if path else tree.root_children)  # whether the accepted path could go on
        if len(path) < len(tree) and not self._remove_rejected(start + 1, along, len(path), below):
            return False
        if path:
            self._follow(start + 1, along, len(path), layout.low[path[-1]])
        return True

    def _remove_rejected(self, first: int, along: Sequence[int], accepted: int, below: bool) -> bool:
        """Free drafted cells from `first` on, but for accepted ones; `below`: there are some below the last one."""
        alone, begin = self._is_alone, self.position(first)
        if below and alone and not remove_tail(self.backend, begin + accepted):  # one call for all of them
            return False
        for leaf, depth in enumerate(along):
            wrong = depth < accepted or (below and not alone)
            if wrong and not self.backend.remove(self.first_id + leaf, begin + depth, -1):
                return False
        return True

    def _follow(self, first: int, along: Sequence[int], accepted: int, leader: int) -> None:
        """Note which ids hold the accepted tokens, from position `first` on; the first id always does."""
        if along[0] < accepted:
            begin = self.position(first)
            self.backend.copy(self.first_id + leader, self.first_id, begin + along[0], begin + accepted)
        for branch in range(1, self._joined):
            self._held[branch] = first + (along[branch] if branch < len(along) else 0)
        self._joined = next((b for b in range(1, self._joined) if self._held[b] < self.n_past), self._joined)

    def _join(self, n: int) -> None:
        """Attach the first `n` ids to all tokens."""
        for branch in range(self._joined, n):
            if self._held[branch] < self.n_past:
                held, end = self.position(self._held[branch]), self.position(self.n_past)
                self.backend.copy(self.first_id, self.first_id + branch, held, end)
        self._joined = n

    def release_branches(self) -> bool:
        """Detach every id but the first from the cells; whether that changes anything. The next tree attaches them.

        A sliding window drops old cells id by id, so that an id that was not brought up to the newest tokens can come
        to hold others than the first. llama.cpp then refuses a token that has both ids (-1).
        """
        others = range(1, self.n_branches)
        if self._joined == 1 and not any(self._held[branch] for branch in others):
            return False
        released = [self.backend.remove(self.first_id + branch, 0, -1) for branch in others]
        self._joined, self._held = 1, [0] * self.n_branches
        return all(released)

    @property
    def _is_alone(self) -> bool:
        """Whether all cells are this slot's, so that one call removes from all ids."""
        return self.n_branches == self.backend.n_branches * self.backend.n_slots

    def _remove_all(self, p0: int) -> bool:
        """Remove the tokens from `p0` on from every sequence id. From an id that is not attached to all tokens, remove
        also what an interrupted `copy` may have left.
        """
        starts = [p0 if b < self._joined else min(held, p0) for b, held in enumerate(self._held)]
        self._held = starts
        if self._is_alone:
            if not remove_tail(self.backend, self.position(p0)):
                return False
            starts = starts[self._joined :]
        ids = range(self.first_id + self.n_branches - len(starts), self.first_id + self.n_branches)
        removed = [self.backend.remove(seq, self.position(start), -1) for seq, start in zip(ids, starts, strict=True)]
        return all(removed)  # every id is tried, also after one that failed
