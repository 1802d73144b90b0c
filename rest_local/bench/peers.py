"""The peers' rules, for comparison in the same replay: what other runtimes draft without a model.

Contract: a `Peer` is both what is asked (it follows the sequence as `Lookup` does) and who decides (a `Policy`), so one
replay drives it like any policy. The rules are written after the behaviour of the original programs, with their
default parameters; none has a cost gate, and each drafts one chain:

- `prompt-lookup`: llama-cpp-python `LlamaPromptLookupDecoding`, 2-grams, 10 tokens, the earliest match.
- `ngram-simple`: llama.cpp `--spec-type ngram-simple`, 12-grams, 48 tokens, the latest match.
- `ngram-mod`: llama.cpp `--spec-type ngram-mod`, a hash table of 24-grams shared by all requests, 48 to 64 tokens.

ArcticInference's own code is run by `rest_local.bench.arctic` where it is installed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from struct import pack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rest_local.drafting.candidates import SOURCE_NUMBER, SourceRows
from rest_local.drafting.drafter import Draft
from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.planning.policy import Stateless, StepContext, StepCost


class Peer(Stateless):
    """Keeps the sequence and proposes a tree at its end. `history`: earlier answers, for peers that can use them."""

    name = "peer"
    draft_sequence = None  # no draft model

    def __init__(self, history: Sequence[Sequence[int]] = ()) -> None:
        self.tokens: list[int] = []
        self._bytes = bytearray()  # the same, 4 bytes each: searched at the speed of memory

    def propose(self, limit: int) -> DraftTree:
        """What would be drafted at the end of `tokens`: at most `limit` nodes. Each peer has its own."""
        raise NotImplementedError

    def restart(self, tokens: Sequence[int]) -> None:
        """A new request and its prompt."""
        self.tokens, self._bytes = [], bytearray()
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were confirmed."""
        self.tokens.extend(tokens)
        self._bytes += pack(f"<{len(tokens)}i", *tokens)

    def predict(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """The peers know no prediction; the text is in the prompt as well."""

    def rows(self, *_: Any, **__: Any) -> list[SourceRows]:
        """None: a peer is asked for its draft only."""
        return []

    def repeats(self, n: int = 8) -> bool:
        return False

    def begin(self, n_ctx: int) -> None:
        """Nothing to prepare; `restart` has the tokens."""

    def draft(self, sources: object, at: StepContext) -> Draft:
        """As `Policy.draft`; `sources` is this peer itself."""
        begun = time.perf_counter()
        tree = self.propose(at.limit)
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        """Most peers learn nothing from what was accepted."""

    def find(self, gram: int, *, latest: bool, end: int) -> int:
        """Where the newest `gram` tokens stand within the first `end` tokens: an index, -1 for nowhere."""
        newest = bytes(self._bytes[-4 * gram :])
        search = self._bytes.rfind if latest else self._bytes.find
        low, high = 0, 4 * end
        while (at := search(newest, low, high)) >= 0 and at % 4:
            low, high = (low, at + len(newest) - 1) if latest else (at + 1, high)
        return at // 4 if at >= 0 else -1


def chain(tokens: Sequence[int]) -> DraftTree:
    """The tree of one branch."""
    tree = DraftTree(max_leaves=1)
    node = ROOT
    for token in tokens:
        node = tree.add(token, node, 1.0, SOURCE_NUMBER["context"])
    return tree


class PromptLookup(Peer):
    """What followed the newest 2 tokens (else the newest token) where they stood first."""

    name = "prompt-lookup"
    GRAM, TOKENS = 2, 10

    def propose(self, limit: int) -> DraftTree:
        length = len(self.tokens)
        for gram in range(min(self.GRAM, length - 1), 0, -1):
            at = self.find(gram, latest=False, end=length - 1)
            if at >= 0:
                return chain(self.tokens[at + gram : at + gram + min(self.TOKENS, limit)])
        return chain([])


class NgramSimple(Peer):
    """What followed the newest 12 tokens where they stood last: 48 tokens, not fewer than 12, never from position 0."""

    name = "ngram-simple"
    GRAM, TOKENS = 12, 48

    def propose(self, limit: int) -> DraftTree:
        known = len(self.tokens) - 1  # the original keeps the sampled token apart
        if known <= self.GRAM + self.TOKENS + 1:
            return chain([])
        at = self.find(self.GRAM, latest=True, end=known - 1)
        end = min(at + self.GRAM + self.TOKENS, known)
        if at <= 0 or end - (at + self.GRAM) < self.GRAM:
            return chain([])
        return chain(self.tokens[at + self.GRAM : end][:limit])


class NgramMod(Peer):
    """A table from the hash of 24 tokens to the token that followed them last, filled by every request.

    Tokens enter it 32 at a time; fewer than 48 known tokens in a row are not drafted. Five drafts in a row of which
    less than a quarter was accepted empty it but for the request; a request that begins with more than a quarter of it
    in use empties it with its own prompt, as the original does.
    """

    name = "ngram-mod"
    GRAM, LEAST, MOST, CHUNK = 24, 48, 64, 32
    SLOTS = 4 * 2**20
    FAILED, FAILURES = 0.25, 5
    HASH, MASK = 6364136223846793005, 2**64 - 1

    def __init__(self, history: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(history)
        self._table: dict[int, int] = {}
        self._entered = 0
        self._failures = 0
        for answer in history:
            self._enter(answer, 0, len(answer) - self.GRAM)

    def restart(self, tokens: Sequence[int]) -> None:
        super().restart(tokens)
        known = len(tokens)
        self._entered = max(known - self.GRAM, 0)
        self._enter(tokens, 0, self._entered)
        if len(self._table) > self.SLOTS // 4:
            self._table.clear()

    def propose(self, limit: int) -> DraftTree:
        known = len(self.tokens) - 1
        if known < self.GRAM:
            return chain([])
        if self._entered + self.CHUNK < known:
            self._enter(self.tokens, self._entered, known - self.GRAM)
            self._entered = known - self.GRAM
        text = self.tokens[-self.GRAM :]
        while len(text) < self.GRAM + self.MOST:
            token = self._table.get(self._slot(text[-self.GRAM :]))
            if token is None:
                break
            text.append(token)
        found = text[self.GRAM :]
        return chain(found[:limit] if len(found) >= self.LEAST else [])

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        if not len(drafted.tree):
            return
        failed = done.n_accepted < self.FAILED * len(drafted.tree)
        self._failures = self._failures + 1 if failed else 0
        if self._failures == self.FAILURES:
            self._table.clear()
            self._failures = self._entered = 0

    def _enter(self, tokens: Sequence[int], begin: int, end: int) -> None:
        for i in range(begin, end):
            self._table[self._slot(tokens[i : i + self.GRAM])] = tokens[i + self.GRAM]

    def _slot(self, gram: Sequence[int]) -> int:
        value = 0
        for token in gram:
            value = (value * self.HASH + token) & self.MASK
        return value % self.SLOTS


PEERS: tuple[type[Peer], ...] = (PromptLookup, NgramSimple, NgramMod)
