"""Predictions of any size: read in parts, cut where an answer cannot follow any more, and never a reason to fail."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local import Engine, Sampling
from rest_local.decoding.request import LEAST_LIMIT, Predictions
from rest_local.drafting.edit_source import EditSource
from rest_local.grammar import Grammar, gbnf
from rest_local.llama.tokenizer import PART_CHARACTERS, Tokenizer
from rest_local.llama.vocabulary import Vocabulary
from rest_local.retrieval.rows import Rows

TinyModel = Callable[..., Path]
LINE = "for number in range(10): print(number)\n"


@pytest.fixture(scope="module")
def vocabulary(vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of("demo")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the characters of each text that llama.cpp is given."""
    lengths: list[int] = []
    call = Tokenizer._call

    def watched(self: Tokenizer, text: str) -> Any:
        lengths.append(len(text))
        return call(self, text)

    monkeypatch.setattr(Tokenizer, "_call", watched)
    return lengths


def test_ten_megabytes_are_read_as_far_as_they_can_be_followed(
    tiny_model: TinyModel, read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    text = LINE * (10_000_000 // len(LINE))
    with Engine.load(tiny_model("llama", quant="Q8_0"), n_ctx=512, exact=True) as engine:
        plain = engine.generate(LINE, max_tokens=8, policy="off").wait()
        read.clear()
        with caplog.at_level(logging.WARNING, "rest_local.decoding"):
            for _ in range(2):
                drafted = engine.generate(LINE, max_tokens=8, prediction=text).wait()
                assert drafted.tokens == plain.tokens
    assert max(read) <= PART_CHARACTERS
    assert sum(read) < len(text) / 4
    assert [record.getMessage() for record in caplog.records if record.name == "rest_local.decoding"] == [
        f"a prediction is longer than {LEAST_LIMIT} tokens; only its beginning is drafted from"
    ]


def test_a_cut_is_noticed_wherever_it_falls(vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture) -> None:
    """Exactly as many tokens as are kept, then one more."""
    text = LINE * 8
    tokens = len(vocabulary.tokenize(text))
    for most, warned in ((tokens, 0), (tokens - 1, 1)):
        predictions = Predictions(vocabulary, 1)
        predictions.most = most
        caplog.clear()
        assert len(predictions.tokenize(text)) == most
        assert len(caplog.records) == warned


@pytest.mark.parametrize("unknown", [-1, 4096, 2**40, 2**70])
def test_ids_that_the_model_does_not_have_end_it(vocabulary: Vocabulary, unknown: int) -> None:
    assert vocabulary.size == 4096
    predictions = Predictions(vocabulary, 64)
    assert predictions.take([5, 6, unknown, 7]).tolist() == [5, 6]
    assert predictions.take([unknown]).tolist() == predictions.take(()).tolist() == []


# ---- Edits ---------------------------------------------------------------------------------------------------------


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
