"""The budget of a pass is shared: the likeliest node of all trees goes next, whoever's it is."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rest_local.drafting.drafter import grow_together

Chances = st.lists(st.floats(0.01, 1.0), max_size=8).map(lambda chances: sorted(chances, reverse=True))


class Scripted:
    """A tree whose next nodes have these chances."""

    def __init__(self, chances: list[float]) -> None:
        self._left = list(chances)

    @property
    def best(self) -> float:
        return self._left[0] if self._left else 0.0

    def grow(self) -> None:
        self._left.pop(0)


@given(st.lists(Chances, max_size=6), st.integers(0, 30), st.floats(0, 1))
def test_nodes_come_in_falling_order_over_all_trees(trees: list[list[float]], limit: int, least: float) -> None:
    """The naive way: all nodes of all trees, sorted."""
    growths: Any = [Scripted(chances) for chances in trees]
    order = grow_together(growths, lambda chance: chance >= least, limit)
    naive = sorted((chance for chances in trees for chance in chances if chance >= least), reverse=True)[:limit]
    taken = [0] * len(trees)
    given_out = []
    for number in order:
        given_out.append(trees[number][taken[number]])
        taken[number] += 1
    assert given_out == naive
