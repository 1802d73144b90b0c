"""A segment finds the same as a naive scan of every position."""

import functools
import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import assert_right, every_row
from stores import array, make
from support.examples import few

from rest_local.retrieval import Datastore, GrowingText, Rows
from rest_local.retrieval import growing as module
from rest_local.retrieval import segment as searching
from rest_local.retrieval import sparse_index as sample
from rest_local.retrieval.building import build as building
from rest_local.retrieval.rows import order_of, pack, packed, width_of
from rest_local.retrieval.segment import Segment, search_all
from rest_local.retrieval.sparse_index import Sample, make_sample, sample_size

# Few different ids, so that matches are long and many. The wide ids differ in each of their three bytes.
NARROW = [0, 1, 255, 256]
WIDE = [0, 1, 256, 65536, 65535, 151_000]


def corpora(ids: list[int]) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.sampled_from(ids), max_size=40), max_size=6)


@few(25)
@given(
    st.sampled_from([(NARROW, 300, 2), (WIDE, 151_001, 3)]).flatmap(
        lambda kind: st.tuples(corpora(kind[0]), st.lists(st.sampled_from(kind[0]), max_size=40), st.just(kind[1:]))
    ),
    st.integers(1, 9),
    st.integers(1, 7),
)
@example(([[1] * 60], [1] * 40, (300, 2)), 5, 3)
@example(([[0, 1], [0, 1]], [1, 0, 1], (300, 2)), 4, 2)
def test_rows_are_the_longest_matches(texts, limit, depth):
    documents, context, (size, width) = texts
    segment = Segment.of(map(array, documents), size)
    assert segment.width == width
    assert_right(segment.rows(array(context), limit, depth), every_row(documents, context, depth), limit)


@few(25)
@given(st.lists(st.sampled_from(WIDE), min_size=1, max_size=60), st.sampled_from([65_535, 65_536, 151_001]))
def test_order_is_that_of_a_naive_sort(tokens, vocab_size):
    tokens = [token % vocab_size for token in tokens]
    backward = tokens[::-1]
    expected = sorted(range(len(tokens)), key=lambda at: [*backward[at:], vocab_size])
    assert order_of(pack(array(tokens), vocab_size), width_of(vocab_size)).tolist() == expected


def test_the_separator_fits_next_to_the_largest_id():
    for vocab_size, width in ((1, 2), (65_535, 2), (65_536, 3), (2**24 - 1, 3)):
        last = vocab_size - 1
        segment = Segment.of([array([last, last]), array([last])], vocab_size)
        assert segment.width == width
        rows = segment.rows(array([last]), 10, 2)
        assert sorted(rows.continuations.tolist()) == [[-1, -1], [-1, -1], [last, -1]]
    for vocab_size in (0, 2**24):
        with pytest.raises(ValueError, match="vocabulary"):
            Segment.of([], vocab_size)


