"""The sources of one sequence stay correct through growth, rewinds and interrupts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.candidates import SOURCE_NUMBER
from rest_local.drafting.sources import Sources
from rest_local.retrieval.growing import GrowingText
from rest_local.retrieval.rows import Rows

TEXT = list(range(100, 140))


def test_the_context_proposes_what_followed_before() -> None:
    sources = Sources([], 1000)
    sources.restart([*TEXT, *TEXT[:10]])
    (rows,) = sources.rows()
    assert rows.source == SOURCE_NUMBER["context"]
    assert rows.match[0] == 10
    assert rows.continuations[0][:5] == TEXT[10:15]


def test_a_long_repeat_is_recognised() -> None:
    sources = Sources([], 1000)
    sources.restart(TEXT)
    for n, token in enumerate(TEXT[5:30], 1):
        assert sources.repeats(8) == (n > 8)
        sources.extend([token])
    sources.restart([1] * 3)
    assert not sources.repeats(8)


@given(st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=24), st.integers(1, 4))
def test_short_repeats_are_those_of_whole_tokens(tokens: list[int], n: int) -> None:
    """Ids whose bytes also match across two tokens. A search skips a few of such matches."""
    sources = Sources([], 100_000)
    sources.restart(tokens)
    newest = tokens[-n:]
    occurs = any(tokens[at : at + n] == newest for at in range(len(tokens) - n))
    if occurs and len(tokens) >= 2 * n:
        assert sources.repeats(n)
    if all(token not in (0, 256, 65536) for token in tokens):
        assert sources.repeats(n) == (occurs and len(tokens) >= 2 * n)


@given(st.lists(st.lists(st.integers(0, 5), max_size=30), min_size=1, max_size=6))
def test_a_restart_equals_a_new_object(sequences: list[list[int]]) -> None:
    kept = Sources([], 1000)
    for tokens in sequences:
        kept.restart(tokens)
        fresh = Sources([], 1000)
        fresh.restart(tokens)
        assert [(r.match, r.continuations) for r in kept.rows()] == [(r.match, r.continuations) for r in fresh.rows()]
        assert kept.repeats(8) == fresh.repeats(8)


def test_an_interrupt_during_an_update_leads_to_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources([], 1000)
    sources.restart(TEXT)
    extend = GrowingText.extend

    def interrupted(self: GrowingText, tokens: np.ndarray) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingText, "extend", interrupted)
    sources.extend(TEXT[:10])
    with pytest.raises(KeyboardInterrupt):
        sources.rows()
    monkeypatch.setattr(GrowingText, "extend", extend)
    sources.restart([*TEXT, *TEXT[:6]])
    assert sources.rows()[0].match[0] == 6


@pytest.mark.parametrize("foreign", [True, False], ids=["ids the model does not have", "unreadable"])
def test_a_history_that_fails_is_left_out_with_one_warning(foreign: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GrowingText):
        def rows(self, *arguments: object) -> Rows:
            if foreign:
                return super().rows(*arguments)  # type: ignore[arg-type]
            raise OSError(5, "Input/output error")

    earlier = Broken()
    earlier.extend([*TEXT[:5], 1000, 7, -1])
    sources = Sources([], 1000, earlier)
    sources.restart(TEXT[:5])
    for _ in range(2):
        assert sources.rows() == []
    (record,) = caplog.records
    assert record.message.startswith("history ")
    assert "going on without it" in record.message


def test_earlier_answers_propose_what_followed() -> None:
    earlier = GrowingText()
    earlier.extend([*TEXT, -1])
    sources = Sources([], 1000, earlier)
    sources.restart(TEXT[:5])
    (rows,) = sources.rows()
    assert rows.source == SOURCE_NUMBER["history"]
    assert rows.continuations[0][:5] == TEXT[5:10]
