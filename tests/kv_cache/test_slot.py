"""Whatever was drafted and accepted: the cells hold what a slot says, and the rest is freed by a call for each leaf."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_backend import END, FakeBackend

from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.kv_cache.slot import BatchBuilder, Slot


class Counting(FakeBackend):
    """How often llama.cpp would pass over its cells."""

    removed = copied = 0

    def remove(self, seq: int, p0: int, p1: int = -1) -> bool:
        self.removed += 1
        return super().remove(seq, p0, p1)

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        assert p0 < p1, "nothing to copy"
        self.copied += 1
        super().copy(source, target, p0, p1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    """A tree, and the nodes of it that are accepted."""
    tree = DraftTree(8)
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        if tree.can_add(parent):
            tree.add(draw(st.integers(0, END)), parent, 0.5, 0)
    path: list[int] = []
    while (children := tree.children_of(path[-1] if path else ROOT)) and draw(st.booleans()):
        path.append(draw(st.sampled_from(children)))
    return tree, path


def step(slot: Slot, tree: DraftTree, path: Sequence[int]) -> None:
    layout = tree.layout() if len(tree) else None
    slot.tokens = [*slot.tokens[: slot.n_past], 1, *(tree.token[node] for node in path)]
    slot.fill_step(tree, layout)
    assert slot.backend.decode() == 0
    assert slot.accept(tree, layout, path)


def prompt(slot: Slot, n: int) -> None:
    batch = BatchBuilder()
    slot.add_prompt(batch, [2] * n)
    batch.load(slot.backend.batch)
    assert slot.backend.decode() == 0
    slot.tokens = [*slot.tokens[: slot.n_past], *[2] * n]
    slot.commit(n)


def check(slot: Slot) -> None:
    """The first id holds all tokens, the others a beginning of them, and no id anything else."""
    assert isinstance(slot.backend, FakeBackend)
    for branch in range(slot.n_branches):
        seq = slot.first_id + branch
        held = sorted((cell.pos, cell.token) for cell in slot.backend.cells if seq in cell.ids)
        assert held == list(enumerate(slot.tokens[: slot.n_past]))[: len(held) if branch else None]


@pytest.mark.parametrize("n_slots", [1, 3])
@given(st.lists(st.one_of(steps(), st.integers(1, 9)), max_size=8), st.integers(0, 20))
def test_cells_are_those_of_the_committed_tokens(
    n_slots: int, doings: list[tuple[DraftTree, list[int]] | int], back: int
) -> None:
    backend = Counting(n_ctx=1000, n_slots=n_slots)
    slot = Slot(backend, 8 * (n_slots - 1))
    for doing in doings:
        if isinstance(doing, int):
            prompt(slot, doing)
        else:
            tree, path = doing
            backend.removed = 0
            step(slot, tree, path)
            assert backend.removed <= tree.n_leaves
        check(slot)
    slot.rewind(max(0, slot.n_past - back))
    check(slot)
    step(slot, DraftTree(), [])
    other = Slot(backend, 0)
    if n_slots > 1:
        other.share_prefix(slot, slot.n_past)
        check(other)
        assert other.tokens[: other.n_past] == slot.tokens[: slot.n_past]
        slot.clear()
        check(other)


def chain(n: int) -> DraftTree:
    tree = DraftTree(8)
    for node in range(n):
        tree.add(3, node - 1, 0.5, 0)
    return tree


def test_a_step_passes_over_the_cells_as_often_as_it_must() -> None:
    backend = Counting(n_ctx=1000, n_slots=8)
    slot = Slot(backend, 8)
    prompt(slot, 20)
    step(slot, DraftTree(), [])
    assert (backend.removed, backend.copied) == (0, 0), "a plain step leaves nothing to free"
    step(slot, chain(5), [0, 1, 2, 3, 4])
    assert (backend.removed, backend.copied) == (0, 0), "nor does a chain that was right"
    step(slot, chain(5), [0])
    assert (backend.removed, backend.copied) == (1, 0)
    two = chain(1)
    two.add(4, ROOT, 0.5, 0)
    step(slot, two, [])
    assert (backend.removed, backend.copied) == (3, 1), "the second id missed what the chains gave"
    step(slot, two, [])
    assert (backend.removed, backend.copied) == (5, 1)
    step(slot, two, [1])
    assert (backend.removed, backend.copied) == (6, 2), "the first id gets what the second was right about"
    check(slot)
