"""Align an answer with text that the request expects in it, such as the old file of an edit.

Token ids go in; rows that continue the newest token come out, the likeliest place first. While the answer
follows the prediction there is one row. After a divergence, `Alignment` keeps a probability for every place near it:
the forward pass of a hidden Markov model in which each token of the answer is either copied or new. `_anywhere`
searches the rest of the prediction for blocks that moved. `Rows.match` is not a count of tokens here but a level of
evidence (see `_level`); the acceptance cells learn the acceptance rate of each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from rest_local.llama.placeholders import common_prefix
from rest_local.retrieval.rows import MAX_MATCH, MAX_VOCABULARY, Rows
from rest_local.retrieval.segment import Segment

START = 8  # The level of evidence of the first place. Most answers to an edit begin like the old text.
WINDOW = 400  # Places up to so many tokens before and after the divergence get a probability.
MAX_PLACES = 4  # Places that are proposed at once.
MIN_PROBABILITY = 0.02  # A place, or a node of the tree, below this probability paid on no measured cost curve.

# From 996 changes in 100 edits of four Python repositories, aligned by a diff, in tokens of Qwen 2.
# The probability that a copied token follows a copied one, and from which on a place is followed as the only one. No
# figure moved between 0.90 and 0.98.
KEEP = 0.95
RESUME = 0.15  # The probability that a change ends at a token.
# Share of the changes that replace 0 to 5 old tokens. Longer changes and steps backwards have decreasing tails.
_SKIPPED = (0.266, 0.356, 0.114, 0.068, 0.061, 0.024)

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


def _skips() -> Float32:
    """Return the probability that a change skips d = -WINDOW .. WINDOW old tokens, float32 [2 WINDOW + 1].

    A tenth of what _SKIPPED leaves goes back.
    """
    rest = 1.0 - sum(_SKIPPED)
    back = 1.0 / np.arange(WINDOW + 1, 1, -1)
    further = np.arange(len(_SKIPPED), WINDOW + 1) ** -1.6
    parts = (0.1 * rest * back / back.sum(), np.array(_SKIPPED), 0.9 * rest * further / further.sum())
    found: Float32 = np.concatenate(parts).astype(np.float32)
    return found


_SKIP = _skips()


class Alignment:
    """The probability of each place near `at` in `tokens` that an answer, which diverged at `at`, continues there.

    During a change each token of the answer is new with probability 1 - RESUME, or copied from the place that the
    change skips to. After a copied token the next one is copied with probability KEEP. The probability of a new token
    is its frequency in `tokens`. Cost: 8 us for a token, 10 us for the places.
    """

    def __init__(self, tokens: Int32, at: int) -> None:
        self._tokens = tokens
        self.first = max(at - WINDOW, 0)
        self._window = tokens[self.first : at + WINDOW]
        begin = self.first - at + WINDOW
        self._skip = _SKIP[begin : begin + len(self._window) + 1]
        # The probability of each place for the next token, and that the change continues.
        self._copied: Float32 = np.zeros(len(self._window) + 1, np.float32)
        self._new = 1.0

    def extend(self, token: int) -> None:
        """Add one token of the answer."""
        agree = self._window == token
        count = int(np.count_nonzero(self._tokens == token)) if agree.any() else 0
        chance = max(count / len(self._tokens), 1e-4)
        following = self._next()
        lost = float(self._copied.sum()) * (1.0 - KEEP)
        self._new = (self._new * (1.0 - RESUME) + lost) * chance
        self._copied[0] = 0.0
        np.multiply(following[:-1], agree, out=self._copied[1:])
        total = self._new + float(self._copied.sum())
        self._copied /= total
        self._new /= total

    def fork(self) -> Alignment:
        """Make an independent one in the same state."""
        other = copy(self)
        other._copied = self._copied.copy()
        return other

    def places(self) -> list[tuple[int, float]]:
        """Return (place in `tokens`, probability that the next token is copied from it), the likeliest first."""
        following = self._next()
        best = np.argpartition(-following, min(MAX_PLACES, len(following) - 1))[:MAX_PLACES]
        found = [(self.first + int(i), float(following[i])) for i in best if following[i] >= MIN_PROBABILITY]
        return sorted(found, key=lambda place: -place[1])

    def _next(self) -> Float32:
        """Return for each place the probability that the next token is copied from it."""
        following: Float32 = np.float32(RESUME * self._new) * self._skip
        following += np.float32(KEEP) * self._copied
        return following


class Prediction:
    """Text that an answer is expected to follow.

    It takes 4 bytes for a token, and 11 after the first search of the whole prediction.
    """

    def __init__(self, tokens: Sequence[int] | Int32, at: int = 0, level: int = START) -> None:
        """Expect `tokens` from index `at` on, with evidence of this level."""
        self.tokens: Int32 = np.asarray(tokens, np.int32).reshape(-1)
        self._at = at
        self.level = level  # The level of evidence grows with each token that agrees.
        self._alignment: Alignment | None = None  # It is set while the place is uncertain.
        self._pending: list[int] = []  # Accepted tokens that were not compared yet.
        self._everywhere: Segment | None = None

    def fork(self) -> Prediction:
        """Make an independent one in the same state. It takes 3 us."""
        other = copy(self)
        other._pending = self._pending[:]
        other._alignment = self._alignment and self._alignment.fork()
        return other

    def extend(self, tokens: Sequence[int]) -> None:
        """Add accepted tokens of the answer. They are compared when `rows` is called."""
        self._pending.extend(tokens)

    def append(self, tokens: Sequence[int] | Int32, keep: int) -> None:
        """Replace what follows the first `keep` tokens. The place must be before them."""
        self.tokens = np.concatenate([self.tokens[:keep], np.asarray(tokens, np.int32)])
        self._everywhere = None

    @property
    def place(self) -> int:
        """Return the index of the token that is expected next, or that was where the answer diverged."""
        return self._at

    @property
    def left(self) -> int:
        """Count the tokens from there on."""
        return len(self.tokens) - self._at

    @property
    def follows(self) -> bool:
        """Return True if the answer followed at the last comparison, and there are more tokens."""
        return self._alignment is None and self._at < len(self.tokens)

    def catch_up(self) -> bool:
        """Compare all tokens that were added. Returns True if the answer follows."""
        self._compare()
        return self.follows

    def rows(self, context: Sequence[int], depth: int) -> Rows:
        """Return up to MAX_PLACES continuations after `context`, in 10 us while the answer follows, else in 40 us."""
        if not len(self.tokens):
            return Rows.empty(depth)
        self._compare()
        if self._alignment is None:
            return self._rows_at([(self._at, self.level)], depth)
        places = self._alignment.places()
        if not places or places[0][1] < 0.5:
            moved = self._anywhere(context)
            known = {place for place, _ in places}
            places += [place for place in moved if place[0] not in known]
        proposed = sorted(((place, _level(p)) for place, p in places), key=lambda place: -place[1])
        return self._rows_at(proposed[:MAX_PLACES], depth)

    def _compare(self) -> None:
        """Follow the pending tokens while they agree, then align the rest."""
        pending, self._pending = self._pending, []
        if not len(self.tokens):
            return
        while pending:
            if self._alignment is None:
                agreed = common_prefix(pending, self.tokens[self._at : self._at + len(pending)])
                self._at += agreed
                self.level += agreed
                if agreed == len(pending):
                    return
                pending = pending[agreed:]
                self._alignment = Alignment(self.tokens, self._at)
            self._alignment.extend(pending[0])
            pending = pending[1:]
            places = self._alignment.places()
            if places and places[0][1] >= KEEP * KEEP:
                self._at, self.level, self._alignment = places[0][0], START + 1, None

    def _anywhere(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Find places in the whole prediction at which tokens agree, the most first."""
        if self._everywhere is None:
            self._everywhere = Segment.of([self.tokens], MAX_VOCABULARY)
        found = self._everywhere.rows(context, MAX_PLACES, 1)
        pairs = zip(found.positions.tolist(), found.match.tolist(), strict=True)
        return [(place, 1.0 - 1.0 / match) for place, match in pairs]

    def _rows_at(self, places: list[tuple[int, int]], depth: int) -> Rows:
        """Make rows that begin at these places, each with its level."""
        inside = [(place, level) for place, level in places if place < len(self.tokens)]
        continuations = np.full((len(inside), depth), -1, np.int32)
        for row, (place, _) in enumerate(inside):
            text = self.tokens[place : place + depth]
            continuations[row, : len(text)] = text
        match = np.array([min(level, MAX_MATCH) for _, level in inside], np.int32)
        return Rows(continuations, match, np.array([place for place, _ in inside], np.int64))


def _level(probability: float) -> int:
    """Return the level of evidence of an uncertain place, 2..START. One that is followed gains one for each token."""
    return max(2, int(START * probability))
