"""One text in the KV cache: how many of its tokens are in the cells, and what of them a batch evaluates next.

Contract:

- The text is the token list of the sequence that is at work here, not a copy. Nothing here changes it.
- A failed removal is never ignored: the cells are cleared, and the tokens are evaluated again at the next use.
- Memory that cannot be cut back (recurrent state) goes back to a checkpoint. After a rejection the state is that before
  the step, and the tokens that were accepted are evaluated again with the next step (`n_again`).
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
from rest_local.kv_cache.backend import Backend
from rest_local.kv_cache.branches import Branches
from rest_local.kv_cache.checkpoints import CheckpointCosts, Checkpoints
from rest_local.llama.context import Batch
from rest_local.llama.placeholders import common_prefix, whole

if TYPE_CHECKING:
    from rest_local.drafting.models.drafter import DraftText

# No code of `llama_decode`: cells of images were lost, and the text has to be evaluated as a prompt again.
LOST = -100
run_numbers = itertools.count()


@dataclass
class Ownership:
    """Whose text it is, so that only requests of this user share it or have it restored from disk.

    is_kept        the text may be kept on disk
    persist_short  however short it is
    n_persisted    how many of its tokens were written to disk, or need not be
    """

    user: str = ""
    is_kept: bool = False
    persist_short: bool = False
    n_persisted: int = 0

    def passed_to(self, user: str, is_kept: bool, persist_short: bool = False) -> Ownership:
        """Return the ownership for the next request. A text that was not kept for the same user counts as unsaved."""
        is_same = self.is_kept and is_kept and self.user == user
        return Ownership(user, is_kept, persist_short, self.n_persisted if is_same else 0)


class Slot:
    """Place for one text in the cells of a context.

    tokens         the text: the list of the sequence at work, or of the last one; it only grows
    n_past         how many of them are in the cells
    n_again        tokens at the end of `n_past` that the next step evaluates again; a rewind forgets them instead
    image_offsets  end of each image that takes fewer positions than rows, and how many fewer up to there
    runs           cells that hold the tokens: (first of them, number), with equal numbers where they are shared
    checkpoints    recurrent states to go back to, kept if the argument is True; `costs` are those of the context
    draft_text     what a drafting model knows of these cells
    idle_since     by `time.monotonic`; 0: in use, or it was never used
    """

    def __init__(
        self,
        backend: Backend,
        number: int = 0,
        checkpoints: bool = False,
        costs: CheckpointCosts | None = None,
        draft_text: DraftText | None = None,
    ) -> None:
        n = backend.n_branches
        self.backend, self.number = backend, number
        self.branches = Branches(backend, number * n, n)
        self.checkpoints = Checkpoints(backend, number * n, checkpoints, costs or CheckpointCosts())
        self.tokens: list[int] = []
        self.n_past = self.n_again = 0
        self.image_offsets: Sequence[tuple[int, int]] = ()
        self.runs = [(0, next(run_numbers))]
        self.draft_text = draft_text
        self.owner = Ownership()
        self.idle_since = 0.0

    def reusable(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, could be kept if all others were freed."""
        n = whole(tokens, common_prefix(self.tokens[: self.n_past], tokens))
        if not self.checkpoints.is_on:
            return n
        valid = self.n_past - self.n_again
        return valid if n >= valid else self.checkpoints.last_before(n)

    def follow(self, tokens: list[int], image_offsets: Sequence[tuple[int, int]] = ()) -> int:
        """Make `tokens` the text of this slot. Keep the cells of the common prefix, without its last token, and free
        the rest. Return how many tokens are kept.
        """
        shared = whole(tokens, common_prefix(self.tokens[: self.n_past], tokens))
        self.image_offsets = image_offsets  # what is kept has the same images in both
        self.rewind(min(shared, len(tokens) - 1))  # even to the end: an interrupt may leave cells never committed
        self.checkpoints.keep(self.n_past, is_turn=True)  # after an answer, before what is new
        self.tokens = tokens
        if self.draft_text:
            self.draft_text.restart(tokens, self.n_past)
        return self.n_past

    def position(self, n: int) -> int:
        """Return the position of token `n` of the text, which is `n` unless there are images that take fewer."""
        if not self.image_offsets:
            return n
        return n - max((saved for end, saved in self.image_offsets if end <= n), default=0)

    def rewind(self, n_past: int, broken_off: bool = False) -> None:
        """Free the cells of tokens from `n_past` on, drafts included.

        If the model cannot do that, go back to the last checkpoint before, or to nothing. `broken_off`: a decode did
        not finish; recurrent state is then half written, whatever its position says. It is not reliable either if
        committed tokens are removed: llama.cpp says that it rolled back, but has kept only the states of the last
        decode.
        """
        self.settle()
        n_past = min(whole(self.tokens, n_past), self.n_past)
        suspect = self.checkpoints.is_on and (broken_off or n_past < self.n_past)
        self.uncommit(n_past)
        removed = self.branches.remove(self.position(n_past))
        self.checkpoints.drop_after(n_past)
        if ((suspect or not removed) and not self._go_back()) or lacks_window(self):
            self.clear()

    def commit(self, n: int, is_turn: bool = False) -> None:
        """Count the next n tokens of the text as evaluated. `is_turn`: the prompt was cut after them, or ends."""
        self.n_past += n
        self.checkpoints.keep(self.n_past, is_turn)

    def settle(self) -> None:
        """Leave the tokens that were to be evaluated again to the next evaluation of the text."""
        if self.n_again:
            n_past, self.n_again = self.n_past - self.n_again, 0
            self.uncommit(n_past)

    def accept(self, tree: DraftTree, layout: Layout | None, path: Sequence[int]) -> bool:
        """Commit the root and the accepted nodes, free the others. Return False if the cells were lost and must be
        rebuilt.

        The text has the tokens of the accepted nodes after the root, or gets them next.
        """
        start = self.n_past
        self.n_past += 1 + len(path)
        self.n_again = 0
        if layout is None:
            return True
        if len(tree) - len(path) > self.backend.rollback:
            return self._go_back_before_step()
        return self.branches.accept(self.position(start + 1), tree, layout, path)

    def clear(self) -> None:
        """Free the cells of all tokens."""
        self.checkpoints.clear()
        self.n_again = 0
        self.uncommit(0)
        if not self.branches.clear():
            self.backend.clear()

    def uncommit(self, n_past: int) -> None:
        """Forget that the cells hold the tokens from `n_past` on.

        Other cells will hold them, even if another slot keeps these.
        """
        if self.draft_text:
            self.draft_text.rewind(n_past)
        if n_past < self.n_past:
            self.n_past = n_past
            self.owner.n_persisted = min(self.owner.n_persisted, n_past)
            self.runs = [*(run for run in self.runs if run[0] < n_past), (n_past, next(run_numbers))]

    def _go_back_before_step(self) -> bool:
        """Go back to the state before the step, and leave its accepted tokens to the next one."""
        kept = self.checkpoints
        if kept.before_step is None:
            return False
        begun, (at, state) = time.perf_counter(), kept.before_step
        restored = self.backend.restore(self.branches.first_id, state, partial=True, on_device=True)
        if not (restored and self.branches.remove(self.position(at))):
            kept.before_step = None
            return False
        self.n_again = self.n_past - at
        ms = 1e3 * (time.perf_counter() - begun)
        kept.step_ms += ms
        kept.costs.note_restored(ms, self.n_again)
        if self.n_again >= self.backend.n_batch // self.backend.n_slots:  # all slots together would not fit a batch
            self.settle()
        return True

    def _go_back(self) -> bool:
        """Go back to the last checkpoint that works."""
        kept = self.checkpoints
        if kept.before_step is not None and kept.before_step[0] >= kept.newest and self._go_back_before_step():
            self.settle()
            return True
        while kept.states:
            n_past, state = kept.states[-1]
            restored = self.backend.restore(self.branches.first_id, state, partial=True)
            if restored and self.branches.remove(self.position(n_past)):
                self.uncommit(n_past)
                return True
            kept.states.pop()
        return False


