"""Represent images in a list of token ids: each row of an image is one negative id, so a text is still one list.

- The ids follow from the content of the image. So two texts share a prefix only if they share the images in it, in
  this process and in cells that an earlier one has saved.
- The first id of each image is marked. So the list alone tells where images begin and end, even if two are neighbours.
- No vocabulary has a negative id: indexes of text see the end of a document, and nothing is drafted across an image.

Pure functions of ids. `common_prefix` compares two texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST = 1 << 30  # marks a value v, whose id is -1 - v
_ANY = 1 << 29  # set in every value, so that no id is close to zero; -1 has other meanings
_MASK = _ANY - 1


def is_placeholder(token: int) -> bool:
    """Return True if an id stands for a row of an image."""
    return token < 0


def ids_of(digest: bytes, n: int) -> tuple[int, ...]:
    """Return the ids of an image of `n` rows. 29 bits of each id depend on the digest of its content."""
    import hashlib  # takes milliseconds

    values = np.frombuffer(hashlib.shake_256(digest).digest(4 * n), "<u4").astype(np.int64) & _MASK | _ANY
    values[:1] |= _FIRST
    return tuple((-1 - values).tolist())


def is_first(token: int) -> bool:
    """Return True if an image begins with this id."""
    return token < 0 and bool((-1 - token) & _FIRST)


def whole(tokens: Sequence[int], n: int) -> int:
    """Return `n`, or fewer tokens without the image that place `n` lies in."""
    if not 0 < n < len(tokens) or tokens[n] >= 0 or is_first(tokens[n]):
        return n
    while n and not is_first(tokens[n]):
        n -= 1
    return n


def spans(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each image."""
    ids = np.fromiter(tokens, np.int64, len(tokens))
    places = np.flatnonzero(ids < 0)
    if not len(places):
        return
    begins = ((-1 - ids[places]) & _FIRST) != 0
    begins[0] = True
    begins[1:] |= np.diff(places) > 1
    starts = np.flatnonzero(begins)
    ends = [*starts[1:], len(places)]
    for start, end in zip(starts, ends, strict=True):
        yield int(places[start]), int(places[end - 1]) + 1


def text_of(tokens: Sequence[int]) -> list[int]:
    """Return the tokens that are text."""
    return [token for token in tokens if token >= 0]


Tokens = Sequence[int] | NDArray[np.int32]


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix of two texts. Takes about 1 us for 100 tokens."""
    limit = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:limit], np.int64) != np.asarray(other[:limit], np.int64))
    return int(differ[0]) if len(differ) else limit
