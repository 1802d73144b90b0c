"""Forced text as a source of drafts: answers stay those of plain constrained decoding, whatever it drafts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few
from support.fake_backend import FakeBackend
from support.fake_sequences import Alone, Silent
from support.prices import FLAT
from support.spelling import twin_of

from rest_local.drafting.sources import grammar_cell
from rest_local.drafting.tree import Draft
from rest_local.grammar import Grammar, gbnf, json_schema, lark
from rest_local.grammar.constraint import CERTAIN, Constraint, ForcedText
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.sampler import Sampler, Sampling
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext

TREE, CHAIN, PLAIN = Capability("tree", "fake"), Capability("chain", "fake"), Capability("none", "plain")
FIELDS = {
    "width": {"type": "integer", "maximum": 99, "minimum": 0},
    "ready": {"type": "boolean"},
    "kind": {"enum": ["ab", "abc", "d"]},
}
GRAMMARS: dict[str, Grammar] = {
    "schema": json_schema({"type": "object", "properties": FIELDS, "required": list(FIELDS)}),
    "list": gbnf('root ::= "{" pair ("," pair){2,4} "}"\npair ::= "\\"number-" [a-d] "\\": " [0-9]{1,2}'),
    "call": lark('start: "<call>\\n" body "\\n</call>"\nbody: %json {"const": {"value": [1, 2]}}'),
    "digits": lark("start: /[0-9]{40}/"),
}  # fmt: skip


class Blind(Auto):
    """Looks nothing up, and learns no price from the fake's times."""

    def __init__(self) -> None:
        super().__init__(FLAT)

    def looks_up(self, at: StepContext, repeats: object) -> bool:
        return False

    def account(self, drafted: Draft, done: Any) -> None:
        self.budget.credit = 5.0


def _row(vocabulary: Vocabulary, seed: int, history: Sequence[int]) -> np.ndarray:
    """Return logits that depend on the newest two tokens."""
    rng = np.random.default_rng([seed, *history[-2:]])
    row: np.ndarray = rng.standard_normal(vocabulary.size).astype(np.float32)
    row[vocabulary.ends] += 3.0
    return row


def generate(
    vocabulary: Vocabulary,
    sampling: Sampling,
    kind: Capability,
    policy: Auto | None = None,
    seed: int = 1,
    n: int = 60,
    watch: Callable[[Alone], None] = lambda task: None,
    sources: Any = None,
) -> Alone:
    """Return the generation at its end. Its answer is `answer_of`."""
    backend = FakeBackend()
    backend.n_vocab = vocabulary.size
    backend.compute = lambda history, _: _row(vocabulary, seed, history)
    with Sampler(vocabulary, sampling) as sampler:
        own = policy or Blind()
        constraint = None if sampler.constraint.is_free else sampler.constraint
        task = Alone(
            backend, Slot(backend), own, sources or Silent(), sampler, kind, vocabulary.is_end, constraint=constraint
        )
        task.evaluate([5, 6, 7])
        said = 0
        while said < n and not (said and vocabulary.is_end(task.sequence.text.tokens[-1])):
            said += len(task.step(n - said).tokens)
            watch(task)
    return task


def answer_of(task: Alone) -> list[int]:
    return task.sequence.text.tokens[3:]


def test_forced_text_saves_passes_and_is_counted_as_a_source(vocabulary: Vocabulary) -> None:
    """An engine that has seen a few answers, and a model that splits text as its vocabulary does or by characters."""
    sampling = Sampling(grammar=GRAMMARS["list"], seed=1)
    policy = Blind()
    steps = [generate(vocabulary, sampling, TREE, policy.fork()).statistics for _ in range(4)]
    assert steps[-1].steps <= 0.6 * steps[-1].generated
    counts = steps[-1].by_source["grammar"]
    assert steps[-1].accepted == counts["accepted"] > 20
    assert steps[-1].drafted == counts["drafted"]
    assert steps[-1].lookups_skipped >= steps[-1].steps - 1  # the last step has no room for a draft
    assert not steps[-1].lookup_us


