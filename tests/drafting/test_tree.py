"""In the layout of every possible tree a node has the sequence ids of the leaves below it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.fake_backend import FakeBackend

from rest_local.drafting.tree import ROOT, DraftTree
from rest_local.kv_cache.slot import BatchBuilder, Slot
from rest_local.llama.context import Batch


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree(draw(st.integers(1, 8)))
    for _ in range(draw(st.integers(1, 40))):
        parent = draw(st.integers(ROOT, len(tree) - 1))
        if tree.can_add(parent):
            tree.add(draw(st.integers(0, 9)), parent, 0.5, 0)
    return tree


def leaves_below(tree: DraftTree, node: int) -> int:
    return sum(leaves_below(tree, c) for c in tree.children[node]) or 1


@given(trees())
def test_layout_gives_each_node_the_ids_of_its_leaves(tree: DraftTree) -> None:
    layout = tree.layout()
    assert sorted(layout.order) == list(range(len(tree)))
    place = {node: k for k, node in enumerate(layout.order)}
    for node in range(len(tree)):
        own = set(range(layout.low[node], layout.low[node] + layout.count[node]))
        below = [set(range(layout.low[c], layout.low[c] + layout.count[c])) for c in tree.children[node]]
        if below:
            assert own == set().union(*below)
            assert len(own) == sum(map(len, below)), "siblings share no id"
        assert len(own) == leaves_below(tree, node)
        parent = tree.parent[node]
        assert parent == ROOT or place[parent] < place[node]
        assert tree.depth[node] == (1 if parent == ROOT else tree.depth[parent] + 1)
    assert sum(layout.count[c] for c in tree.root_children) == tree.n_leaves


@given(trees(), st.integers(0, 40))
def test_every_prefix_is_a_tree(tree: DraftTree, n: int) -> None:
    part = tree.cut(n)
    assert part.token == tree.token[:n]
    assert part.parent == tree.parent[:n]
    assert part.n_leaves == sum(1 for node in range(len(part)) if not part.children[node])
    again = DraftTree(tree.max_leaves)
    for node in range(len(part)):
        again.add(tree.token[node], tree.parent[node], tree.probability[node], tree.source[node])
    assert part == again


@given(trees())
def test_a_batch_holds_the_layout(tree: DraftTree) -> None:
    backend = FakeBackend()
    layout, batch = tree.layout(), backend.batch
    slot = Slot(backend)
    slot.tokens, slot.n_past = [*[1] * 100, 7], 100
    builder = BatchBuilder()
    builder.add_step(slot, tree, layout)
    builder.load(batch)
    assert batch.struct.n_tokens == len(tree) + 1
    nodes = [(7, 0, 0, 8), *((tree.token[n], tree.depth[n], layout.low[n], layout.count[n]) for n in layout.order)]
    for i, (token, depth, low, count) in enumerate(nodes):
        assert batch.struct.token[i] == token
        assert batch.struct.pos[i] == 100 + depth
        ids = [batch.struct.seq_id[i][k] for k in range(batch.struct.n_seq_id[i])]
        assert ids == list(range(low, low + count))
        assert batch.struct.logits[i] == 1


def test_a_batch_above_its_capacity_cannot_be_built() -> None:
    batch = Batch(8, 2)
    refused = [(np.zeros(9), 0, 1), (np.zeros(0), 0, 1), (np.zeros(4), 0, 3), (np.zeros(4), 0, 0)]
    for tokens, first, count in refused:
        try:
            batch.fill(tokens, 0, first, count, 1)
        except ValueError:
            continue
        raise AssertionError(f"{len(tokens)} tokens with {count} ids were accepted")
    batch.fill(np.zeros(8), 0, 0, 2, 1)
