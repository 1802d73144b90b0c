"""Predictions of any size: read in parts, cut where an answer cannot follow any more, and never a reason to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rest_local import Engine
from rest_local.decoding.request import LEAST_LIMIT, Predictions
from rest_local.llama.tokenizer import PART_CHARACTERS, Tokenizer
from rest_local.llama.vocabulary import Vocabulary

TinyModel = Callable[..., Path]
LINE = "for number in range(10): print(number)\n"


@pytest.fixture(scope="module")
def vocabulary(vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of("demo")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that llama.cpp is given."""
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
