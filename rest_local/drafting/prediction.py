"""Text that a request expects to see again, such as the old file of an edit: followed, lost and found again.

Contract: token ids in; rows out that continue the newest token, likeliest place first. While the answer follows the
prediction there is one row. After a divergence, `Alignment` keeps a probability for every place near it: a forward pass
of a hidden Markov model in which each token of the answer is either copied or new. `_anywhere` searches the rest of the
prediction for blocks that moved. `Rows.match` of a place is not a count of tokens here but a level of evidence, see
`_level`; the acceptance cells learn what each level is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rest_local.retrieval.packing import MAX_VOCABULARY
from rest_local.retrieval.rows import MAX_MATCH, Rows
from rest_local.retrieval.segment import Segment

START = 8  # level of evidence of the first place: most answers to an edit begin where the old text does
BEFORE, AFTER = 48, 400  # tokens around the divergence whose places get a probability
CERTAIN = 0.95  # probability from which a place is followed as the only one
MOVED = 4  # agreeing tokens from which a place outside the window is proposed
WIDEST = 4  # places proposed at once
LEAST = 0.08  # probability of a place that is worth proposing; of those below 2% were right

# From 996 changes in 100 edits of four Python repositories, aligned by a diff, in tokens of Qwen 2.
KEEP = 0.95  # chance that a copied token is followed by a copied one; no figure moved between 0.90 and 0.98
RESUME, RESUME_LATER, SOON = 0.25, 0.1, 4  # chance that a change ends after a new token: of the first SOON, later
SAME_LENGTH = 2.0  # how much likelier a change is that replaces as many tokens as it brings
# Share of the changes that replace 0 to 5 old tokens. The others, and steps backwards, share falling tails.
_SKIPPED = (0.266, 0.356, 0.114, 0.068, 0.061, 0.024)
_FURTHER, _BACKWARDS = 0.1, 0.01

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


def _skips() -> Float32:
    """Probability that a change skips d = -BEFORE .. AFTER old tokens, float32 [BEFORE + AFTER + 1]."""
    back = 1.0 / np.arange(BEFORE + 1, 1, -1)
    further = np.arange(len(_SKIPPED), AFTER + 1) ** -1.6
    parts = (_BACKWARDS * back / back.sum(), np.array(_SKIPPED), _FURTHER * further / further.sum())
    found: Float32 = np.concatenate(parts).astype(np.float32)
    return found


_SKIP = _skips()


class Alignment:
    """Where in `tokens` an answer continues that diverged at `at`: a probability for each place near it.

    Each token of the answer is new with probability 1 - RESUME while the change lasts, or copied from the place that
    the change skips to; after a copied token the next one is copied with probability KEEP. A new token is as likely as
    it is frequent in `tokens`. Cost: 8 us a token, 10 us for the places.
    """

    def __init__(self, tokens: Int32, at: int) -> None:
        self._tokens = tokens
        self.first = max(at - BEFORE, 0)
        self._window = tokens[self.first : at + AFTER]
        begin = self.first - at + BEFORE
        self._skip = _SKIP[begin : begin + len(self._window) + 1]
        self._copied: Float32 = np.zeros(len(self._window) + 1, np.float32)  # by the place of the next token
        self._new = 1.0  # that the change goes on
        self._at = at - self.first
        self._n_since = 0  # tokens of the answer since the divergence

    def extend(self, token: int) -> None:
        """One more token of the answer."""
        agree = self._window == token
        count = int(np.count_nonzero(self._tokens == token)) if agree.any() else 0
        chance = max(count / len(self._tokens), 1e-4)
        following = self._next()
        lost = float(self._copied.sum()) * (1.0 - KEEP)
        self._new = (self._new * (1.0 - self._resume) + lost) * chance
        self._copied[0] = 0.0
        np.multiply(following[:-1], agree, out=self._copied[1:])
        self._n_since += 1
        total = self._new + float(self._copied.sum())
        self._copied /= total
        self._new /= total

    def places(self) -> list[tuple[int, float]]:
        """(place in `tokens`, probability that the next token is copied from there), likeliest first."""
        following = self._next()
        best = np.argpartition(-following, min(WIDEST, len(following) - 1))[:WIDEST]
        found = [(self.first + int(i), float(following[i])) for i in best if following[i] >= LEAST]
        return sorted(found, key=lambda place: -place[1])

    @property
    def _resume(self) -> float:
        return RESUME if self._n_since <= SOON else RESUME_LATER

    def _next(self) -> Float32:
        """Probability by place that the next token is copied from there."""
        following = np.float32(self._resume * self._new) * self._skip
        same_length = self._at + self._n_since
        if same_length < len(following):
            following[same_length] *= SAME_LENGTH
        following += np.float32(KEEP) * self._copied
        found: Float32 = following
        return found


class Prediction:
    """Follow an answer along `tokens` (int32 [n], or any sequence of ids). 4 bytes a token, 11 once it was lost."""

    def __init__(self, tokens: Sequence[int] | Int32) -> None:
        self._tokens: Int32 = np.asarray(tokens, np.int32).reshape(-1)
        self._at = 0  # the token that should come next
        self._level = START  # of evidence for that; grows with each token that agrees
        self._diverged = 0  # where the answer left the prediction last
        self._alignment: Alignment | None = None  # while the place is uncertain
        self._pending: list[int] = []  # confirmed, not compared yet
        self._everywhere: Segment | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens of the answer that were confirmed. Compared when rows are asked for."""
        self._pending.extend(tokens)

    @property
    def follows(self) -> bool:
        """Whether the answer went along with the prediction when last compared, and there is more of it."""
        return self._alignment is None and self._at < len(self._tokens)

    def rows(self, context: Sequence[int], depth: int) -> Rows:
        """Up to WIDEST continuations after `context` (newest last). 10 us while it follows, 40 us while it is lost."""
        if not len(self._tokens):
            return Rows.empty(depth)
        self._compare()
        if self._alignment is None:
            return self._rows_at([(self._at, self._level)], depth)
        places = self._alignment.places()
        if not places or places[0][1] < 0.5:
            moved = self._anywhere(context)
            known = {place for place, _ in places}
            places += [place for place in moved if place[0] not in known]
        proposed = sorted(((place, _level(p)) for place, p in places), key=lambda place: -place[1])
        return self._rows_at(proposed[:WIDEST], depth)

    def _compare(self) -> None:
        """Go along with the pending tokens as far as they agree, or align them."""
        pending, self._pending = self._pending, []
        while pending:
            if self._alignment is None:
                agreed = self._agreed(pending)
                self._at += agreed
                self._level += agreed
                if agreed == len(pending):
                    return
                pending = pending[agreed:]
                self._diverged = self._at
                self._alignment = Alignment(self._tokens, self._at)
            self._alignment.extend(pending[0])
            pending = pending[1:]
            places = self._alignment.places()
            if places and places[0][1] >= CERTAIN * KEEP:
                self._at, self._level, self._alignment = places[0][0], START + 1, None

    def _agreed(self, said: Sequence[int]) -> int:
        """How many of these tokens the prediction has at the place where it is followed."""
        tokens = np.asarray(said, np.int32)
        expected = self._tokens[self._at : self._at + len(tokens)]
        differ = np.flatnonzero(tokens[: len(expected)] != expected)
        return int(differ[0]) if len(differ) else len(expected)

    def _anywhere(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Places in the whole prediction where at least MOVED tokens agree."""
        if self._everywhere is None:
            self._everywhere = Segment.of([self._tokens], MAX_VOCABULARY)
        found = self._everywhere.rows(context, WIDEST, 1)
        pairs = zip(found.positions.tolist(), found.match.tolist(), strict=True)
        return [(place, 1.0 - 1.0 / match) for place, match in pairs if match >= MOVED]

    def _rows_at(self, places: list[tuple[int, int]], depth: int) -> Rows:
        inside = [(place, level) for place, level in places if place < len(self._tokens)]
        continuations = np.full((len(inside), depth), -1, np.int32)
        for row, (place, _) in enumerate(inside):
            text = self._tokens[place : place + depth]
            continuations[row, : len(text)] = text
        match = np.array([min(level, MAX_MATCH) for _, level in inside], np.int32)
        return Rows(continuations, match, np.array([place for place, _ in inside], np.int64))


_LEVELS = {0.8: START, 0.6: 6, 0.4: 4, 0.2: 3}  # by least probability: the buckets of `candidates.LENGTHS` up to START


def _level(probability: float) -> int:
    """A place's level of evidence, 2..START. A place that is followed has more, one for each token that agreed."""
    return next((level for least, level in _LEVELS.items() if probability >= least), 2)
