"""The rules by which other runtimes draft without a model, for comparison in the same replay.

A `Peer` is both the source (`Lookup`) and the policy (`Policy`), so a replay runs it like any policy. The rules follow
the behaviour of the original programs with their default parameters. None considers cost, and each drafts one chain:

- `prompt-lookup`: llama-cpp-python `LlamaPromptLookupDecoding`, 2-grams, 10 tokens, the earliest match.
- `ngram-simple`: llama.cpp `--spec-type ngram-simple`, 12-grams, 48 tokens, the latest match.
- `ngram-mod`: llama.cpp `--spec-type ngram-mod`, a hash table of 24-grams shared by all requests, 48 to 64 tokens.

`Arctic` runs ArcticInference's suffix decoding by its own code, if that package is installed. Its local tree holds the
request, and its global tree holds the earlier answers that all sides have. Answers under test are removed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from struct import pack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.curves import load_curve
from benchmarks.recorded import Workload
from benchmarks.replay import replay
from rest_local.drafting.models.drafter import DraftText
from rest_local.drafting.sources import SOURCE_NUMBER, SourceRows
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.planning.policy import Policy, StepContext, StepCost

ARCTIC_MODULE = "arctic_inference.suffix_decoding"
ARCTIC_REQUEST = -1  # The id of the request under test.
ARCTIC_VARIANTS: tuple[dict[str, Any], ...] = ({}, *({"factor": factor, "tree": True} for factor in (1.0, 2.0, 4.0)))
"""Its default, and its tree at three lengths: the points that docs/DESIGN.md section 5 compares with."""


class Peer(Policy):
    """A peer that keeps the sequence and proposes a tree at its end. Some use `history`, the earlier answers."""

    name = "peer"
    draft_text: DraftText | None = None

    def __init__(self, history: Sequence[Sequence[int]] = ()) -> None:
        self.tokens: list[int] = []
        self._bytes = bytearray()  # The same tokens, with 4 bytes each, for a fast search.

    def propose(self, limit: int) -> DraftTree:
        """Draft at most `limit` nodes at the end of `tokens`, by the rule of the peer."""
        raise NotImplementedError

    def restart(self, tokens: Sequence[int]) -> None:
        """Start a new request with its prompt."""
        self.tokens, self._bytes = [], bytearray()
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add confirmed tokens."""
        self.tokens.extend(tokens)
        self._bytes += pack(f"<{len(tokens)}i", *tokens)

    def predict(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Do nothing: the peers use no prediction, and its text is in the prompt too."""

    def rows(self, *_: Any, **__: Any) -> list[SourceRows]:
        """Return no rows, because a peer only drafts."""
        return []

    def rows_after(self, *_: object, **__: object) -> list[SourceRows]:
        return []

    def repeats(self, n: int = 8) -> bool:
        return False

    def draft(self, sources: object, at: StepContext) -> Draft:
        """See `Policy.draft`; `sources` is this peer itself."""
        begun = time.perf_counter()
        tree = self.propose(at.limit)
        return Draft(tree, lookup_us=1e6 * (time.perf_counter() - begun))

    def find(self, gram: int, *, latest: bool, end: int) -> int:
        """Return the index of the newest `gram` tokens within the first `end` tokens, or -1."""
        newest = bytes(self._bytes[-4 * gram :])
        search = self._bytes.rfind if latest else self._bytes.find
        low, high = 0, 4 * end
        while (at := search(newest, low, high)) >= 0 and at % 4:
            low, high = (low, at + len(newest) - 1) if latest else (at + 1, high)
        return at // 4 if at >= 0 else -1


def chain(tokens: Sequence[int]) -> DraftTree:
    """Return a tree of one branch."""
    tree = DraftTree(max_leaves=1)
    node = ROOT
    for token in tokens:
        node = tree.add(token, node, 1.0, SOURCE_NUMBER["context"])
    return tree


class PromptLookup(Peer):
    """A peer that drafts what followed the first occurrence of the newest 2 tokens, else of the newest token."""

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
    """A peer that drafts the 12 to 48 tokens after the last occurrence of the newest 12, never from position 0."""

    name = "ngram-simple"
    GRAM, TOKENS = 12, 48

    def propose(self, limit: int) -> DraftTree:
        known = len(self.tokens) - 1  # The original does not count the sampled token.
        if known <= self.GRAM + self.TOKENS + 1:
            return chain([])
        at = self.find(self.GRAM, latest=True, end=known - 1)
        end = min(at + self.GRAM + self.TOKENS, known)
        if at <= 0 or end - (at + self.GRAM) < self.GRAM:
            return chain([])
        return chain(self.tokens[at + self.GRAM : end][:limit])


class NgramMod(Peer):
    """A table from the hash of 24 tokens to the token that followed them last, shared by all requests.

    - Tokens enter it 32 at a time. Fewer than 48 known tokens in a row are not drafted.
    - After five drafts in a row with less than a quarter accepted, it is cleared and filled again from the request.
    - If more than a quarter of it is in use when a request starts, it is cleared with the prompt in it, as in the
      original.
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
            self.forget()

    def forget(self) -> None:
        """Clear the table."""
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


def why_no_arctic() -> str | None:
    """Return why ArcticInference cannot be used, or None if it can."""
    try:
        import_module(ARCTIC_MODULE)
    except ImportError as error:
        return f"ArcticInference cannot be imported ({error}); pip install arctic-inference"
    return None


class Arctic(Peer):
    """ArcticInference. `factor` is the largest length of a draft relative to the match, `least` the least
    probability.
    """

    def __init__(
        self, history: Sequence[Sequence[int]] = (), *, factor: float = 1.0, least: float = 0.1, tree: bool = False
    ) -> None:
        super().__init__(history)
        self.name = f"arctic-{'tree' if tree else 'chain'}-{factor:g}x-{least:g}"
        self._options: dict[str, Any] = {"max_spec_factor": factor, "min_token_prob": least, "use_tree_spec": tree}
        self._cache = import_module(ARCTIC_MODULE).SuffixDecodingCache()
        for number, answer in enumerate(history):
            self._cache.start_request(number, [])
            self._cache.add_active_response(number, list(answer))
            self._cache.stop_request(number)

    def restart(self, tokens: Sequence[int]) -> None:
        if ARCTIC_REQUEST in self._cache.active_requests:
            self._cache.stop_request(ARCTIC_REQUEST)
            self._cache.evict_cached_response(ARCTIC_REQUEST)
        self._cache.start_request(ARCTIC_REQUEST, list(tokens))
        self.tokens = list(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self._cache.add_active_response(ARCTIC_REQUEST, list(tokens))

    def propose(self, limit: int) -> DraftTree:
        context = self.tokens[-self._cache.max_tree_depth :]
        found = self._cache.speculate(ARCTIC_REQUEST, context, max_spec_tokens=limit, **self._options)
        tree = DraftTree(max_leaves=max(len(found.token_ids), 1))
        for token, parent, probability in zip(found.token_ids, found.parents, found.probs, strict=True):
            tree.add(token, parent, probability, SOURCE_NUMBER["context"])
        return tree


def compare_peers(workload: Workload, curves: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the speed-up of each peer by curve, from a cold start, without the time of its lookups.

    "mat" and "nodes" are its tokens and drafted nodes a pass, which do not depend on the curve.
    """
    earlier = workload.earlier or []
    makers: list[Callable[[], Peer]] = [partial(kind, earlier) for kind in PEERS]
    if why_no_arctic() is None:
        makers += [partial(Arctic, earlier, **options) for options in ARCTIC_VARIANTS]
    report = {}
    for make in makers:
        found: dict[str, float] = {}
        for curve in curves:
            peer = make()
            tally = replay(workload.tested, partial(_itself, peer), peer, load_curve(curve))
            row = tally.to_dict()
            found |= {curve: round(tally.speedup, 4), "mat": row["mat"], "nodes": row["nodes_per_step"]}
            report[peer.name] = found
    return report


def _itself(peer: Peer) -> Peer:
    return peer
