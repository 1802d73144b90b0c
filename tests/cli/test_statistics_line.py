"""The line after an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rest_local.cli.statistics_line import drafted_share, line_of, speedup, statistics_line
from rest_local.decoding.engine import Engine
from rest_local.decoding.results import DraftStatistics, Timings
from rest_local.decoding.stream import Result
from rest_local.paths import demo_model


def answer(*sources: str, ms: float = 100.0, drafted: int = 8) -> Result:
    return Result(
        tokens=list(range(len(sources))),
        sources=list(sources),
        timings=Timings(predicted_tokens=len(sources), predicted_ms=ms),
        draft=DraftStatistics(drafted=drafted),
    )


def test_speed_comparison_and_source_of_an_answer() -> None:
    result = answer(*["datastore"] * 6, *["target"] * 4)
    assert statistics_line(result, 20.0, ["mycode"]) == "100 tokens/s, 2.0 x plain, 60% from mycode"


def test_sources_are_listed_by_their_share() -> None:
    result = answer(*["context"] * 2, *["datastore"] * 5, *["target"] * 3)
    assert drafted_share(result, ["a", "b"]) == "70% from datastores 50%, context 20%"


def test_relaxed_tokens_count_for_their_source() -> None:
    assert drafted_share(answer("context", "context~", "target", "target")) == "50% from context"


@pytest.mark.parametrize(("drafted", "said"), [(0, "nothing drafted"), (8, "no draft accepted")])
def test_an_answer_without_accepted_drafts_says_so(drafted: int, said: str) -> None:
    assert drafted_share(answer("target", drafted=drafted)) == said


def test_without_a_plain_time_nothing_is_compared() -> None:
    assert statistics_line(answer("target", ms=400.0), None) == "2.5 tokens/s, no draft accepted"
    assert speedup(answer(), 5.0) is None
    assert statistics_line(answer(drafted=0), 5.0) == "0.0 tokens/s, nothing drafted"


@pytest.mark.parametrize(("tokens", "times"), [(3, None), (4, 2.0)])
def test_a_short_answer_is_not_compared(tokens: int, times: float | None) -> None:
    assert speedup(answer(*["target"] * tokens, ms=10.0 * tokens), 20.0) == times


def test_the_line_of_an_engine_compares_with_its_plain_step() -> None:
    with Engine.load(demo_model(), n_ctx=512, threads=1, policy="off") as engine:
        stream = engine.generate("def main():", max_tokens=16)
        assert list(stream)
        line = line_of(engine, stream.result)
        draft, measured = stream.result.draft, engine.plain_step_ms(stream.result)
        by_batch = [
            engine.plain_step_ms(replace(stream.result, draft=replace(draft, plain_steps=3, decode_ms_per_step=ms)))
            for ms in (0.0, 0.001, 1e6)
        ]
    assert by_batch[1] - by_batch[0] == pytest.approx(0.001), "a batch costs no less than a plain step"
    assert 0.001 < by_batch[2] < 1e6, "by the cost curve"
    assert " x plain, nothing drafted" in line
    assert draft.plain_steps == draft.steps == 16
    assert draft.plain_ms_per_step == draft.decode_ms_per_step < measured
