"""Answers that edit a file of the conversation are those of plain decoding, and drafted from the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rest_local import Engine, Sampling
from rest_local.drafting.edit_source import EditSource
from rest_local.grammar import Grammar, gbnf
from rest_local.retrieval.rows import Rows

TinyModel = Callable[..., Path]
LINES = [f"def area_{n}(w, h): return w * h + {n}" for n in range(5)]
FILE = "\n".join(LINES) + "\n"
NUMBERED = "\n".join(f"{n:6}→{line}" for n, line in enumerate(LINES, 1))
CALL = json.dumps({"name": "Write", "arguments": {"path": "area.py", "content": FILE.replace("area_3", "surface_3")}})


def literal(text: str) -> Grammar:
    return gbnf("root ::= [a-z]{1,6} " + json.dumps("\n" + text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_plain_decoding(
    temperature: float, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    rows = EditSource.rows

    def watched(self: EditSource, context: list[int], depth: int) -> tuple[Rows, list[bytes]]:
        found = rows(self, context, depth)
        seen.append(len(found[0]))
        return found

    monkeypatch.setattr(EditSource, "rows", watched)
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=2048, exact=True, threads=1) as engine:
        sampling = Sampling(temperature=temperature, seed=3, grammar=literal(CALL))
        prompt = f"The file area.py:\n{NUMBERED}\n\nWrite it anew.\n"
        plain = engine.generate(prompt, max_tokens=500, sampling=sampling, policy="off").wait()
        before = len(seen)
        drafted = engine.generate(prompt, max_tokens=500, sampling=sampling).wait()
        assert drafted.text == plain.text
        assert drafted.tokens == plain.tokens
    assert CALL in plain.text
    assert before == 0
    assert sum(seen) > 5
    assert drafted.draft.by_source["edit"].accepted > 5


def test_a_fault_costs_drafts_only(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: EditSource, context: list[int], depth: int) -> tuple[Rows, list[bytes]]:
        raise IndexError

    monkeypatch.setattr(EditSource, "rows", fails)
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, exact=True, threads=1) as engine:
        results = []
        for policy in ("off", "auto"):
            results.append(engine.generate("def area(", max_tokens=30, policy=policy).wait().tokens)
    assert results[0] == results[1]
    assert sum("cannot be recognised" in record.getMessage() for record in caplog.records) <= 1
