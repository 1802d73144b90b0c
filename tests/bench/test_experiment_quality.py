"""Retrieval quality, on texts whose continuations are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from rest_local.bench.experiments.retrieval_quality import agreement, compare, figures, groups, up_to_tokens
from rest_local.bench.recorded import Recorded
from rest_local.retrieval.rows import Rows
from rest_local.retrieval.segment import Segment

ANSWER = Recorded("a", [1, 2, 3], list(range(10, 40)))


def store(*documents: list[int]) -> Segment:
    return Segment.of([np.array(document, np.int32) for document in documents], 256)


def test_agreement_counts_tokens_up_to_the_first_other_one() -> None:
    tokens = np.array([[5, 6, 7, 8], [5, 9, 7, 8], [1, 6, 7, 8], [5, 6, -1, -1]], np.int32)
    rows = Rows(tokens, np.array([4, 3, 2, 1], np.int32), np.zeros(4, np.int64))
    assert agreement(rows, [5, 6, 7, 8]).tolist() == [4, 1, 0, 2]
    assert agreement(rows, [5, 6]).tolist() == [2, 1, 0, 2]


def test_the_same_text_is_retrieved_whole() -> None:
    found = compare([ANSWER], store([*ANSWER.prompt, *ANSWER.answer]), [])
    mean = figures(found["datastore"])
    assert [mean[name] for name in ("found", "useful", "next_1", "next_4", "next_8")] == [1.0] * 5
    left = [min(16, 30 - at) for at in range(1, 30)]
    assert mean["prefix"] == mean["best"] == sum(left) / 29
    assert "history" not in found
    assert figures(found["context"])["found"] == 0.0  # no token occurs twice
    assert figures(found["context"])["useful"] is None


def test_text_that_goes_on_otherwise_has_no_overlap() -> None:
    found = compare([ANSWER], store(*([token, 200 + token] for token in range(10, 40))), [])
    mean = figures(found["datastore"])
    assert mean["found"] == 1.0
    assert [mean[name] for name in ("useful", "next_1", "prefix", "best")] == [0.0] * 4


def test_earlier_answers_are_the_history_and_any_row_can_be_useful() -> None:
    wrong, right = [9, 10, 77, 78], [10, 11, 12]
    found = compare([Recorded("a", [9], [10, 11, 50])], None, [wrong, right])
    (first, second) = (found["history"]["groups"][number] for number in (1, 0))
    # after "9 10" the first row has a match of two tokens and goes on with 77, the other one with 11; after "9 10 11"
    # the only row goes on with 12
    assert first["count"] == 2
    assert (first["next_1"], first["useful"], first["best"]) == (0, 1, 1)
    assert second["count"] == 0
    assert found["history"]["places"] == 2
    assert found["history"]["groups"][1]["of_4"] == 0  # the answer has no four tokens from there on


def test_matches_are_counted_by_their_length() -> None:
    assert groups() == ["1", "2", "3-4", "5-8", "9-16", "17+"]
    found: dict[str, Any] = compare([ANSWER], store([*ANSWER.prompt, *ANSWER.answer]), [])
    # the matches at the 29 places have 4, 5, and so on, tokens
    assert [group["count"] for group in found["datastore"]["groups"]] == [0, 0, 1, 4, 8, 16]


def test_turns_of_a_conversation_stay_together() -> None:
    answers = [Recorded(f"{number // 2}.{number % 2}", [1], [1] * 10) for number in range(8)]
    assert len(up_to_tokens(answers, 5)) == 2
    assert len(up_to_tokens(answers, 25)) == 4
    assert len(up_to_tokens(answers, 1000)) == 4
    alone = [Recorded(str(number), [1], [1] * 10) for number in range(8)]
    assert len(up_to_tokens(alone, 25)) == 3
