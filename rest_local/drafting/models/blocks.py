"""Draft a block of tokens in one pass: DFlash, DFlash 2 and DSpark.

Such a drafter has keys and values of the target's features in its cells, one cell for each committed token. A pass
evaluates the root and mask tokens after it, which all attend to each other, and says what stands at each place of the
block. The cells of the root and the masks are dropped in the next step.

What is likely at a place depends on the kind:

- DFlash gives one distribution for each place, whatever stands before it.
- DFlash 2 has a selector: a few candidates for each place, scored for each candidate of the place before.
- DSpark has a Markov head: the distribution of a place follows the likeliest token of the place before.

So a block is told to the tree as what follows each candidate of the place before, and a path that leaves the
candidates has no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rest_local.drafting.models.drafter import BLOCK, CONFIDENT, TOP_K, Likely, likeliest
from rest_local.drafting.models.heads import Floats, HeadText, LayerHead, Rows
from rest_local.errors import OptionError
from rest_local.llama import features as states
from rest_local.llama.context import MAX_OUTPUTS, Context
from rest_local.llama.gguf import read_gguf
from rest_local.llama.model import Model

BLOCK_SIZE = 16  # The tokens of a block where the file does not say.

Block = list[dict[int, Sequence[Likely]]]
"""By depth, what is likely after a token that may stand there; after the root at depth 0."""


class DFlash(LayerHead):
    """A DFlash, DFlash 2 or DSpark drafter, which answers `depths` depths of a path in one pass."""

    name = "DFlash drafter"
    lag = 0

    def __init__(self, model: Model, target: Context, target_model: Model, n_texts: int) -> None:
        """Draft with `model`. Raises as `LayerHead`."""
        content = read_gguf(model.path, tensors=True)
        self.size = content.number("dflash.block_size", BLOCK_SIZE)
        self.mask = content.number("tokenizer.ggml.mask_token_id", -1)
        self.n_candidates = content.number("dflash.selector_top_k")  # Those of a selector for each place.
        self._is_causal = content.values.get("dflash.attention.causal") is True
        self._has_m_rope = content.number("dflash.rope.dimension_sections") > 0
        self._has_markov = "markov_w1.weight" in content.tensors
        # The root is the first place of a block if what stands after it is read there.
        reads_root = self._has_markov and content.values.get("dflash.sample_from_anchor") is not False
        self._first = 0 if reads_root else 1
        self.depths = self.size - self._first
        most = min(MAX_OUTPUTS, target.n_ctx)
        if not 1 < self.size <= most:
            raise OptionError(
                f"{self.name} {model.path}: its block has {self.size} tokens, and the context has room for 2 to "
                f"{most}; give a larger `n_ctx` or another drafter"
            )
        if not 0 <= self.mask < target_model.n_vocab:
            raise OptionError(
                f"{self.name} {model.path}: its mask token {self.mask} is not one of the model's "
                f"{target_model.n_vocab}; it belongs to another model"
            )
        if self.n_candidates and "selector_hidden.weight" not in content.tensors:
            raise OptionError(f"{self.name} {model.path}: it lacks its selector; get the file again")
        super().__init__(model, target, target_model, n_texts, n_features=0)

    def target_width(self, model: Model) -> int:
        """Return how many numbers of each layer it reads."""
        return model.n_embd

    def prepare(self, context: Context) -> None:
        """Let the tokens of a block attend to each other, and its context give the scores of a selector."""
        if not self._is_causal:
            states.attend_both_ways(context)
        if self.n_candidates:
            states.give_nextn(context, every_token=True)

    @property
    def pair_ms(self) -> float:
        """Return the milliseconds that each of many waiting features takes: less than a token of a block."""
        return self.times.further / self.size

    def text(self) -> BlockText:
        """Make a new, empty text, which keeps its sequence ids. Raises ValueError if none are left."""
        return BlockText(self, super().text().seq)

    def _evaluate(self, asked: Sequence[tuple[HeadText, tuple[int, ...]]]) -> tuple[int, int]:
        """Draft a block for each of these texts that has none in this step. Return how many, and 1 for one pass."""
        texts = [text for text in {id(text): text for text, _ in asked}.values() if text.passes(()) and text.can_ask]
        together = self.context.max_outputs // self.size
        for begin in range(0, len(texts), together):
            batch = Rows()
            for text in texts[begin : begin + together]:
                text.place_waiting(batch, text.n_waiting)
                batch.caught_up.append(text)
            if self.failed or not self._write(batch) or not self._draft(texts[begin : begin + together]):
                return 0, 0
        return len(texts), 1

    def _run(self, batch: Rows) -> bool:
        return self._write(batch)

    def _write(self, batch: Rows) -> bool:
        """Write the keys and values of features into the cells, and commit the texts whose features are all there."""
        for begin in range(0, len(batch.tokens), self.context.n_batch):
            part = slice(begin, begin + self.context.n_batch)
            positions = np.array(batch.positions[part], np.int32)
            if self._has_m_rope:
                positions = np.stack([positions, positions, positions, 0 * positions])
            if code := self.context.decode_rows(np.stack(batch.hidden[part]), positions, batch.seqs[part], 1):
                self._failed(batch, code)
                return False
        for text in batch.caught_up:
            text.commit_pending()
        return True

    def _draft(self, texts: Sequence[HeadText]) -> bool:
        """Evaluate a block for each text. False if that failed."""
        batch = Rows()
        for text in texts:
            assert isinstance(text, BlockText)
            text.place_block(batch)
        if code := self._decode(batch, _NO_FEATURES, not self.n_candidates):
            self._failed(batch, code)
            return False
        try:
            for number, text in enumerate(texts):
                assert isinstance(text, BlockText)
                text.block = self._read(number * self.size, text.root)
        except FloatingPointError as error:
            self.give_up(f"returned {error}")
            return False
        return True

    def _read(self, row: int, root: int) -> Block:
        """Read the block whose first token is in this row of the last batch. Raises FloatingPointError."""
        first, end = row + self._first, row + self.size
        if self.n_candidates:
            return _selected(states.nextn_rows(self.context, end, self.model.n_embd)[first:], self.n_candidates, root)
        places = [likeliest(logits) for logits in self.context.logits(end)[first:]]
        before = [[root], *([token for token, _ in likely] for likely in places)]
        return [
            dict.fromkeys(tokens[:1] if self._has_markov else tokens, likely)
            for tokens, likely in zip(before, places, strict=False)
        ]

    def try_pass(self, n: int) -> int:
        """Evaluate `n` blocks over nothing. See `Head`."""
        context, size = self.context, self.size
        zeros = np.zeros((n, self.width), np.float32)
        positions = np.zeros((4, n) if self._has_m_rope else n, np.int32)
        if code := context.decode_rows(zeros, positions, range(n), 1):
            return code
        together = context.max_outputs // size
        for begin in range(0, n, together):
            count = min(together, n - begin)
            seqs = [begin + number for number in range(count) for _ in range(size)]
            outputs = [int(not self.n_candidates)] * len(seqs)
            context.batch.load([self.mask] * len(seqs), [*range(1, 1 + size)] * count, seqs, [1] * len(seqs), outputs)
            if code := context.decode():
                return code
            for number in range(count):
                self._read(number * size, self.mask)
        return 0


_NO_FEATURES: Floats = np.zeros((BLOCK, 0), np.float32)


def _selected(rows: Floats, n: int, root: int) -> Block:
    """Read what a selector says: for each place `n` candidates, then their scores after each candidate before.

    `rows`: float32 [places, at least n + n * n]. Raises FloatingPointError for values that are not numbers.
    """
    candidates = rows[:, :n].astype(np.int64)
    scores = rows[:, n : n + n * n].reshape(-1, n, n).astype(np.float64)
    if not np.isfinite(rows[:, : n + n * n]).all():
        raise FloatingPointError("values that are not numbers")
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    order = np.argsort(-scores, axis=2, kind="stable")[:, :, :TOP_K]

    def after(place: int, before: int) -> list[Likely]:
        found = [(int(candidates[place, i]), float(shares[place, before, i])) for i in order[place, before]]
        return found[:1] if found[0][1] > CONFIDENT else found

    following: Block = [
        {int(token): after(place, before) for before, token in enumerate(candidates[place - 1])}
        for place in range(1, len(rows))
    ]
    return [{root: after(0, 0)}, *following]


class BlockText(HeadText):
    """The text of one slot in the cells of a block drafter. `block` is what it drafted in this step."""

    def __init__(self, drafter: DFlash, seq: int) -> None:
        """Begin an empty text, whose first sequence id is `seq`."""
        super().__init__(drafter, seq)
        self._drafter = drafter
        self.block: Block = []
        self.following = self.likely

    @property
    def root(self) -> int:
        """Return the newest token."""
        return int(self._text[-1])

    @property
    def can_ask(self) -> bool:
        """Return True if the features of all tokens before the root are known, and there is room for a block."""
        return super().can_ask and len(self._text) + self._drafter.size - 1 <= self._drafter.context.n_ctx

    def passes(self, path: Sequence[int]) -> int:
        """Return 1, whatever the depth, or 0 if the block of this step is known or ends before."""
        return int(not self.block and len(path) < self._drafter.depths)

    def likely(self, path: tuple[int, ...]) -> Sequence[Likely]:
        """Return what the block of this step has after a path; nothing beyond its end, or off its candidates."""
        block = self.block[: len(path) + 1]
        before = (self.root, *path)
        if len(block) < len(before) or not all(token in step for token, step in zip(before, block, strict=True)):
            return ()
        return block[-1][before[-1]]

    def place_block(self, batch: Rows) -> None:
        """Add the root and the masks after it to a pass."""
        tokens = [self.root] + [self._drafter.mask] * (self._drafter.size - 1)
        self._tips[self.seq] = ()
        for i, token in enumerate(tokens, len(self._text) - 1):
            batch.add(self, (), token, i, self.seq, _NO_FEATURES[0], own=False, wanted=False)

    def commit_pending(self) -> None:
        """Note that the waiting features are in the cells."""
        self._done = self._seen
        self._pending.clear()

    def _make_room(self, n: int) -> None:
        """Write the `n` oldest waiting features at once: 0.7% of what the model takes for their tokens (five layers'
        keys and values of a model of 64 layers), and a block sees all of a long prompt.
        """
        batch = Rows()
        self.place_waiting(batch, n)
        if self._drafter._run(batch):
            del self._pending[:n]
            self._done += n

    def _drop_drafted(self) -> None:
        """Free the cells of the block, and forget it."""
        super()._drop_drafted()
        self.block = []

    def reset(self, forget: bool = False) -> None:
        """Free all cells. See `HeadText`."""
        super().reset(forget)
        self.block = []
