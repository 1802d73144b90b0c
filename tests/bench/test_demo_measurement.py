"""The demo's measurement on scripted generations: identical runs, sampling, and the speed-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rest_local.bench import demo
from rest_local.bench.demo import Prompt
from rest_local.decoding.results import DraftStatistics

PROMPT = Prompt("stored", "a title", "text")


class ScriptedEngine:
    """`answer(policy, sampling, call)` returns the tokens; the speed depends on the policy."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.calls = answer, []
        self.prompts: list[tuple[str, str]] = []

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def generate(self, prompt: str, *, max_tokens: int, sampling: Any, policy: str | None, prediction: str) -> Any:
        self.calls.append((policy, sampling))
        self.prompts.append((prompt, prediction))
        tokens = self._answer(policy, sampling, len(self.calls))
        speed = {"off": 100.0, None: 100.0 + 10 * len(self.calls)}[policy]
        draft = DraftStatistics(steps=1, generated=2, drafted=2, accepted=1)
        timings = SimpleNamespace(predicted_per_second=speed)
        return Stream(SimpleNamespace(tokens=tokens, draft=draft, timings=timings))


class Stream:
    def __init__(self, result: Any) -> None:
        result.to_dict = lambda: {"text": "t", "tokens": len(result.tokens)}
        self.result = result

    def __iter__(self) -> Any:
        return iter(["piece"])


def measure(answer: Any, repeats: int = 3, **more: Any) -> tuple[ScriptedEngine, demo.Comparison]:
    engine: Any = ScriptedEngine(answer)
    return engine, demo.compare(engine, PROMPT, "exact", max_tokens=30, repeats=repeats, **more)


def test_runs_are_interleaved_and_speedup_is_the_median_of_pairs() -> None:
    engine, result = measure(lambda *_: list(range(30)))
    assert [policy for policy, _ in engine.calls] == ["off"] + ["off", None] * 4
    # timed pairs end with the calls 5, 7 and 9
    assert result.drafted.speeds == (150.0, 170.0, 190.0)
    assert result.speedup == pytest.approx(1.7)
    assert result.identical
    assert not result.sampled


def test_both_sides_sample_with_one_seed_if_greedy_decoding_loops() -> None:
    engine, result = measure(lambda _, sampling, __: [1] * 30 if sampling.is_greedy else list(range(30)))
    assert result.sampled
    assert {(s.seed, s.temperature) for _, s in engine.calls[1:]} == {(demo.SEED, demo.TEMPERATURE)}
    assert "seed" in result.to_json()["sampling"]


def test_a_question_goes_through_the_chat_template_with_its_prediction() -> None:
    engine: Any = ScriptedEngine(lambda *_: list(range(30)))
    prompt = Prompt("edit", "a title", "text", chat=True, prediction="old")
    demo.compare(engine, prompt, "exact", max_tokens=30, repeats=1)
    assert set(engine.prompts) == {("<user>text", "old")}
