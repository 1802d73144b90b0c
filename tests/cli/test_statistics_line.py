"""The line after an answer."""

from __future__ import annotations

import pytest

from rest_local.cli.terminal import drafted_share, statistics_line
from rest_local.decoding.results import DraftStatistics, Timings
from rest_local.decoding.stream import Result


def answer(*sources: str, ms: float = 100.0, drafted: int = 8, plain_ms: float = 0.0) -> Result:
    return Result(
        tokens=list(range(len(sources))),
        sources=list(sources),
        timings=Timings(predicted_tokens=len(sources), predicted_ms=ms),
        draft=DraftStatistics(drafted=drafted, plain_step_ms=plain_ms),
    )


def test_speed_comparison_and_source_of_an_answer() -> None:
    result = answer(*["datastore"] * 6, *["target"] * 4, plain_ms=20.0)
    assert statistics_line(result, ["mycode"]) == "100 tokens/s, 2.0 x plain, 60% from mycode"


def test_sources_are_listed_by_their_share() -> None:
    result = answer(*["context"] * 2, *["datastore"] * 5, *["target"] * 3)
    assert drafted_share(result, ["a", "b"]) == "70% from datastores 50%, context 20%"


@pytest.mark.parametrize(("drafted", "said"), [(0, "nothing drafted"), (8, "no draft accepted")])
def test_an_answer_without_accepted_drafts_says_so(drafted: int, said: str) -> None:
    assert drafted_share(answer("target", drafted=drafted)) == said


@pytest.mark.parametrize(
    ("tokens", "drafted", "plain_ms", "times"),
    [(3, 8, 20.0, None), (4, 8, 20.0, 2.0), (40, 0, 20.0, None), (40, 8, 0.0, None)],
)
def test_a_short_answer_and_one_without_drafts_are_not_compared(
    tokens: int, drafted: int, plain_ms: float, times: float | None
) -> None:
    assert answer(*["target"] * tokens, ms=10.0 * tokens, drafted=drafted, plain_ms=plain_ms).speedup == times
