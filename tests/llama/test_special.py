"""One pass finds the same special tokens as llama.cpp's rule, done naively: for each token, longest first, a search."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from rest_local.llama.tokenizer import SpecialToken, SpecialTokens

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
    """Draw at most one token of each length, because llama.cpp's order of equal lengths is not defined."""
    letters = draw(st.sampled_from(["ab", "<a>", "<|ab>", " a<\n"]))
    texts = draw(st.lists(st.text(letters, min_size=1, max_size=5), max_size=5, unique_by=len))
    strips = st.booleans() if draw(st.booleans()) else st.just(False)
    tokens = [SpecialToken(text, number, draw(strips), draw(strips)) for number, text in enumerate(texts)]
    return tokens, draw(st.text(letters, max_size=20))


@given(case=cases())
@few(50)
def test_tokens_and_stretches_equal_those_of_the_naive_rule(case: tuple[list[SpecialToken], str]) -> None:
    tokens, text = case
    assert list(SpecialTokens(tokens).split(text)) == naive(tokens, text)


def test_hundreds_of_tokens_with_common_prefixes_are_found() -> None:
    tokens = [SpecialToken("a" * size, size) for size in range(1, 400)]
    assert list(SpecialTokens(tokens).split("b" + "a" * 401)) == ["b", 399, 2]
