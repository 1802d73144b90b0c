"""Drafting ahead: the next draft is made while a step is computed, for the likeliest outcome. It changes no token, and
what is drafted and learned is what would have been drafted and learned afterwards.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_backend import Draws
from support.fake_device import FakeDevice
from support.fake_sequences import run, said, scheduler_of, sequence_of
from support.fake_sources import Keen
from support.prices import FLAT

from rest_local.decoding.core import Pass, RequestState
from rest_local.decoding.forward import Forward
from rest_local.decoding.speculation import Speculation
from rest_local.decoding.verify import Relaxed
from rest_local.drafting.sources import SourceRows, Sources
from rest_local.drafting.tree import ROOT, Draft
from rest_local.kv_cache.backend import Capability
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepContext
from rest_local.retrieval.growing import TAIL, GrowingText

SHORT = Capability("tree", "drafts of three nodes: answers of the fake model are short", longest=3)
BYTES = [bytes([number]) for number in range(256)]


class Spelling:
    """A vocabulary of bytes."""

    def piece(self, token: int) -> bytes:
        return BYTES[token]

    def tokenize(self, text: bytes) -> Any:
        return np.frombuffer(text, np.uint8).astype(np.int32)


def seen(rows: list[SourceRows]) -> list[Any]:
    first = [each.candidates(range(len(each)), each.begin) for each in rows]
    return [(each.source, list(each.match), each.continuations, found) for each, found in zip(rows, first, strict=True)]


PROMPT = b'Read: "1: def one():\\n2:     return 1\\n3:\\n4: def two():\\n5:     return 2\\n"\nWrite it as a string.\n'
ANSWER = (
    b'{"old": "def one():\\n    return 1\\n\\ndef two():", "new": "def one():\\n    return 12\\n\\ndef two():"}\n' * 2
)


@pytest.mark.parametrize("predicted", [b"", ANSWER, ANSWER[:40] + b"other" + ANSWER[60:]])
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=40))
def test_rows_after_tokens_are_those_that_come_when_they_are_added(
    predicted: bytes, steps: list[tuple[int, int, bool]]
) -> None:
    """Whether the tokens before were assumed rightly, wrongly or not at all. With edits, a prediction and own text."""
    ahead, after = (Sources([], 256, spelling=Spelling()) for _ in range(2))
    for sources in (ahead, after):
        sources.restart(list(PROMPT))
        sources.predict(list(predicted))
        sources.rows()
    at = 0
    for n, n_assumed, wrong in steps:
        assumed = list(ANSWER[at : at + n_assumed])
        if wrong:
            assumed[-1:] = b"#"
        found = seen(ahead.rows_after(assumed, begin=n)) if assumed else None
        tokens = list(ANSWER[at : at + n])
        at += len(tokens)
        if not tokens:
            break
        for sources in (ahead, after):
            sources.extend(tokens)
        if assumed == tokens:
            assert found == seen(after.rows())
        else:
            assert seen(ahead.rows()) == seen(after.rows())
        assert [ahead.repeats(n) for n in (1, 2, 8)] == [after.repeats(n) for n in (1, 2, 8)]


def test_rows_are_those_of_the_sequence_where_nothing_was_added() -> None:
    """A step that broke off adds no tokens."""
    sources, other = Sources([], 256), Sources([], 256)
    for each in (sources, other):
        each.restart(list(PROMPT))
    sources.rows_after(list(PROMPT[:8]))
    assert seen(sources.rows()) == seen(other.rows())
    sources.rows_after(list(PROMPT[:8]))
    for each in (sources, other):
        each.restart(list(PROMPT[:40]))
    assert seen(sources.rows()) == seen(other.rows())


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(0, 60), st.lists(st.integers(0, 3)))
def test_a_text_that_was_cut_back_is_searched_as_one_that_never_was_longer(
    text: list[int], kept: int, more: list[int]
) -> None:
    cut, plain = GrowingText(tail=32), GrowingText(tail=32)
    kept = min(kept, len(text))
    cut.extend(text)
    cut.rows(text[-4:])
    cut.truncate(kept)
    plain.extend(text[:kept])
    for each in (cut, plain):
        each.extend(more)
    sought = [*text[:kept], *more][-4:] or [1]
    assert (cut.rows(sought).match.tolist(), cut.rows(sought).positions.tolist()) == (
        plain.rows(sought).match.tolist(), plain.rows(sought).positions.tolist(),
    )  # fmt: skip


def test_tokens_that_would_have_to_be_sorted_are_not_assumed() -> None:
    sources = Sources([], 256)
    sources.restart([1] * (TAIL - 3))
    assert sources.rows_after([1, 1])
    assert not sources.rows_after([1, 1, 1])


class Recorder(Keen):
    """A policy that records what it drafts."""

    drafts: list[Any]
    used = 0

    def draft(self, sources: Any, at: StepContext) -> Draft:
        prepared = self._prepared
        drafted = super().draft(sources, at)
        type(self).used += prepared is not None and drafted is prepared.growth.draft
        tree = drafted.tree
        self.drafts.append((tree.token, tree.parent, tree.probability, tree.source, tree.children, tree.n_leaves))
        return drafted


def in_any_time(forward: Forward, at_work: Pass) -> list[tuple[RequestState, Exception]]:
    """Draft ahead as `Forward.draft_ahead` does, however long the pass takes."""
    for state in at_work.running:
        if not state.done and not at_work.parts:
            state.speculation.draft_ahead(state.answer.left)
    return []


def answers(prompts: list[list[int]], ahead: bool, seeds: bool, n: int, monkeypatch: Any) -> tuple[Any, ...]:
    """Return what was said, drafted and learned."""
    with monkeypatch.context() as patch:
        if not ahead:
            patch.setattr(Speculation, "draft_ahead", lambda steps, left: None)
        patch.setattr(Forward, "draft_ahead", in_any_time)
        patch.setattr("time.perf_counter", iter(np.arange(1e6) * 1e-6).__next__)
        policy = Recorder(FLAT)
        policy.drafts, Recorder.used = [], 0
        device = FakeDevice(n_ctx=1024, n_slots=len(prompts))
        sequences = []
        for seed, prompt in enumerate(prompts):
            expected = said(prompt, n, Draws(seed, 0.7) if seeds else None)
            sources = Sources([], 256)
            sequences.append(
                sequence_of(
                    device, prompt, n, Draws(seed, 0.7) if seeds else None, sources, policy,
                    prediction=[*expected[: n // 2], 3, 3, *expected[n // 2 + 1 :]],
                )
            )  # fmt: skip
        scheduler = scheduler_of(device, capability=SHORT, overlaps=True)
        run(scheduler, sequences)
        shared = policy.shared
        learned = copy.deepcopy((shared.acceptance._hits, shared.acceptance._seen, shared.calibrator._weights))
        return [state.result.tokens for state in sequences], policy.drafts, learned, Recorder.used


def long_prompts(n: int, seeds: bool) -> list[list[int]]:
    """Return prompts with answers of at least 30 tokens. The number of each is its seed."""
    found: list[list[int]] = []
    for number in range(1000):
        prompt = [number % 5, number % 7, number % 11]
        if len(found) < n and len(said(prompt, 120, Draws(len(found), 0.7) if seeds else None)) > 30:
            found.append(prompt)
    return found


@pytest.mark.parametrize("seeds", [False, True])
@pytest.mark.parametrize("n_requests", [1, 3])
def test_what_is_drafted_and_learned_is_the_same(seeds: bool, n_requests: int, monkeypatch: Any) -> None:
    prompts = long_prompts(n_requests, seeds)
    said_ahead, drafts_ahead, learned_ahead, used = answers(prompts, True, seeds, 70, monkeypatch)
    said_after, drafts_after, learned_after, unused = answers(prompts, False, seeds, 70, monkeypatch)
    assert said_ahead == said_after
    assert used > 3
    assert not unused
    if n_requests == 1:
        assert drafts_ahead == drafts_after
        assert learned_ahead == learned_after


def test_the_likeliest_outcome_is_a_branch_and_the_token_after_it() -> None:
    sources = Sources([], 256)
    sources.restart([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    policy = Auto(FLAT)
    policy.begin(11)
    drafted = policy.draft(sources, StepContext(11, 4, 8))
    assert drafted.tree.token == [4, 5, 6, 7]
    assert drafted.likely_outcome(drafted.tree, 0.0) == [4, 5, 6, 7, 8]
    assert drafted.likely_outcome(drafted.tree.cut(2), 0.0) == [4, 5, 6]
    assert drafted.likely_outcome(drafted.tree, 1.0) == []
    assert Draft(drafted.tree).likely_outcome(drafted.tree, 0.0) == []
    assert drafted.tree.parent[0] == ROOT


class Failing(Keen):
    """A policy that cannot prepare anything."""

    def prepare(self, *_: Any) -> None:
        raise RuntimeError("prepare")


def test_a_request_whose_next_draft_cannot_be_prepared_ends_alone() -> None:
    device = FakeDevice(n_ctx=512, n_slots=2)
    (prompt,) = long_prompts(1, False)
    expected = said(prompt, 40, None)
    failing = sequence_of(device, prompt, 40, None, Sources([], 256), Failing(FLAT), prediction=expected)
    other = sequence_of(device, [3, 4], 40)
    run(scheduler_of(device, capability=SHORT, overlaps=True), [failing, other])
    assert failing.error is not None
    assert failing.result.tokens == expected[: len(failing.result.tokens)]
    assert other.result.tokens == said([3, 4], 40, None)


class AllowsAll:
    """A grammar by which every token is allowed, and none is the only one."""

    is_free = False
    longest = staticmethod(len)

    def forced(self, most: int, path: Sequence[int] = ()) -> None:
        return None


@pytest.mark.parametrize("rule", ["relaxed", "constraint"])
def test_relaxed_verification_and_a_grammar_draft_nothing_ahead(rule: str) -> None:
    """What they accept depends on more than the draft, so no outcome is assumed."""
    device = FakeDevice(n_ctx=512, n_slots=1)
    (prompt,) = long_prompts(1, False)
    expected = said(prompt, 40, None)
    request = sequence_of(device, prompt, 40, None, Sources([], 256), Failing(FLAT), prediction=expected)
    setattr(request.speculation.verifier, rule, {"relaxed": Relaxed(1, 1.0), "constraint": AllowsAll()}[rule])
    run(scheduler_of(device, capability=SHORT, overlaps=True), [request])
    assert request.error is None
    assert request.result.tokens == expected
