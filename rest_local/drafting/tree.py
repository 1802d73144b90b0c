"""The draft tree: drafted tokens below the root, and their order in a batch.

Contract: pure data. Nodes are added parent first (`parent[i] < i`, -1 is the root). `layout` orders them depth first
and the likeliest branch first, so that accepted tokens usually are in neighbouring KV cells (DESIGN.md section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROOT = -1
MIN_PROBABILITY = 0.02  # a node below this probability paid on no measured cost curve
DEPTH = 16  # tokens of a branch at most, until as many were accepted without a rejected one


@dataclass(slots=True)
class DraftTree:
    """At most `max_leaves` leaves. By node: `token`, `parent`, `depth` (1 below the root), `probability` (joint),
    `source`.
    """

    max_leaves: int = 0
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    root_children: list[int] = field(default_factory=list)
    n_leaves: int = 0

    def __len__(self) -> int:
        return len(self.token)

    def children_of(self, node: int) -> list[int]:
        return self.root_children if node == ROOT else self.children[node]

    def path(self, node: int) -> list[int]:
        """The tokens from the child of the root down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with this token, if there is one."""
        for child in self.children_of(node):
            if self.token[child] == token:
                return child
        return None

    def can_add(self, parent: int) -> bool:
        """Whether `parent` can get another child. A second child is a new leaf, and a slot has `max_leaves` sequence
        ids for leaves.
        """
        return self.n_leaves < self.max_leaves or (parent != ROOT and not self.children[parent])

    def add(self, token: int, parent: int, probability: float, source: int) -> int:
        """Add a node and return its number."""
        node = len(self.token)
        if parent == ROOT:
            self.n_leaves += 1
            self.root_children.append(node)
            self.depth.append(1)
        else:
            siblings = self.children[parent]
            if siblings:
                self.n_leaves += 1
            siblings.append(node)
            self.depth.append(self.depth[parent] + 1)
        self.token.append(token)
        self.parent.append(parent)
        self.probability.append(probability)
        self.source.append(source)
        self.children.append([])
        return node

    def cut(self, n: int) -> DraftTree:
        """The tree of the first n nodes. Parents come first, so every prefix is a tree."""
        if n >= len(self):
            return self
        children = [[child for child in own if child < n] for own in self.children[:n]]
        return DraftTree(
            self.max_leaves,
            self.token[:n],
            self.parent[:n],
            self.depth[:n],
            self.probability[:n],
            self.source[:n],
            children,
            [child for child in self.root_children if child < n],
            children.count([]),
        )

    def layout(self) -> Layout:
        """The order of the nodes in a batch. Takes about 1 us for each node; a chain is faster."""
        if self.n_leaves == 1:
            n = len(self.token)
            return Layout(list(range(n)), [0] * n, [1] * n)
        order: list[int] = []
        stack = self.root_children[::-1]
        children = self.children
        low = [0] * len(children)
        count = [0] * len(children)
        leaf = 0
        while stack:
            node = stack.pop()
            order.append(node)
            low[node] = leaf  # the order is depth first, so the next leaf is the first one below
            if own := children[node]:
                stack += own[::-1]
            else:
                count[node] = 1
                leaf += 1
        parent = self.parent
        for node in range(len(order) - 1, 0, -1):  # bottom up, because children have higher numbers
            above = parent[node]
            if above != ROOT:
                count[above] += count[node]
        return Layout(order, low, count)


@dataclass(frozen=True, slots=True)
class Layout:
    """`order[k]` is the node at index k of the batch after the root. A node has the leaf ids low..low+count-1."""

    order: list[int]
    low: list[int]
    count: list[int]