def lacks_window(slot: Slot) -> bool:
    """Return True if cells of the sliding window before the next token are gone.

    A file of llama.cpp has only those of the window before its last token, and others of this memory may be used again;
    without them logits are wrong.
    """
    n_swa = slot.backend.n_swa
    if not n_swa or not slot.n_past:
        return False
    begin = slot.backend.begin(slot.branches.first_id)
    return begin < 0 or begin > max(0, slot.position(slot.n_past) - n_swa)


@dataclass(slots=True)
class BatchBuilder:
    """The tokens of a batch, of any number of slots. Plain lists: numpy is no faster for so few."""

    token: list[int] = field(default_factory=list)
    pos: list[int] = field(default_factory=list)
    first_id: list[int] = field(default_factory=list)
    n_ids: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def add_prompt(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Add the next tokens that a slot commits, without logits."""
        self._add(slot, tokens, slot.position(slot.n_past))

    def _add(self, slot: Slot, tokens: Sequence[int], begin: int) -> None:
        n = len(tokens)
        self.token += tokens
        self.pos += range(begin, begin + n)
        self.first_id += [slot.branches.first_id] * n
        self.n_ids += [slot.branches.n_attached] * n
        self.output += [0] * n

    def add_step(self, slot: Slot, tree: DraftTree, layout: Layout | None, n_before: int = 0) -> None:
        """Add the root, which is the next token of the text, and its draft, with the logits of each.

        Before them come the tokens that are evaluated again. `n_before`: tokens of the prompt that the batch has so
        far.
        """
        branches, begin = slot.branches, slot.position(slot.n_past + n_before)
        first_id = branches.first_id
        if slot.n_again:
            self._add(slot, slot.tokens[slot.n_past - slot.n_again : slot.n_past], begin - slot.n_again)
        if tree.n_leaves > branches.n_attached:
            branches.attach(tree.n_leaves, slot.position(slot.n_past))
        self.token.append(slot.tokens[slot.n_past + n_before])
        self.pos.append(begin)
        self.first_id.append(first_id)
        self.n_ids.append(branches.n_attached)
        self.output.append(1)
        if layout is not None:
            token, depth = tree.token, tree.depth
            self.token += [token[node] for node in layout.order]
            self.pos += [begin + depth[node] for node in layout.order]
            self.first_id += [first_id + layout.low[node] for node in layout.order]
            self.n_ids += [layout.count[node] for node in layout.order]
            self.output += [1] * len(layout.order)

    def load(self, batch: Batch) -> None:
        """Copy the tokens into `batch`. Raises ValueError if they do not fit."""
        batch.load(self.token, self.pos, self.first_id, self.n_ids, self.output)


def rebuild(slot: Slot, cut_back: bool) -> None:
    """Evaluate the committed tokens of a slot again, so that the cells hold them and no others.

    With `cut_back`, begin at the last position that the memory can be taken back to. Raises DecodeFailed; `n_past` is
    then less than before.
    """
    n_tokens = slot.n_past
    if cut_back:
        slot.rewind(n_tokens, broken_off=True)
    else:
        slot.clear()
    while slot.n_past < n_tokens:
        part = slot.tokens[slot.n_past : min(n_tokens, slot.n_past + slot.backend.n_batch)]
        if min(part) < 0:  # the sequence evaluates images, as parts of its prompt
            raise DecodeFailed(LOST, len(part))
        batch = BatchBuilder()
        batch.add_prompt(slot, part)
        batch.load(slot.backend.batch)
        if code := slot.backend.decode():
            raise DecodeFailed(code, len(part))
        slot.commit(len(part))


def count_cells(held: Iterable[tuple[Slot, int]]) -> int:
    """Count the cells that these slots hold with so many tokens each; shared cells count once."""
    ends: dict[tuple[int, int], int] = {}
    for slot, n_tokens in held:
        following = [*(begin for begin, _ in slot.runs[1:]), n_tokens]
        for run, end in zip(slot.runs, following, strict=True):
            if run[0] < n_tokens:
                ends[run] = max(min(end, n_tokens), ends.get(run, 0))
    return sum(end - begin for (begin, _), end in ends.items())
