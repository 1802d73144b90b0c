"""The demo's prompts, and its measurement on scripted generations: identical runs, and the speed-up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rest_local.cli import comparing
from rest_local.cli.comparing import Prompt
from rest_local.decoding.results import DraftStatistics

PROMPT = Prompt("a title", "text", chat=False)


class ScriptedEngine:
    """`answer(policy, sampling, call)` returns the tokens; the speed depends on the policy."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.calls = answer, []

    def generate(self, prompt: str, *, max_tokens: int, sampling: Any, policy: str | None) -> Any:
        self.calls.append((policy, sampling))
        tokens = self._answer(policy, sampling, len(self.calls))
        speed = {"off": 100.0, None: 100.0 + 10 * len(self.calls)}[policy]
        draft = DraftStatistics(steps=1, generated=2, drafted=2, accepted=1)
        timings = SimpleNamespace(predicted_per_second=speed)
        return Stream(SimpleNamespace(text="t", tokens=tokens, draft=draft, timings=timings))


class Stream:
    def __init__(self, result: Any) -> None:
        result.to_dict = lambda: {"text": "t", "tokens": len(result.tokens)}
        self.result = result

    def __iter__(self) -> Any:
        return iter(["piece"])


def measure(answer: Any, repeats: int = 3, **more: Any) -> tuple[ScriptedEngine, comparing.Comparison]:
    engine: Any = ScriptedEngine(answer)
    return engine, comparing.compare(engine, PROMPT, max_tokens=30, repeats=repeats, **more)


def test_runs_are_interleaved_and_speedup_is_the_median_of_pairs() -> None:
    engine, result = measure(lambda *_: list(range(30)))
    assert [policy for policy, _ in engine.calls] == ["off", None] * 4
    # timed pairs end with the calls 4, 6 and 8
    assert result.drafted.speeds == (140.0, 160.0, 180.0)
    assert result.speedup == pytest.approx(1.6)
    assert result.same is None


def test_the_tokens_that_both_sides_have_in_common_are_counted() -> None:
    _, result = measure(lambda policy, _, __: [1, 2, 3, 4] if policy else [1, 2, 9])
    assert result.same == 2
    assert not result.to_json()["identical"]
    _, result = measure(lambda policy, _, __: [1, 2, 3, 4] if policy else [1, 2])
    assert result.same == 2, "one answer is the beginning of the other"


@pytest.mark.parametrize("chat", [True, False])
def test_an_edit_is_begun_up_to_the_new_name_without_the_newline(tmp_path: Path, chat: bool) -> None:
    code = tmp_path / "a.go"
    code.write_text("import x\n" * 9 + "func total(price int) int {\n\treturn price + price\n}\n" * 60)
    _, edit = comparing.prompts(code, chat)
    assert edit.title == "a.go: rename price to new_price"
    assert edit.chat is chat
    begun = edit.begun.removeprefix("```\n")
    assert begun.startswith("func total(new_price int) int {\n\treturn new_price + new_price\n}\n")
    assert not begun.endswith("\n")
    assert 0.3 * comparing.PASSAGE < len(begun) < 0.6 * comparing.PASSAGE
    assert "import" not in edit.text


@pytest.mark.parametrize("text", ["price", "price\n", "\n\nprice = price\n", "caf\u00e9s\r\n" * 999, "long_" * 999])
def test_any_file_has_a_passage_to_edit(tmp_path: Path, text: str) -> None:
    code = tmp_path / "a.txt"
    code.write_text(text)
    question, edit = comparing.prompts(code, True)
    assert question.title == comparing.QUESTION
    assert "new_" in edit.begun