def test_a_match_beyond_the_limit_is_taken_from_its_middle():
    documents = [array([before, 9, after]) for before in range(5) for after in range(5)]
    rows = Segment.of(documents, 10).rows(array([9]), 5, 1)
    preceding = {int(position) // 4 // 5 for position in rows.positions}
    assert preceding == {2}


@few(30)
@given(
    corpora(WIDE), st.lists(st.sampled_from(WIDE), max_size=40), st.integers(0, 4), st.sampled_from([65_537, 151_001])
)
def test_only_matches_above_a_length(documents, context, above, vocab_size):
    documents = [[token % vocab_size for token in document] for document in documents]
    context = [token % vocab_size for token in context]
    segment = Segment.of(map(array, documents), vocab_size)
    entries, match = segment.around(segment.key(context), 5, above=above)
    longer = {at: row for at, row in every_row(documents, context, 1).items() if row[0] > above}
    assert match.tolist() == sorted((match for match, _ in longer.values()), reverse=True)[:5]
    found = (len(segment) - entries.astype(np.int64)).tolist()
    assert [longer[at][0] for at in found] == match.tolist()
    assert len(set(found)) == len(found)


def test_merge_joins_rows_of_different_widths():
    narrow, wide = (Segment.of([array([1, 2, 3])], size).rows([1], 4, 3) for size in (10, 100_000))
    both = Rows.merge([narrow, wide], 8, 3)
    assert both.continuations.tolist() == [[2, 3, -1]] * 2
    assert both.positions.tolist() == [1, 1]


def test_merge_keeps_the_longest_matches():
    def rows(*matches: int) -> Rows:
        count = len(matches)
        return Rows(np.zeros((count, 2), np.int32), array(list(matches)), np.arange(count))

    assert Rows.merge([rows(5, 2, 1), rows(4, 2)], 4, 2).match.tolist() == [5, 4, 2, 2]
    assert Rows.merge([], 4, 2).continuations.shape == (0, 2)


def without_some(
    documents: list[list[int]], dead: list[bool], vocab_size: int, sampled: bool
) -> tuple[Segment, set[int]]:
    """Return a segment whose dead documents are masked, and the positions of rows in the others."""
    whole = Segment.of(map(array, documents), vocab_size)
    bounds = np.cumsum([0, *(len(document) + 1 for document in documents)])
    intervals = [(bounds[at], bounds[at + 1]) for at, gone in enumerate(dead[: len(documents)]) if gone]
    tokens, order = bytes(whole._tokens), whole._entries
    segment = Segment(
        tokens,
        order,
        length=len(whole),
        vocab_size=vocab_size,
        dead=np.array(intervals, np.int64).reshape(-1, 2),
        sample=Sample(make_sample(tokens, order, whole.width), len(order)) if sampled and len(order) else None,
    )
    alive = set(range(len(whole))) - {at for low, high in intervals for at in range(low, high)}
    return segment, alive


DEAD = st.lists(st.booleans(), min_size=6, max_size=6)


@few(25)
@given(corpora(NARROW), DEAD, st.lists(st.sampled_from(NARROW), max_size=40), st.integers(1, 9), st.booleans())
@example([[1] * 30, [1] * 30], [True] + [False] * 5, [1] * 40, 5, False)
@example([[1] * 30, [1] * 30], [False, True] + [False] * 4, [1, 1], 9, True)
def test_rows_are_those_of_the_documents_that_are_not_dead(documents, dead, context, limit, sampled):
    segment, alive = without_some(documents, dead, 300, sampled)
    expected = {at: row for at, row in every_row(documents, context, 4).items() if at in alive}
    assert_right(segment.rows(array(context), limit, 4), expected, limit)


@few(25)
@given(corpora(WIDE), DEAD, st.lists(st.sampled_from(WIDE), max_size=40), st.integers(1, 5))
def test_find_counts_only_what_is_not_dead(documents, dead, context, limit):
    segment, alive = without_some(documents, dead, 151_001, False)
    expected = {at: row for at, row in every_row(documents, context, 1).items() if at in alive}
    longest = max((match for match, _ in expected.values()), default=0)
    match, low, high = segment.find(array(context))
    assert match == longest
    if longest:
        places = sorted(at for at, (length, _) in expected.items() if length == longest)
        assert segment.count(low, high) == len(places)
        assert sorted(segment.positions(low, high).tolist()) == places
        assert len(segment.positions(low, high, limit)) == min(limit, len(places))


@few(25)
@given(
    st.lists(corpora(NARROW), min_size=2, max_size=9),
    DEAD,
    st.lists(st.sampled_from(NARROW), max_size=40),
    st.integers(1, 30),
)
@example([[[1] * 30]] * 9, [False] * 6, [1] * 40, 30)
@example([[[1] * 30], *[[[0]]] * 8], [False] * 6, [256, 1, 1, 1], 30)  # all are needed, to the first of an order
def test_rows_of_several_segments_are_those_of_one_text(groups, dead, context, limit):
    """Some have no rows, dead documents, or far more rows than others."""
    expected, placed, start = {}, [], 0
    for number, documents in enumerate(groups):
        segment, alive = without_some(documents, dead if number % 2 else [], 300, False)
        placed.append((start, segment))
        rows = every_row(documents, context, 4)
        expected |= {start + at: row for at, row in rows.items() if at in alive}
        start += len(segment)
    assert_right(search_all(placed, array(context), limit, 4), expected, limit)


def test_dead_rows_that_crowd_the_place_are_passed_over():
    """1 000 dead rows with a longer match, then a live one; and so many that the search stops."""
    crowd, live = [[1, 2, 3, 7]] * 1000, [[9, 3, 8]]
    segment, _ = without_some(crowd + live, [True] * 1000, 300, False)
    rows = segment.rows(array([1, 2, 3]), 4, 2)
    assert rows.continuations.tolist() == [[8, -1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "MOST", 64)
        assert len(segment.rows(array([1, 2, 3]), 4, 2)) == 0


def test_dead_intervals_have_to_be_sorted_and_inside():
    for intervals in ([[3, 5], [0, 2]], [[0, 9]], [[-1, 2]]):
        with pytest.raises(ValueError, match="dead"):
            Segment(b"\0" * 2 * (5 + 96), bytes(20), length=5, vocab_size=300, dead=np.array(intervals))


# ---- A sample of the order -----------------------------------------------------------------------------------------


IDS = [0, 1, 256, 65536, 65535, 151_000]
SIZE = {2: 300, 3: 151_001}


def sampled(text: list[int], width: int) -> tuple[Segment, Segment]:
    """Return the same segment with and without a sample."""
    size = SIZE[width]
    tokens = pack(np.array(text, np.int32), size)
    order = order_of(tokens, width)
    content = make_sample(tokens, order, width)
    assert len(content) == sample_size(len(text))
    made = Sample(content, len(text))
    return tuple(Segment(tokens, order, length=len(text), vocab_size=size, sample=part) for part in (made, None))


@few(25)
@given(
    st.sampled_from([2, 3]),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=300),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_a_place_is_that_of_the_whole_order(width, text, context, step, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "STEP", step)
        patch.setattr(sample, "BLOCK", block)
        text, context = ([token % SIZE[width] for token in tokens] for tokens in (text, context))
        ours, plain = sampled(text, width)
        for tokens in (context, text[-40:], text[: len(text) // 2][-9:] or [0]):
            key = packed(tokens[-32:], width)
            assert ours.place(key) == plain.place(key)


def test_a_sample_narrows_the_search() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 300, 20_000).tolist()
    ours, _ = sampled(text, 3)
    for at in random.integers(40, 20_000, 50).tolist():
        key = ours.key(text[at - 8 : at])
        low, high = ours._sample.around(key, sample.beginning(key))
        assert high - low < 2 * sample.STEP


def test_a_sample_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="sample of 65"):
        Sample(bytes(32), 65)


# ---- Reading ahead -------------------------------------------------------------------------------------------------


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


# ---- Text that grows -----------------------------------------------------------------------------------------------


TOKENS = st.sampled_from([0, 1, 2, 700])


def documents_of(text: list[int]) -> list[list[int]]:
    """Split the text at every -1."""
    parts: list[list[int]] = [[]]
    for token in text:
        if token < 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def expected_rows(text: list[int], context: list[int], depth: int) -> dict[int, tuple[int, list[int]]]:
    rows = every_row(documents_of(text), context, depth)
    return {position: row for position, row in rows.items() if position < len(text)}


@few(25)
@given(
    st.lists(
        st.one_of(st.lists(st.one_of(TOKENS, st.just(-1)), max_size=12), st.integers(0, 20).map(lambda drop: -drop)),
        max_size=12,
    ),
    st.lists(TOKENS, max_size=36),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5, 1000]),
    st.booleans(),
)
def test_rows_are_those_of_the_whole_text(steps, context, limit, depth, tail, own_end):
    growing, text = GrowingText(1000, tail), []
    for step in steps:
        if isinstance(step, int):
            text = text[: max(len(text) + step, 0)]
            growing.truncate(len(text))
        else:
            text += step
            growing.extend(step if own_end else np.array(step, np.int32))
    assert growing.tokens.tolist() == text
    if own_end:
        context = text
    assert_right(growing.rows(np.array(context, np.int32), limit, depth), expected_rows(text, context, depth), limit)


