"""The evaluation agrees with naive oracles on tiny models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model

TEXT = "".join(
    f"def function_{i}(self, value):\n    # a comment\n    return self.name + value\n\n\n" for i in range(30)
)


@pytest.fixture(scope="module")
def evaluate(recipe: Callable[[str], ModuleType]) -> ModuleType:
    return recipe("evaluate")


@pytest.fixture(scope="module")
def evaluator(evaluate: ModuleType, tiny_model: Callable[..., Path]) -> Iterator[Any]:
    with (
        Model.open(tiny_model("llama")) as model,
        Context(model, ContextSettings(n_ctx=256, n_branches=1, threads=1)) as context,
    ):
        yield evaluate.Evaluator(context, model.vocabulary)


def one_by_one(context: Context, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The logits after each token, one decode each, float64."""
    context.clear()
    rows = []
    for position, token in enumerate(tokens):
        context.batch.fill([token], position, 0, 1, 1)
        assert context.decode() == 0
        rows.append(context.logits(1)[0].astype(np.float64))
    return np.stack(rows)


def naive_nats(context: Context, tokens: list[int]) -> float:
    """Loss by the definition of softmax."""
    rows = one_by_one(context, tokens[:-1])
    p = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    return float(-np.log(p[np.arange(len(rows)), tokens[1:]]).sum())


def test_loss_is_the_mean_over_all_tokens_and_counts_every_byte(evaluator: Any) -> None:
    text = TEXT[:1500] + "é"
    tokens = [evaluator.first, *evaluator.vocabulary.tokenize(text).tolist()]
    assert len(tokens) > 2 * evaluator.context.n_ctx
    window = evaluator.context.n_ctx
    parts = [tokens[i : i + window + 1] for i in range(0, len(tokens) - 1, window)]
    loss = evaluator.loss(text)
    assert (loss.tokens, loss.size) == (len(tokens) - 1, len(text.encode()))
    assert loss.nats == pytest.approx(sum(naive_nats(evaluator.context, part) for part in parts), rel=1e-3)


def test_some_windows_include_the_first_and_the_last(evaluator: Any, evaluate: ModuleType) -> None:
    whole, two = evaluator.loss(TEXT), evaluator.loss(TEXT, 2)
    window = evaluator.context.n_ctx
    assert two.tokens == window + (whole.tokens % window or window)
    assert evaluator.loss(TEXT, 10_000) == whole


def test_nats_of_uniform_logits_are_the_logarithm_of_the_vocabulary(evaluate: ModuleType) -> None:
    logits = np.full((3, 50), 1000.0, np.float32)
    assert evaluate.nats_of(logits, np.array([0, 7, 49], np.int32)) == pytest.approx(3 * np.log(50), rel=1e-6)


def test_bits_per_byte(evaluate: ModuleType) -> None:
    assert evaluate.Loss(nats=8 * np.log(2), tokens=4, size=16).to_dict()["bits_per_byte"] == 0.5


def test_greedy_follows_the_arg_max_of_every_position(evaluator: Any) -> None:
    prompt = evaluator.vocabulary.tokenize(TEXT[:120]).tolist()
    answer = list(islice(evaluator.greedy(prompt), 20))
    rows = one_by_one(evaluator.context, prompt + answer)
    best = rows.argmax(axis=1)[len(prompt) - 1 :].tolist()
    assert len(answer) == 20 or evaluator.vocabulary.is_end(best[len(answer)])
    assert best[: len(answer)] == answer


def test_infills_are_lines_of_code_with_their_surroundings(evaluate: ModuleType) -> None:
    found = list(evaluate.infills({"a": TEXT, "b": TEXT[::-1] + "\n" + TEXT}, 30))
    assert len(found) == 30
    for infill in found:
        assert infill.line.endswith("\n")
        assert infill.line.count("\n") == 1
        assert not infill.line.lstrip().startswith("#")
        assert infill.before + infill.line + infill.after in TEXT[::-1] + "\n" + TEXT
        assert infill.before == "" or infill.before.endswith("\n")
        assert len(infill.before) <= evaluate.BEFORE
        assert len(infill.after) <= evaluate.AFTER
    assert found == list(evaluate.infills({"a": TEXT, "b": TEXT[::-1] + "\n" + TEXT}, 30))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("    return x  \nmore", 1), ("    return x", 1), ("return x\n", 0), ("\n    return x\n", 0), ("", 0)],
)
def test_an_infill_counts_only_if_the_line_is_exact(
    evaluate: ModuleType, evaluator: Any, monkeypatch: pytest.MonkeyPatch, answer: str, expected: int
) -> None:
    tokens = evaluator.vocabulary.tokenize(answer).tolist()
    monkeypatch.setattr(evaluate, "infill_prompt", lambda vocabulary, infill: [0])
    monkeypatch.setattr(evaluator, "greedy", lambda prompt: iter(tokens))
    result = evaluate.evaluate_infills(evaluator, {"a": "    return x\n"}, 5)
    assert (result["lines"], result["exact"]) == (1, expected)


def test_the_prompt_of_an_infill_has_the_form_of_training_and_fits(
    evaluate: ModuleType, recipe: Callable[[str], ModuleType], demo_gguf: Path
) -> None:
    with Model.open(demo_gguf, vocab_only=True) as model:
        v = model.vocabulary
        prompt = evaluate.infill_prompt(v, evaluate.Infill("a = 1\n", "b = 2\n", "c = 3\n"))
        sample = f"<|fim_prefix|>a = 1\n<|fim_suffix|>c = 3\n<|fim_middle|>b = 2\n{recipe('prepare').END}"
        assert v.tokenize(sample, special=True).tolist()[: len(prompt)] == prompt
        long = evaluate.infill_prompt(v, evaluate.Infill("é ñ " * 999, "x\n", "ü ß " * 999))
        assert len(long) + evaluate.LONGEST_LINE <= evaluate.WINDOW


def test_the_evaluation_prints_a_table_and_one_line_of_json(
    evaluate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    demo_gguf: Path,
) -> None:
    monkeypatch.setattr(evaluate, "held_out_texts", lambda: {"a.py": TEXT[:900]})
    monkeypatch.setenv("REST_LOCAL_CACHE", str(tmp_path / "cache"))  # restores what main changes
    output = tmp_path / "figures.json"
    arguments = ["--model", str(demo_gguf), "--lines", "2", "--tokens", "5", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    evaluate.main()
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert json.loads(output.read_text()) == result
    assert result["held_out"]["bytes"] == 900
    assert result["fill_in_the_middle"]["lines"] == 2
    assert result["repeated_8_grams"]["prompts"] == 1
    assert table[1].split()[:2] == ["a.py", "900"]


def test_candidates_have_their_width_and_depth(recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    cost = recipe("cost")
    shape = cost.shape_of(384, 2)
    assert (shape.width, shape.layers, shape.head, shape.vocab) == (384, 2, 64, 4096)
    path = cost.synthetic(shape, "Q4_0", tmp_path / "m.gguf")
    row = cost.measure(path, threads=1, rounds=1, n_ctx=8)
    assert row["t1_ms"] > 0
    assert set(row["ratio"]) == {2, 4, 8, 16, 32}