class Lying:
    """In place of `Constraint.forced`: text that is allowed, and hardly ever what comes."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._tokens, self._rng = vocabulary.grammar_tokens(), np.random.default_rng(seed)
        self.lies = 0

    def __call__(self, constraint: Constraint, most: int, path: Sequence[int]) -> ForcedText | None:
        twin, text = twin_of(constraint), b""
        if not all(map(twin.follow, path)):
            return None
        while len(text) < min(most, 4):
            allowed = [byte for byte, token in enumerate(self._tokens.of_byte) if token >= 0 and twin.allows(token)]
            if not allowed:
                break
            text += bytes([int(self._rng.choice(allowed))])
            twin.advance(self._tokens.of_byte[text[-1]])
        self.lies += bool(text)
        return ForcedText(self._tokens, [], text, bytes(len(text)), {}, True) if text else None


@pytest.mark.parametrize("temperature", [0.0, 1.1])
@few(2)
@given(seed=st.integers(0, 2**31))
def test_a_source_that_lies_changes_no_token(vocabulary: Vocabulary, temperature: float, seed: int) -> None:
    lying = Lying(vocabulary, seed)
    for name in ("digits", "list", "schema"):
        sampling = Sampling(grammar=GRAMMARS[name], temperature=temperature, seed=seed)
        plain = generate(vocabulary, sampling, PLAIN, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Constraint, "forced", lambda self, most, path=(): lying(self, most, path))
            task = generate(vocabulary, sampling, TREE, seed=seed)
        assert answer_of(task) == answer_of(plain)
    assert lying.lies


def test_a_source_that_lies_is_believed_less_and_less(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probability begins near 1, falls with each lie, and in the end nothing is drafted from it."""
    lying, policy = Lying(vocabulary, 1), Blind()
    monkeypatch.setattr(Constraint, "forced", lambda self, most, path=(): lying(self, most, path))
    cell = grammar_cell(CERTAIN, False, 0)
    estimates, drafted = [policy.shared.acceptance.estimate(cell)], []
    assert estimates[0] >= 0.9
    for seed in range(8):
        task = generate(vocabulary, Sampling(grammar=GRAMMARS["digits"]), TREE, policy.fork(), seed, 40)
        estimates.append(policy.shared.acceptance.estimate(cell))
        drafted.append(task.statistics.drafts / task.statistics.steps)
    assert estimates[-1] < 0.3 < estimates[0]
    assert drafted[0] > 0.3
    assert drafted[-1] < 0.5 * drafted[0]


def test_a_rejected_draft_leaves_nothing_behind(vocabulary: Vocabulary) -> None:
    """After every step the same text is forced as for an answer that said the same tokens and rejected nothing."""
    grammar = GRAMMARS["schema"]
    rejected = 0
    for seed in range(4):
        seen: list[tuple[list[int], bytes]] = []

        def watch(task: Alone) -> None:
            nonlocal rejected
            constraint, tree = task.sequence.speculation.verifier.constraint, task.sequence.speculation.tree
            assert constraint is not None
            found = constraint.forced(32)
            rejected += len(tree) > 0 and task.sequence.text.tokens[-1] not in tree.token
            seen.append((answer_of(task), found.text if found else b""))  # noqa: B023

        generate(vocabulary, Sampling(grammar=grammar, temperature=1.0, seed=seed), TREE, seed=seed, watch=watch)
        for tokens, text in seen:
            fresh = Constraint(vocabulary, grammar)
            fresh.forced(32)
            for token in tokens:
                if not vocabulary.is_end(token):
                    fresh.advance(token)
            found = None if vocabulary.is_end(tokens[-1]) else fresh.forced(32)
            assert (found.text if found else b"") == text
    assert rejected > 5
