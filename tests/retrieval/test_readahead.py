"""A search of files that are not in memory reads ahead, and finds what any other search finds."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracle import assert_right, every_row
from stores import make

from rest_local.retrieval import Datastore
from rest_local.retrieval import segment as searching
from rest_local.retrieval.building import build as building

TEXTS = {f"{number}.py": np.random.default_rng(number).integers(0, 9, 1200).tolist() for number in range(5)}
CONTEXTS = [text[at : at + 12] for text in TEXTS.values() for at in range(0, 1100, 400)]


@functools.cache
def expected(context: tuple[int, ...]) -> dict[int, tuple[int, list[int]]]:
    return every_row(list(TEXTS.values()), list(context), 16)


@pytest.mark.parametrize("sampled", [1, 1 << 40])
@pytest.mark.parametrize("cap", [1600, 20_000])
def test_reading_ahead_finds_the_longest_matches(tmp_path, monkeypatch, sampled, cap):
    monkeypatch.setattr(building, "SAMPLED", sampled)
    path = make(tmp_path / "store", TEXTS, segment_tokens=cap)
    with Datastore.open(path, mmap=True) as store:
        assert ("sample" in store.manifest.segments[0].files) == (sampled == 1)
        monkeypatch.setattr(searching, "SLOW_NS", -1)
        for context in CONTEXTS:
            assert_right(store.rows(context), expected(tuple(context)), 64)


def test_the_pages_of_all_rows_are_asked_for(tmp_path, monkeypatch):
    asked: dict[int, set[int]] = {}

    def advise(data, intervals):
        asked.setdefault(id(data), set()).update(at for begin, end in intervals for at in range(begin, end))

    monkeypatch.setattr("rest_local.retrieval.segment.advise", advise)
    monkeypatch.setattr(building, "SAMPLED", 1)
    path = make(tmp_path / "store", TEXTS)
    with Datastore.open(path, mmap=True) as store:
        (segment,) = store.segments
        key = segment.key(CONTEXTS[3])
        at = segment.place(key)
        searching.read_ahead([segment], key, 8, 16)
        needed = set()
        for position in segment._order[at - 8 : at + 8].tolist():
            begin = (64 - 16 + position) * segment.width
            needed |= set(range(begin, begin + 16 * segment.width + len(key)))
        assert needed <= asked[id(segment._tokens)]
        assert set(range(4 * (at - 8), 4 * (at + 8))) <= asked[id(segment._order_file)]