@few(25)
@given(
    st.lists(st.tuples(st.lists(TOKENS, max_size=90), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(1, 30),
    st.sampled_from([30, 1000]),
    st.booleans(),
)
def test_the_index_and_numpy_give_the_same_rows(steps, limit, tail, every_time):
    """However the text grew and was cut between two lookups."""
    growing, text = GrowingText(1000, tail), []
    for tokens, drop in steps:
        text = [*text[: max(len(text) - drop, 0)], *tokens]
        growing.truncate(len(text) - len(tokens))
        growing.extend(tokens)
        if every_time:
            growing.rows(text, limit)
    found = growing.rows(text, limit, 5)
    with patch.object(module, "MAX_PLACES", -1):
        other = growing.rows(text, limit, 5)
    assert found.matches() == other.matches() == found.match.tolist()
    assert found.positions.tolist() == other.positions.tolist()
    assert found.continuations.tolist() == other.continuations.tolist()
    assert [found.row(n) for n in range(len(found))] == [other.row(n) for n in range(len(other))]
    assert [found.column(depth) for depth in range(5)] == [other.column(depth) for depth in range(5)]


def test_the_number_of_segments_is_logarithmic():
    growing = GrowingText(1000, 64)
    for _ in range(500):
        growing.extend(range(20))
    assert 1 <= len(growing._segments) <= 8


def test_ids_outside_the_vocabulary_end_a_document():
    growing = GrowingText(100)
    growing.extend([1, 2, 100, 2, 7, -5, 2**31 - 1, 2])
    assert growing.tokens.tolist() == [1, 2, -1, 2, 7, -1, -1, 2]
    rows = growing.rows(np.array([9, 2]), 8, 4)
    assert sorted(rows.continuations.tolist()) == [[-1, -1, -1, -1], [7, -1, -1, -1]]


def test_text_that_is_cut_off_takes_no_memory():
    growing = GrowingText()
    tracemalloc.start()
    try:
        for first in range(0, 50_000, 500):
            growing.truncate(0)
            growing.extend(list(range(first, first + 500)))
            growing.rows(np.array([first]), 8, 4)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
