"""The demo's measurement on scripted generations: identical runs, sampling, and the speed-up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rest_local.bench import demo
from rest_local.bench.demo import Prompt
from rest_local.decoding.results import DraftStatistics

BODY = "    x = 1\n" * 50
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


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, prompt: Prompt, mode: str) -> None:
        self.seen.append((prompt.kind, mode))

    def piece(self, side: str, piece: Any) -> None:
        self.seen.append(side)


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


def test_one_different_run_is_not_identical() -> None:
    _, result = measure(lambda policy, _, call: [1, 2, 3] if call == 7 else [1, 2, 4])
    assert not result.identical


def test_both_sides_sample_with_one_seed_if_greedy_decoding_loops() -> None:
    engine, result = measure(lambda _, sampling, __: [1] * 30 if sampling.is_greedy else list(range(30)))
    assert result.sampled
    assert {(s.seed, s.temperature) for _, s in engine.calls[1:]} == {(demo.SEED, demo.TEMPERATURE)}
    assert "seed" in result.to_json()["sampling"]
    assert not result.loops


def test_only_the_first_pair_is_shown() -> None:
    recorder = Recorder()
    measure(lambda *_: list(range(30)), display=recorder)
    assert recorder.seen == [("stored", "exact"), "plain", "drafted"]


def test_a_question_goes_through_the_chat_template_with_its_prediction() -> None:
    engine: Any = ScriptedEngine(lambda *_: list(range(30)))
    prompt = Prompt("edit", "a title", "text", chat=True, prediction="old")
    demo.compare(engine, prompt, "exact", max_tokens=30, repeats=1)
    assert set(engine.prompts) == {("<user>text", "old")}


def test_prompts_come_from_their_modules() -> None:
    held_out = demo.held_out_modules()
    assert "csv.py" in held_out
    assert "queue.py" not in held_out
    unseen, copy = demo.unseen_prompt(chat=False), demo.copy_prompt(None)
    assert unseen.text.rstrip().endswith(":")
    assert unseen.text in (demo.standard_library() / "csv.py").read_text(encoding="utf-8")
    old, _, begun = copy.text.rpartition("\n\n")
    assert old.startswith("    def put(self, item")
    assert old in (demo.standard_library() / "queue.py").read_text(encoding="utf-8")
    assert begun == old.splitlines()[0].replace("put", "put_all") + "\n"
    edit = demo.edit_prompt(None)
    assert edit.chat
    assert edit.text.endswith(edit.prediction)
    assert edit.text.startswith("Rename `")
    assert all(500 < len(prompt.text) < 2600 for prompt in (unseen, copy, edit))
    assert demo.unseen_prompt(chat=True).chat


def test_a_folder_of_code_provides_the_prompts(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("x = 1\n")
    (tmp_path / "right.py").write_text("def first_name(value):\n    return value\n\n" * 130)
    (tmp_path / ".hidden.py").write_text("def secret():\n    pass\n" * 250)
    copy, edit = demo.copy_prompt(tmp_path), demo.edit_prompt(tmp_path)
    assert (copy.kind, copy.title) == ("stored", "right.py"), "no function is long enough"
    assert "first_name" in copy.text
    assert edit.title.startswith("right.py")
    assert edit.prediction in (tmp_path / "right.py").read_text()
    (tmp_path / "right.py").write_text(f"def __init__():\n{BODY}\n\ndef total(values):\n{BODY}\n\n" + "x = 1\n" * 800)
    copy = demo.copy_prompt(tmp_path)
    assert (copy.kind, copy.title) == ("edit", "right.py, total changed")
    assert copy.text == f"def total(values):\n{BODY}\ndef total_all(values):\n"
