"""The newest part of a text, searched by the places of one token; and the rows found there, read from its cells.

Contract: the same rows as comparing with numpy gives, or None where that is the faster way. Without numpy because a
step asks once: behind a forward pass with its cold caches the dozen calls of numpy took 100 us, these loops take 45
(warm 25 and 17). Knows nothing about segments.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from rest_local.retrieval.rows import Rows

MOST_PLACES = 256  # of the newest token; beyond, numpy is faster
MOST_LONGER = 64  # of them, where the token before agrees too
_PROMISING = 4  # from so many tokens on it is worth asking whether all agree, as in text that repeats

Found = list[tuple[int, int]]  # tokens that agree, and the cell of the last of them; best first


class Places:
    """By token the cells that hold it, ascending; brought up to date when it is asked. Of a text that only grows: for
    another, another.
    """

    def __init__(self) -> None:
        self._by_token: dict[int, list[int]] = {}
        self._begin = self._end = 0

    def best(self, cell: memoryview, begin: int, end: int, newest: list[int], limit: int) -> Found | None:
        """The `limit` best matches of `newest` (newest first, 1 token or more) in the cells begin..end-1, the later
        first among equals; None where there are too many to look at.
        """
        self._follow(cell, begin, end)
        places = self._by_token.get(newest[0], [])
        if len(places) > MOST_PLACES:
            return None
        longest = len(newest)
        before = newest[1] if longest > 1 else None
        longer = [place for place in places if cell[place - 1] == before]
        if len(longer) > MOST_LONGER:
            return None
        found: Found = []
        whole = array("i", newest[::-1])
        for place in longer:
            match = 2
            while match < longest and cell[place - match] == newest[match]:
                match += 1
                if match == _PROMISING and cell[place - longest + 1 : place + 1] == whole:
                    match = longest
            found.append((match, place))
        found.sort(reverse=True)
        del found[limit:]
        if len(found) < limit:
            single = [place for place in reversed(places) if cell[place - 1] != before]
            found += [(1, place) for place in single[: limit - len(found)]]
        return found

    def _follow(self, cell: memoryview, begin: int, end: int) -> None:
        by_token = self._by_token
        if begin != self._begin:
            by_token.clear()
            self._begin = self._end = begin
        for place in range(self._end, end):
            token = cell[place]
            if token in by_token:
                by_token[token].append(place)
            else:
                by_token[token] = [place]
        self._end = max(end, begin)


class CellRows(Rows):
    """Rows that are read from the cells when they are asked for: before the text changes. The arrays are made for those
    who want them.
    """

    __slots__ = ("_cell", "_depth", "_found", "_front")

    def __init__(self, cell: memoryview, front: int, found: Found, depth: int, limit: int) -> None:
        """`front`: cells before the text. `limit`: as for `Rows`."""
        self._cell, self._front, self._found, self._depth = cell, front, found, depth
        self.limit, self._shift, self._continuations = limit, 0, None

    def __getattr__(self, name: str) -> Any:
        """What `Rows` keeps as arrays."""
        if name == "match":
            self.match = np.array([match for match, _ in self._found], np.int32)
        elif name == "positions":
            self.positions = np.array([place + 1 - self._front for _, place in self._found], np.int64)
        elif name == "_tokens":
            rows = [self.row(number) for number in range(len(self))]
            self._tokens = np.array(rows, np.int32).reshape(len(rows), self._depth)
        else:
            raise AttributeError(name)
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def depth(self) -> int:
        return self._depth

    def matches(self) -> list[int]:
        return [match for match, _ in self._found]

    def column(self, depth: int) -> list[int]:
        cell, beyond = self._cell, depth + 1
        return [cell[place + beyond] for _, place in self._found]

    def row(self, number: int) -> list[int]:
        first = self._found[number][1] + 1
        tokens: list[int] = self._cell[first : first + self._depth].tolist()
        return tokens
