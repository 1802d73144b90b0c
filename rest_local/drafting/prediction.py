"""Text that a request expects to see again, such as the old file of an edit: followed, lost and found again.

Contract: token ids in; rows out that continue the newest token, best alignment first. While the answer follows the
prediction there is one row, with as many tokens of match as have agreed so far. Where they part, the place is found
again by itself: by the newest tokens near the place, then anywhere, and meanwhile by guessing that one token was
replaced or that something was put in. Knows nothing about probabilities: what such a guess is worth shows in the
acceptance of short matches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rest_local.retrieval.packing import MAX_VOCABULARY
from rest_local.retrieval.rows import MAX_MATCH, Rows
from rest_local.retrieval.segment import Segment

START = 8  # tokens of match that the beginning counts as: most answers to an edit begin where the old text does
BEHIND, AHEAD = 48, 400  # tokens around the place of parting that are searched first
SURE = 3  # tokens of match from which a place is taken without a guess beside it
WIDEST = 4  # places proposed at once

Int32 = NDArray[np.int32]


class Prediction:
    """Follow an answer along `tokens` (int32 [n], or any sequence of ids). 4 bytes a token, 11 once it was lost."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: Int32 = np.asarray(tokens, np.int32).reshape(-1)
        self._at = 0  # the token that should come next
        self._run = START  # tokens before it that agreed; 0: lost
        self._parted = 0  # where the answer left the prediction
        self._pending: list[int] = []  # confirmed, not compared yet
        self._everywhere: Segment | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens of the answer that were confirmed. Compared when rows are asked for."""
        self._pending.extend(tokens)

    @property
    def follows(self) -> bool:
        """Whether the answer went along with the prediction when last compared, and there is more of it."""
        return self._run >= START and self._at < len(self._tokens)

    def rows(self, context: Sequence[int], depth: int) -> Rows:
        """Up to WIDEST continuations after `context` (newest last). 10 us while it follows, 50 us while it is lost."""
        if not len(self._tokens):
            return Rows.empty(depth)
        self._compare()
        if self._run:
            return self._rows_at([(self._at, self._run)], depth)
        places = self._near(context) or self._anywhere(context)
        if places:
            self._at, self._run = places[0]  # taken for true until the next token disagrees
        if not places or places[0][1] < SURE:
            known = {place for place, _ in places}
            guesses = [(self._parted + 1, 1), (self._parted, 1)]  # one token replaced; something put in
            places = [*places, *(guess for guess in guesses if guess[0] not in known)]
        return self._rows_at(places[:WIDEST], depth)

    def _compare(self) -> None:
        """Go along with the pending tokens as far as they agree."""
        pending = self._pending
        if not pending:
            return
        said = np.asarray(pending, np.int32)
        expected = self._tokens[self._at : self._at + len(said)]
        differ = np.flatnonzero(said[: len(expected)] != expected)
        agreed = int(differ[0]) if len(differ) else len(expected)
        self._at += agreed
        if agreed == len(said):
            self._run += agreed
        else:
            if self._run + agreed >= SURE:  # a place taken on fewer tokens was a guess, and is not where it was left
                self._parted = self._at
            self._run = 0
        pending.clear()

    def _near(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """(place, match) near the parting, longest match first and then nearest; empty where no token agrees."""
        first = max(self._parted - BEHIND, 0)
        window = self._tokens[first : self._parted + AHEAD]
        at = np.flatnonzero(window == context[-1]) + 1  # the place behind a token that agrees
        if not len(at):
            return []
        match = np.ones(len(at), np.int64)
        for back in range(2, min(len(context), MAX_MATCH) + 1):
            agree = (match == back - 1) & (at >= back)
            agree[agree] = window[at[agree] - back] == context[-back]
            if not agree.any():
                break
            match[agree] = back
        distance = np.abs(first + at - self._parted)
        best = np.lexsort((distance, -match))[:WIDEST]
        return [(first + int(at[i]), int(match[i])) for i in best if match[i] == match[best[0]]]

    def _anywhere(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """The same over the whole prediction, for at least SURE tokens of match."""
        if self._everywhere is None:
            self._everywhere = Segment.of([self._tokens], MAX_VOCABULARY)
        found = self._everywhere.rows(context, WIDEST, 1)
        return [(int(p), int(m)) for p, m in zip(found.positions, found.match, strict=True) if m >= SURE]

    def _rows_at(self, places: list[tuple[int, int]], depth: int) -> Rows:
        inside = [(place, match) for place, match in places if place < len(self._tokens)]
        continuations = np.full((len(inside), depth), -1, np.int32)
        for row, (place, _) in enumerate(inside):
            text = self._tokens[place : place + depth]
            continuations[row, : len(text)] = text
        match = np.array([min(match, MAX_MATCH) for _, match in inside], np.int32)
        return Rows(continuations, match, np.array([place for place, _ in inside], np.int64))
