"""More of llama.cpp's rules that draft without a model, for the same replay as `benchmarks.peers`.

- `ngram-map-k`: what followed an earlier occurrence of the newest 12 tokens, at most 48 tokens.
- `ngram-map-k4v`: the same, if one of the (at most four) continuations so far is twice as frequent as the others.
- `ngram-cache`: up to 8 tokens, each the most frequent one after the newest 4, 3, 2 or 1 tokens.

The rules were read in llama.cpp's `common` folder and have its default parameters, without cache files. Each request
has a state of its own, as in a new server. tests/data/peer-counts.json holds what the program itself drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import pack

from benchmarks.peers import Peer, chain
from rest_local.drafting.tree import Draft, DraftTree
from rest_local.planning.policy import StepCost


@dataclass
class _Key:
    """A 12-gram. For each continuation it has where it was first seen, how often, and the length of its next draft."""

    begins: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    counted_to: int = 0


class NgramMapK(Peer):
    """A peer that drafts what followed the indexed occurrence of the newest 12 tokens.

    A key's next draft is as long as the accepted part of its last one, so a key whose draft was wrong at once is not
    used again. The index keeps one position for each hash. When a request drafts for the first time, the prompt is
    searched from its end, and then indexed in this order. The last 60 positions of the prompt never enter.
    """

    name = "ngram-map-k"
    GRAM, TOKENS, SLOTS = 12, 48, 2**18
    HASH = 2654435761

    def __init__(self, history: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(history)
        self._forget(0)

    def _forget(self, n_prompt: int) -> None:
        self._n_prompt, self._indexed = n_prompt, 0
        self._slots: dict[int, int] = {}
        self._keys: dict[tuple[int, ...], _Key] = {}
        self._used: tuple[_Key, int] | None = None

    def restart(self, tokens: Sequence[int]) -> None:
        super().restart(tokens)
        self._forget(len(tokens))

    def propose(self, limit: int) -> DraftTree:
        self._used = None
        known = len(self.tokens) - 1  # The original does not count the sampled token.
        if known < 2 * self.GRAM + self.TOKENS:
            return chain([])
        last = known - self.GRAM - self.TOKENS - 1
        at = self._indexed_match(last) or self._search(self._in_prompt()) or self._search(self._after_prompt(last))
        for part in (self._in_prompt(), self._after_prompt(last)):
            for position in reversed(part):
                self._slots.setdefault(self._slot(position), position)
        self._indexed = max(self._indexed, last)
        if not at:
            return chain([])
        key = self._keys.setdefault(tuple(self.tokens[-self.GRAM :]), _Key())
        number = self._continuation(key, at)
        if number is None:
            return chain([])
        self._used = key, number
        begin = at + self.GRAM
        return chain(self.tokens[begin : begin + key.lengths[number]][:limit])

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        if len(drafted.tree) and self._used is not None:
            key, number = self._used
            key.lengths[number] = done.n_accepted

    def _continuation(self, key: _Key, at: int) -> int | None:
        """Return the continuation of the key to draft, or None for no draft."""
        if not key.lengths:
            key.lengths.append(self.TOKENS)
        return 0

    def _in_prompt(self) -> range:
        """Return the positions of the prompt that are not indexed."""
        return range(self._indexed + 1, max(self._n_prompt - self.GRAM - self.TOKENS, self._indexed + 1))

    def _after_prompt(self, last: int) -> range:
        """Return the positions after the prompt that are not indexed."""
        begin = max(self._n_prompt, self._indexed) + 1
        return range(begin, max(last + 1, begin))

    def _indexed_match(self, last: int) -> int:
        """Return the indexed position of the newest 12 tokens before `last`, or 0."""
        newest = self.tokens[-self.GRAM :]
        at = self._slots.get(self._hash(newest), 0)
        return at if 0 < at < last and self.tokens[at : at + self.GRAM] == newest else 0

    def _search(self, positions: range) -> int:
        """Return the last of the positions where the newest 12 tokens begin, or 0."""
        newest = pack(f"<{self.GRAM}i", *self.tokens[-self.GRAM :])
        low, high = 4 * positions.start, 4 * (positions.stop - 1 + self.GRAM)
        while positions and (at := self._bytes.rfind(newest, low, high)) >= 0:
            if at % 4 == 0:
                return at // 4
            high = at + len(newest) - 1
        return 0

    def _slot(self, position: int) -> int:
        return self._hash(self.tokens[position : position + self.GRAM])

    def _hash(self, gram: Sequence[int]) -> int:
        value = 0
        for token in gram:
            value = (value * self.HASH + token) & 0xFFFFFFFF
        return value % self.SLOTS


class NgramMapK4v(NgramMapK):
    """A peer that counts up to four continuations of 48 tokens for each key.

    The most frequent one is drafted only if it is at least twice as frequent as all others together. The draft itself
    comes from the occurrence that was found.
    """

    name = "ngram-map-k4v"
    VALUES = 4

    def _continuation(self, key: _Key, at: int) -> int | None:
        newest = self.tokens[-self.GRAM :]
        for position in range(key.counted_to, at + 1):  # The original counts the last one again.
            if self.tokens[position] == newest[0] and self.tokens[position : position + self.GRAM] == newest:
                self._count(key, position + self.GRAM)
        key.counted_to = at
        best = max(range(len(key.counts)), key=key.counts.__getitem__)
        others = sum(key.counts) - key.counts[best]
        return None if others and key.counts[best] < 2 * others else best

    def _count(self, key: _Key, begin: int) -> None:
        text = self.tokens[begin : begin + self.TOKENS]
        for number, first in enumerate(key.begins):
            if self.tokens[first : first + self.TOKENS] == text:
                key.counts[number] += 1
                return
        if len(key.begins) < self.VALUES:
            key.begins.append(begin)
            key.counts.append(1)
            key.lengths.append(self.TOKENS)


class NgramCache(Peer):
    """A peer that counts what follows each 1 to 4 tokens, and drafts the most frequent token if it is frequent enough.

    Text enters it in the parts that come between two drafts, each counted by itself. So answers that grow by one token
    at a time add nothing. Among equally frequent tokens the one that was first seen last is drafted. The original has
    the order of its hash table.
    """

    name = "ngram-cache"
    GRAM, TOKENS = 4, 8
    LEAST = (2, 2, 1, 1)
    """By length of the n-gram: how often it has to have occurred."""
    PERCENT = (66, 50, 50, 50)
    """And the least share of the most frequent token."""

    def __init__(self, history: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(history)
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._entered = 0

    def restart(self, tokens: Sequence[int]) -> None:
        super().restart(tokens)
        self._counts, self._entered = {}, 0

    def propose(self, limit: int) -> DraftTree:
        part = self.tokens[self._entered :]
        self._entered = len(self.tokens)
        for gram in range(1, self.GRAM + 1):
            for end in range(gram, len(part)):
                after = self._counts.setdefault(tuple(part[end - gram : end]), {})
                after[part[end]] = after.get(part[end], 0) + 1
        text = self.tokens[-self.GRAM :]
        drafted: list[int] = []
        while len(drafted) < self.TOKENS and (token := self._likely(text)) is not None:
            drafted.append(token)
            text = [*text, token][-self.GRAM :]
        return chain(drafted[:limit])

    def _likely(self, text: Sequence[int]) -> int | None:
        for gram in range(min(self.GRAM, len(text)), 0, -1):
            counts = self._counts.get(tuple(text[-gram:]), {})
            total = sum(counts.values())
            if not counts or total < self.LEAST[gram - 1]:
                continue
            token, count = max(reversed(counts.items()), key=lambda item: item[1])
            if 100 * count >= self.PERCENT[gram - 1] * total:
                return token
        return None
