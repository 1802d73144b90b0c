"""A replay counts the steps of a decoder, and the fields of a recorded file tell its format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.thresholds import Threshold
from rest_local.bench.replay import FREE, OracleMatch, fair, oracle, reaches, replay
from rest_local.bench.workload import Recorded, load
from rest_local.calibration.cost import LARGEST, CostCurve
from rest_local.drafting.growth import Draft
from rest_local.drafting.sources import Lookup, Sources
from rest_local.llama.model import Model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import Off, Policy, StepContext, StepCost
from rest_local.retrieval.growing import GrowingText

TEXT = list(range(50))
COPY = Recorded("copy", TEXT, TEXT)
NEW = Recorded("new", [1, 2], np.random.default_rng(0).permutation(900)[:80].tolist())


def sources() -> Sources:
    return Sources([], 1000)


def flat() -> CostCurve:
    return CostCurve.from_points([0], [1, 64], [[10.0, 10.5]])


class Watched:
    """A policy that records the size of its drafts."""

    name = "watched"
    watches_entropy = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.nodes: list[int] = []

    def begin(self, n_ctx: int) -> None:
        self.policy.begin(n_ctx)

    def learn(self, drafted: Draft, tokens: Sequence[int], done: StepCost) -> None:
        self.policy.learn(drafted, tokens, done)

    def catch_up(self) -> None:
        self.policy.catch_up()

    def draft(self, sources: Lookup, at: StepContext) -> Draft:
        result = self.policy.draft(sources, at)
        self.nodes.append(len(result.tree))
        return result


def test_without_drafting_every_token_is_a_step() -> None:
    result = replay([COPY, NEW], sources, Off(), flat()).to_dict()
    assert result["mat"] == 1.0
    assert result["speedup"] == 1.0
    assert result["steps"] == len(COPY.answer) + len(NEW.answer) - 2
    assert result["by_source"] == {}


def test_a_copy_is_drafted_in_long_runs() -> None:
    result = replay([COPY] * 5, sources, Auto(flat()), flat()).to_dict()
    assert result["mat"] > 5
    assert result["speedup"] == pytest.approx(result["mat"], rel=0.06)
    by_depth = result["by_depth"]
    assert result["by_source"]["context"]["accepted"] == sum(count["accepted"] for count in by_depth.values())
    assert result["by_source"]["context"]["drafted"] == sum(count["drafted"] for count in by_depth.values())
    assert by_depth[11]["accepted"] > 0
    assert result["tokens_changed"] == 0
    assert result["worst_name"] == "copy"


def test_a_budget_bounds_every_step_and_a_larger_one_drafts_more() -> None:
    drafted = []
    for budget in (1, 4, 16):
        watched = Watched(Threshold(0.0, budget))
        replay([COPY] * 3, sources, watched, FREE)
        assert max(watched.nodes) == budget
        drafted.append(sum(watched.nodes))
    assert drafted == sorted(drafted)


def test_the_fields_of_a_recorded_file_tell_its_format(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mt_bench_questions.jsonl").write_text('{"question_id": 1, "turns": ["one?", "two?"]}\n')
    lines = {
        "mt.jsonl": {"question_id": 1, "choices": [{"turns": ["first", "second"]}]},
        "alpaca.jsonl": {"instruction": "do", "output": "done"},
        "batch.jsonl": {
            "custom_id": "a",
            "body": {"messages": [{"role": "user", "content": "hi"}]},
            "response": {"body": {"choices": [{"message": {"content": "hello"}}]}},
        },
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(json.dumps(line) + "\n\n")
    with gzip.open(tmp_path / "code.jsonl.gz", "wt") as file:
        file.write(json.dumps({"task_id": "t/1", "prompt": "def f", "canonical_solution": "(): pass"}))
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        vocabulary = model.vocabulary

        def text(tokens: list[int]) -> str:
            return b"".join(vocabulary.piece(t) for t in tokens).decode()

        turns = load(tmp_path / "mt.jsonl", vocabulary)
        assert [text(t.answer) for t in turns] == [" first", " second"]
        assert text(turns[1].prompt).endswith("USER: one? ASSISTANT: first</s> USER: two? ASSISTANT:")
        assert [text(r.answer) for r in load(tmp_path / "alpaca.jsonl", vocabulary)] == ["done"]
        assert [(r.name, text(r.prompt)) for r in load(tmp_path / "code.jsonl.gz", vocabulary)] == [("t/1", "def f")]
        assert [(r.name, text(r.answer)) for r in load(tmp_path / "batch.jsonl", vocabulary)] == [("a", "hello")]


def curve_of(ms: list[float]) -> CostCurve:
    return CostCurve([0], np.array([ms + [ms[-1]] * (LARGEST - len(ms))]))


def least(longest: list[int], ms: list[float]) -> float:
    """The least time over all sequences of right chains; a chain may be padded to a size that costs less."""

    @cache
    def from_(at: int) -> float:
        if at == len(longest):
            return 0.0
        return min(min(ms[n:]) + from_(at + 1 + n) for n in range(longest[at] + 1))

    return from_(1)


@given(st.data())
@settings(max_examples=100)
def test_no_way_through_an_answer_is_faster(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 9))
    longest = [0, *(data.draw(st.integers(0, length - 1 - at)) for at in range(1, length))]
    ms = data.draw(st.lists(st.floats(1, 50), min_size=length, max_size=length))
    plain = curve_of(ms)
    result = oracle([OracleMatch(0, longest, [0] * length)], plain)
    best = least(longest, [float(cost) for cost in plain.ms[0]])
    assert result["speedup"] == pytest.approx(ms[0] * (length - 1) / best, abs=1e-4)


@given(st.data())
@settings(max_examples=100)
def test_the_fair_bound_is_the_oracle_if_every_place_looks_different(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 9))
    longest = [0, *(data.draw(st.integers(0, length - 1 - at)) for at in range(1, length))]
    curve = curve_of(data.draw(st.lists(st.floats(1, 50), min_size=length, max_size=length)))
    ceiling = oracle([OracleMatch(0, longest, [0] * length)], curve)["speedup"]
    assert fair([OracleMatch(0, longest, list(range(length)))], curve)["speedup"] == pytest.approx(ceiling, abs=1e-3)
    assert fair([OracleMatch(0, longest, [0] * length)], curve)["speedup"] <= ceiling + 1e-3


def test_the_fair_bound_cannot_know_where_a_copy_ends() -> None:
    """Places with a right chain of 4 and without any look alike, so a draft of one size is wrong at half of them."""
    longest, seen = [0], [0]
    for number in range(60):
        n = 4 if number % 2 else 0
        longest += [n, *range(n - 1, -1, -1)]
        seen += [1, *range(2, 2 + n)]
    curve = curve_of([10.0, 11.0, 12.0, 13.0, 14.0])
    reach = [OracleMatch(0, [*longest, 0], [*seen, 0])]
    assert 1.0 < fair(reach, curve)["speedup"] < oracle(reach, curve)["speedup"] - 0.2


def test_the_oracle_drafts_only_what_the_sources_hold() -> None:
    history = GrowingText()
    history.extend([1, 2, 3, 4, 5, 9, -1])
    (reach,) = reaches([Recorded("a", [7], [1, 2, 3, 4, 5, 6])], lambda: Sources([], 100, history))
    assert reach.n_prompt == 1
    assert len(reach.seen) == 6
    assert reach.longest == [0, 4, 3, 2, 1, 0]  # never the last token, which comes from the model


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.3, 1.0])
def test_no_policy_is_faster_than_the_oracle(slope: float) -> None:
    random = np.random.default_rng(3)
    phrases = [random.integers(0, 300, 12).tolist() for _ in range(6)]
    recorded = [
        Recorded(str(n), [t for i in random.integers(0, 6, 8) for t in phrases[i]],
                 [t for i in random.integers(0, 6, 12) for t in phrases[i][: random.integers(3, 12)]])
        for n in range(6)
    ]  # fmt: skip
    curve = curve_of([1.0 + slope * n for n in range(LARGEST)])
    found = reaches(recorded, lambda: Sources([], 300))
    best = oracle(found, curve)["speedup"]
    for policy in (Auto(curve_of([1.0 + slope * n for n in range(LARGEST)])), Threshold(0.3), Threshold(0.0, 8)):
        assert replay(recorded, lambda: Sources([], 300), policy, curve).speedup <= best + 1e-4
    assert best >= 1.0
    if slope == 0.0:
        assert best > 2
