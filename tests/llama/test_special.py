"""Special tokens found in one pass, against llama.cpp's rule done naively: longest first, each wherever it is left."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rest_local.llama.special import SpecialToken, SpecialTokens

SPACE = " \t\n\v\f\r"


def naive(tokens: Sequence[SpecialToken], text: str) -> list[str | int]:
    stretches: list[str | int] = [text] if text else []
    for token in sorted(tokens, key=lambda token: -len(token.text)):
        left: list[str | int] = []
        for stretch in stretches:
            while isinstance(stretch, str) and (at := stretch.find(token.text)) >= 0:
                before = stretch[:at].rstrip(SPACE) if token.lstrip else stretch[:at]
                left += [before, token.id] if before else [token.id]
                stretch = stretch[at + len(token.text) :]
                stretch = stretch.lstrip(SPACE) if token.rstrip else stretch
            left += [stretch] if stretch != "" else []
        stretches = left
    return stretches


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[SpecialToken], str]:
    """Of one length there is one token at most: llama.cpp's order of others is not fixed."""
    letters = draw(st.sampled_from(["ab", "<a>", "<|ab>", " a<\n"]))
    texts = draw(st.lists(st.text(letters, min_size=1, max_size=5), max_size=5, unique_by=len))
    strips = st.booleans() if draw(st.booleans()) else st.just(False)
    tokens = [SpecialToken(text, number, draw(strips), draw(strips)) for number, text in enumerate(texts)]
    return tokens, draw(st.text(letters, max_size=20))


@given(case=cases())
@settings(max_examples=1000)
def test_the_same_tokens_and_stretches_as_by_the_naive_rule(case: tuple[list[SpecialToken], str]) -> None:
    tokens, text = case
    assert list(SpecialTokens(tokens).split(text)) == naive(tokens, text)


def test_hundreds_of_tokens_that_begin_each_other_are_found() -> None:
    tokens = [SpecialToken("a" * size, size) for size in range(1, 1500)]
    assert list(SpecialTokens(tokens).split("b" + "a" * 1501)) == ["b", 1499, 2]


def test_nothing_is_found_where_there_is_nothing() -> None:
    assert list(SpecialTokens([]).split("text")) == ["text"]
    assert list(SpecialTokens([SpecialToken("", 1)]).split("")) == []
