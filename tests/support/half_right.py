"""A policy that drafts the known answer, right for some tokens and then wrong, to show that drafts change nothing."""

from collections.abc import Sequence

import numpy as np

from rest_local import Engine
from rest_local.decoding.stream import Result
from rest_local.drafting.sources import Lookup
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.planning.policy import Policy, StepContext, StepCost

TEXT = "for number in range(10): print(number)\n"


class HalfRight(Policy):
    """Drafts the known answer, right for some tokens and then wrong, and wrong branches in addition."""

    name = "half right"

    longest = 17

    def __init__(self, known: Sequence[int], n_vocab: int, seed: int = 3) -> None:
        self.accepted = list[int]()
        self._length = 0  # The length of the text so far.
        self._known, self._n_vocab = list(known), n_vocab
        self._rng = np.random.default_rng(seed)

    def begin(self, n_ctx: int) -> None:
        self._length = n_ctx

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        tree = DraftTree(at.leaves)
        following = self._known[self._length : self._length + int(self._rng.integers(1, self.longest))]
        right = int(self._rng.integers(0, len(following) + 1))
        node = ROOT
        for number, token in enumerate(following):
            if len(tree) < at.limit and at.leaves > 1 and tree.can_add(node) and self._rng.random() < 0.3:
                tree.add(self._wrong(token), node, 0.1, 0)
            if len(tree) < at.limit and tree.can_add(node):
                node = tree.add(token if number < right else self._wrong(token), node, 0.9, 0)
        return Draft(tree)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        self.accepted.append(done.n_accepted)
        self._length += len(tokens)

    def _wrong(self, token: int) -> int:
        return (token + 1 + int(self._rng.integers(0, 50))) % self._n_vocab


def finish(engine: Engine, prompt: Sequence[int], n: int, **options: object) -> Result:
    stream = engine.generate(prompt, max_tokens=n, **options)  # type: ignore[arg-type]
    for _ in stream:
        pass
    return stream.result


def half_right(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> HalfRight:
    return HalfRight([*prompt, *answer], engine.model.n_vocab)
