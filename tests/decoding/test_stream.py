"""Tokens to text: stop strings across tokens, held-back text, what the result says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_backend import FakeBackend, Greedy

from rest_local.decoding.backend import Capability
from rest_local.decoding.generation import Generation
from rest_local.decoding.slot import Slot
from rest_local.decoding.stream import StopFinder, Stream
from rest_local.drafting.candidates import SourceRows
from rest_local.errors import DecodeFailed
from rest_local.llama.detokenizer import Detokenizer
from rest_local.planning.off import Off


def parts_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30)),
)
def test_text_ends_before_the_first_stop_string_however_it_arrives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopFinder(tuple(stops))
    out, found = "", False
    for part in parts_of(text, cuts):
        certain, found = finder.feed(part)
        out += certain
        assert text.startswith(out), "what was shown is never taken back"
        if found:
            break
    if found:
        assert not any(stop in out for stop in stops)
        assert any(text.startswith(out + stop) for stop in stops)
    else:
        assert out + finder.finish() == text
        assert not any(stop in text for stop in stops)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopFinder(("END", ""))
    assert finder.feed("the E") == ("the ", False)
    assert finder.feed("N") == ("", False)
    assert finder.feed("x") == ("ENx", False)
    assert finder.feed("END and more") == ("", True)


@pytest.mark.parametrize("stops", [(), ("",)])
def test_without_stop_strings_nothing_is_held(stops: tuple[str, ...]) -> None:
    assert StopFinder(stops).feed("anything") == ("anything", False)


@pytest.mark.parametrize(("code", "reason"), [(1, "length"), (-1, None), (-3, None)])
def test_a_plain_step_without_room_ends_the_text_and_other_failures_are_raised(code: int, reason: str | None) -> None:
    class Silent:
        def restart(self, tokens: Sequence[int]) -> None: ...
        def extend(self, tokens: Sequence[int]) -> None: ...
        def rows(self, *_: object, **__: object) -> list[SourceRows]:
            return []

        def repeats(self) -> bool:
            return False

    backend = FakeBackend()
    capability = Capability("tree", "fake")
    task = Generation(backend, Slot(backend), Off(), Silent(), Greedy(), capability, lambda token: False)
    task.start([1, 2, 3])
    closed: list[bool] = []
    stream = Stream(task, Detokenizer(lambda token: b"x"), 50, (), lambda: closed.append(True))
    backend.failures = dict.fromkeys(range(backend.calls + 6, backend.calls + 9), code)
    if reason is None:
        with pytest.raises(DecodeFailed, match=str(code)):
            list(stream)
    else:
        assert "".join(piece.text for piece in stream) == "xxxxx"
        assert stream.result.finish_reason == reason
    assert stream.result.text == "xxxxx"
    assert closed == [True]
