"""An answer that follows the prediction is drafted from it; after a divergence its place is found again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting import prediction as module
from rest_local.drafting.prediction import MIN_PROBABILITY, Alignment, Prediction
from rest_local.drafting.sources import Sources

OLD = list(range(100, 200)) + list(range(300, 400))


def drafted(prediction: Prediction, answer: list[int], depth: int = 16) -> list[list[int]]:
    rows = prediction.rows(np.array([1, 2, 3, *answer], np.int32)[-32:], depth)
    return [[t for t in row if t >= 0] for row in rows.continuations.tolist()]


def tell(prediction: Prediction, answer: list[int], more: list[int]) -> list[int]:
    prediction.extend(more)
    return answer + more


def test_the_beginning_is_drafted_before_the_first_token() -> None:
    prediction = Prediction(OLD)
    assert prediction.follows
    assert drafted(prediction, []) == [OLD[:16]]


@pytest.mark.parametrize(
    ("new", "resume"),
    [
        ([*OLD[:20], 999], 21),  # replaced
        ([*OLD[:20], 999, 998, 997, OLD[20]], 21),  # inserted
        ([*OLD[:20], OLD[30]], 31),  # deleted
        ([*OLD[:20], OLD[150], OLD[151], OLD[152]], 153),  # moved far ahead
        ([*OLD[:60], OLD[20], OLD[21], OLD[22]], 23),  # moved back
    ],
)
def test_after_a_divergence_the_place_is_found_again(new: list[int], resume: int) -> None:
    prediction = Prediction(OLD)
    answer: list[int] = []
    for token in new:
        answer = tell(prediction, answer, [token])
        drafted(prediction, answer)
    assert OLD[resume : resume + 16] in drafted(prediction, answer)
    tell(prediction, answer, OLD[resume : resume + 12])
    assert drafted(prediction, answer + OLD[resume : resume + 12])[0] == OLD[resume + 12 : resume + 28]


def forward(old: list[int], at: int, answer: list[int]) -> dict[int, float]:
    """Model `Alignment` without arrays: return for each place the probability that the next token is copied from it."""
    first, end = max(at - module.WINDOW, 0), min(at + module.WINDOW, len(old))
    copied, new = dict.fromkeys(range(first, end + 1), 0.0), 1.0

    def following() -> dict[int, float]:
        skips = {place: float(module._SKIP[place - at + module.WINDOW]) for place in copied}
        return {place: module.RESUME * new * skips[place] + module.KEEP * copied[place] for place in copied}

    for token in answer:
        coming = following()
        known = any(old[place] == token for place in range(first, end))
        chance = max(old.count(token) / len(old) if known else 0.0, 1e-4)
        new = (new * (1 - module.RESUME) + (1 - module.KEEP) * sum(copied.values())) * chance
        for place in copied:
            copied[place] = coming[place - 1] if place > first and old[place - 1] == token else 0.0
        total = new + sum(copied.values())
        new, copied = new / total, {place: p / total for place, p in copied.items()}
    return following()


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=600), st.integers(0, 600), st.lists(st.integers(0, 8), max_size=9)
)
def test_the_places_have_the_probabilities_of_the_model(old: list[int], at: int, answer: list[int]) -> None:
    at = min(at, len(old))
    alignment = Alignment(np.array(old, np.int32), at)
    for token in answer:
        alignment.extend(token)
    expected = forward(old, at, answer)
    found = alignment.places()
    assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
    for place, probability in found:
        assert probability == pytest.approx(expected[place], rel=1e-3)
    likely = [p for p in expected.values() if p >= 1.001 * MIN_PROBABILITY]
    assert len(found) >= min(len(likely), module.MAX_PLACES)


def test_an_answer_is_compared_with_no_token() -> None:
    """If a file is followed from its end, nothing is left to predict."""
    prediction = Prediction([])
    prediction.extend([5, 6])
    assert not prediction.catch_up()
    prediction.append([7], 0)
    assert prediction.catch_up()


def test_an_unrelated_answer_gets_drafts_of_low_evidence_only() -> None:
    prediction = Prediction(OLD)
    answer: list[int] = []
    for token in range(5000, 5100):
        answer = tell(prediction, answer, [token])
        rows = prediction.rows(np.array(answer, np.int32)[-32:], 16)
        assert rows.match.max(initial=0) <= 2
    assert not prediction.follows


@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=12))
def test_rows_are_pieces_of_the_prediction(old: list[int], steps: list[list[int]]) -> None:
    prediction = Prediction(old)
    answer: list[int] = [9]
    for step in steps:
        answer = tell(prediction, answer, step)
        rows = prediction.rows(np.array(answer, np.int32)[-32:], 4)
        assert all(rows.match >= 1)
        assert sorted(rows.match.tolist(), reverse=True) == rows.match.tolist()
        for place, row in zip(rows.positions.tolist(), rows.continuations.tolist(), strict=True):
            wanted = old[place : place + 4]
            assert row == wanted + [-1] * (4 - len(wanted))


def test_a_place_that_two_searches_find_is_proposed_once() -> None:
    """A block occurs three times far ahead: no place is likely, and the search of the whole text finds all of them."""
    block = list(range(500, 506))
    old = [*range(100, 180), *block, 1, 2, *block, 3, 4, *block, *range(300, 310)]
    prediction = Prediction(old)
    answer = tell(prediction, [], [*old[:20], 999])
    drafted(prediction, answer)
    answer = tell(prediction, answer, block[:5])
    rows = prediction.rows(np.array(answer, np.int32), 4)
    assert sorted(rows.positions.tolist()) == [85, 93, 101]


def test_the_sources_use_a_prediction_until_it_is_replaced() -> None:
    sources = Sources([], 1000)
    sources.restart([1, 2, 3])
    sources.predict([50, 51, 52])
    assert sources.repeats(8)
    assert [row.continuations[0][:3] for row in sources.rows()] == [[50, 51, 52]]
    sources.extend([50])
    assert [row.continuations[0][:2] for row in sources.rows()] == [[51, 52]]
    sources.restart([3, 50])  # less text before the same end
    assert [row.continuations[0][:2] for row in sources.rows()] == [[51, 52]]
    sources.extend([51])
    assert [row.continuations[0][0] for row in sources.rows()] == [52]
    sources.predict([])
    assert not sources.repeats(8)
    assert sources.rows() == []
