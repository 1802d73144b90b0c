"""Images as negative ids in a list of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rest_local.llama.placeholders import ids_of, spans, whole

Parts = st.lists(
    st.one_of(st.lists(st.integers(0, 99), max_size=5), st.tuples(st.binary(max_size=3), st.integers(1, 9)))
)


def joined(parts: list[list[int] | tuple[bytes, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of texts and images, and where the images are."""
    tokens: list[int] = []
    places = []
    for part in parts:
        ids = part if isinstance(part, list) else list(ids_of(*part))
        if isinstance(part, tuple):
            places.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return tokens, places


@given(Parts)
def test_images_are_found_again_even_where_they_are_neighbours(parts: list[list[int] | tuple[bytes, int]]) -> None:
    tokens, places = joined(parts)
    assert list(spans(tokens)) == places


@given(Parts, st.data())
def test_no_image_is_cut(parts: list[list[int] | tuple[bytes, int]], data: st.DataObject) -> None:
    tokens, places = joined(parts)
    n = data.draw(st.integers(0, len(tokens)))
    inside = next((begin for begin, end in places if begin < n < end), n)
    assert whole(tokens, n) == inside


def test_ids_follow_from_the_content_alone() -> None:
    assert ids_of(b"a", 576) == ids_of(b"a", 576)
    assert not set(ids_of(b"a", 576)) & set(ids_of(b"b", 576))
    assert ids_of(b"a", 16) == ids_of(b"a", 576)[:16]
