"""A draft node that the grammar forbids is never submitted, and constrained answers are those of plain decoding."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import few
from support.fake_backend import FakeBackend
from support.fake_sequences import Alone, Silent

from benchmarks.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.decoding.verify import prune
from rest_local.drafting.sources import SOURCE_NUMBER, Lookup
from rest_local.drafting.tree import ROOT, Draft, DraftTree
from rest_local.grammar import gbnf, json_schema, lark
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.sampler import Sampler, Sampling
from rest_local.llama.vocabulary import Vocabulary
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Policy, StepContext, StepCost

CONTEXT = SOURCE_NUMBER["context"]
SCHEMA_LIKE = gbnf('root ::= "{" pair ("," pair)* "}"\npair ::= "\\"" [a-d]{1,3} "\\":" [0-9]{1,3}')
TREE = Capability("tree", "fake")


class Alternating:
    """A language over small numbers: each token differs in parity from the one before."""

    is_free = False

    def longest(self, tokens: Sequence[int]) -> int:
        pairs = zip([0, *tokens], tokens)  # noqa: B905 - the first has one more
        return next((n for n, (before, token) in enumerate(pairs) if token % 2 == before % 2), len(tokens))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree(max_leaves=99)
    for node in range(draw(st.integers(0, 25))):
        parent = draw(st.integers(ROOT, node - 1))
        tree.add(draw(st.integers(0, 6)), parent, 0.5 / (node + 1), CONTEXT)
    return tree


def _way(tree: DraftTree, node: int) -> list[int]:
    return [] if node == ROOT else [*_way(tree, tree.parent[node]), tree.token[node]]


@given(trees())
def test_what_is_kept_is_what_a_walk_from_the_root_allows(tree: DraftTree) -> None:
    pruned = prune(tree, Alternating())
    expected = [n for n in range(len(tree)) if all(a % 2 != b % 2 for a, b in zip([0, *_way(tree, n)], _way(tree, n)))]  # noqa: B905
    assert [_way(pruned, n) for n in range(len(pruned))] == [_way(tree, n) for n in expected]
    assert pruned.probability == [tree.probability[n] for n in expected]
    assert (pruned is tree) == (len(expected) == len(tree))
    assert pruned.n_leaves == sum(not pruned.children_of(n) for n in range(len(pruned)))


def _row(history: Sequence[int], size: int, likely: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """Script logits over the whole vocabulary: a few tokens matter, and ends are often among the likeliest."""
    digest = hashlib.blake2b(np.array(history[-2:], "<i4").tobytes(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    row = np.full(size, -30.0, np.float32)
    row[list(likely)] = 3 * rng.standard_normal(len(likely))
    row[list(ends)] = 4 * rng.standard_normal(len(ends))
    return row.astype(np.float32)


class Guessing(Policy):
    """A policy that drafts the likeliest tokens and random ones, in a tree. `proposed`: how many."""

    name = "guessing"

    def __init__(self, seed: int, compute: Callable[[Sequence[int]], np.ndarray], tokens: list[int]) -> None:
        self._rng, self._compute, self.tokens = np.random.default_rng(seed), compute, tokens
        self.proposed = 0

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        tree = DraftTree(at.leaves)
        grown = [(ROOT, list(self.tokens))]
        while grown and len(tree) < at.limit:
            node, history = grown.pop(0)
            best = np.argsort(-self._compute(history))[:4]
            for token in self._rng.choice(best, 2, replace=False).tolist():
                if tree.can_add(node) and len(tree) < at.limit:
                    grown.append((tree.add(token, node, 0.5, CONTEXT), [*history, token]))
        self.proposed += len(tree)
        return Draft(tree, lookup_us=1.0)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        self.tokens.extend(tokens)


OPTIONS: dict[str, dict[str, object]] = {
    "grammar": {"grammar": SCHEMA_LIKE},
    "grammar and draws": {"grammar": SCHEMA_LIKE, "temperature": 1.2},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "penalties, draws and a grammar": {"grammar": SCHEMA_LIKE, "frequency_penalty": 1.0, "temperature": 0.9},
    "biases": {"logit_bias": ((3, -math.inf), (40, 4.0)), "temperature": 0.7},
    "nothing": {},
    "draws": {"temperature": 1.0},
}


LONG_ANSWERS = 1  # a seed with which no answer ends before something is drafted, and something is forbidden


class Watched(FakeBackend):
    """Asserts that the grammar of a request allows every node that is submitted. `submitted`: how many."""

    task: Alone
    submitted = 0

    def decode(self) -> int:
        if constraint := self.task.sequence.speculation.verifier.constraint:
            tree = self.task.sequence.speculation.tree
            assert prune(tree, constraint) is tree
            self.submitted += len(tree)
        return super().decode()


@pytest.mark.parametrize(
    ("name", "min_tokens"), [*((name, 0) for name in OPTIONS), ("grammar and draws", 7), ("draws", 7)]
)
@few(4)
@given(seed=st.integers(0, 2**31))
@example(seed=LONG_ANSWERS)
def test_drafted_is_plain(vocabulary: Vocabulary, name: str, min_tokens: int, seed: int) -> None:
    """Sampler state advances once per accepted token: with drafts pruned, with drafts left as they are, and with none
    the same tokens come. What the grammar forbids is dropped before the batch is made."""
    likely = [*vocabulary.tokenize('{"}:,').tolist(), *vocabulary.tokenize("abcd0123").tolist(), 3, 40]
    ends = vocabulary.ends.tolist()
    sampling = Sampling(seed=seed, **OPTIONS[name])  # type: ignore[arg-type]

    def compute(history: Sequence[int]) -> np.ndarray:
        return _row(history, vocabulary.size, likely, ends)

    def run(kind: Capability, *, pruned: bool = False) -> list[int]:
        with Sampler(vocabulary, sampling, min_tokens=min_tokens) as sampler:
            prompt = [5, 6, 7 + seed % 90]
            policy, backend = Guessing(seed, compute, list(prompt)), Watched()
            backend.n_vocab = vocabulary.size
            backend.compute = lambda history, n: compute(history)
            constraint = sampler.constraint if pruned else None
            backend.task = task = Alone(
                backend, Slot(backend), policy, Silent(), sampler, kind, vocabulary.is_end, constraint=constraint
            )
            task.evaluate(prompt)
            sampler.observe(prompt)
            out: list[int] = []
            while len(out) < 30 and not (out and vocabulary.is_end(out[-1])):
                out += task.step(30 - len(out)).tokens
            assert kind is TREE or task.statistics.drafted == 0
            if seed == LONG_ANSWERS and kind is TREE:
                assert task.statistics.drafted > 0
                assert constraint is None or sampling.grammar is None or 0 < backend.submitted < policy.proposed
            return out

    plain = run(Capability("none", "plain"))
    assert run(TREE, pruned=True) == plain
    assert run(TREE) == plain
    assert not any(vocabulary.is_end(token) for token in plain[:-1])


# ---- Of a real engine ----------------------------------------------------------------------------------------------


DEMO = Path(__file__).parents[2] / "models" / "demo.gguf"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["self", "value", "name", "index"]}, "minItems": 6, "maxItems": 12},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
}
PROMPT = 'class Node:\n    """A node: {"name": "self", "tags": ["self", "self", "value", "value"], "size": 12}"""\n\n'

FORCED: dict[str, dict[str, object]] = {
    "schema": {"grammar": json_schema(SCHEMA)},
    "schema, draws and penalties": {
        "grammar": json_schema(SCHEMA), "temperature": 0.9, "seed": 5, "frequency_penalty": 0.3,
    },
    "grammar": {"grammar": gbnf('root ::= ("    self." [a-z_]{1,12} " = " [a-z_]{1,12} "\\n"){3,6}')},
    "forced call": {
        "grammar": lark('start: "<call>{\\"name\\": \\"set\\", \\"to\\": " number "}</call>"\nnumber: /[0-9]{1,3}/'),
        "temperature": 0.7,
        "seed": 2,
    },
}  # fmt: skip


class GrammarAlone(Auto):
    """Drafts forced text and nothing else, at the prices of a GPU."""

    def looks_up(self, at: StepContext, repeats: object) -> bool:
        return False

    def account(self, drafted: Draft, done: StepCost) -> None:
        ms = float(self.shared.curve.at(done.n_ctx)[done.n_nodes])
        super().account(drafted, done._replace(decode_ms=ms, driver_ms=0.1, updates_curve=False))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(DEMO, n_ctx=512, exact=True, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("name", FORCED)
def test_an_answer_drafted_from_its_grammar_is_plain(engine: Engine, name: str) -> None:
    """Greedy and seeded, in chains, bit for bit; twice, since the second time more is known."""
    policy = GrammarAlone(load_curve("rtx3090-8b-q4_0"))
    sampling = Sampling(**FORCED[name])  # type: ignore[arg-type]
    plain = engine.generate(PROMPT, max_tokens=90, sampling=sampling, policy="off").wait()
    for _ in range(2):
        result = engine.generate(PROMPT, max_tokens=90, sampling=sampling, policy=policy.fork()).wait()
        assert result.tokens == plain.tokens
        assert result.text == plain.text
        assert result.finish_reason == plain.finish_reason
    assert set(result.draft.by_source) == {"grammar"}
    assert result.draft.by_source["grammar"].accepted > 5
