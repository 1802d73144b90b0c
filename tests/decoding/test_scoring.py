"""Log-probabilities of a text's own tokens, against every row evaluated alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rest_local.calibration.exactness import rows_alone
from rest_local.decoding.engine import Engine
from rest_local.decoding.logprobs import Scorer
from rest_local.decoding.request import Request
from rest_local.decoding.service import Service
from rest_local.errors import PromptEmpty, PromptTooLong


def run(part: Callable[[], None]) -> None:
    part()


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba"])
def test_scores_are_those_of_rows_alone(tiny_model: Callable[..., Path], arch: str) -> None:
    rng = np.random.default_rng(1)
    with Engine.load(tiny_model(arch), n_ctx=256, policy="off") as engine:
        text = rng.integers(5, engine.model.n_vocab, 150).tolist()
        with closing(Scorer(engine.model, engine.settings)) as scorer:
            for _ in range(2):  # what is left of one text is no part of the next
                scored = scorer.score(text, 3, run)
                assert [entry.token for entry in scored] == text[1:]
            rows = rows_alone(scorer._context, text)
    exact = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    told = [entry.logprob for entry in scored]
    assert told == pytest.approx([exact[at, token] for at, token in enumerate(text[1:])], abs=0.05)
    assert [entry.top[0][1] for entry in scored] == pytest.approx(exact[:-1].max(1), abs=0.05)


def test_what_cannot_be_scored_is_refused(tiny_model: Callable[..., Path]) -> None:
    with (
        Engine.load(tiny_model("llama"), n_ctx=64, policy="off") as engine,
        closing(Scorer(engine.model, engine.settings)) as scorer,
    ):
        assert scorer.score([5], 0, run) == []
        with pytest.raises(PromptEmpty):
            scorer.score([], 0, run)
        with pytest.raises(PromptTooLong, match="65"):
            scorer.score([5] * 65, 0, run)
        assert len(scorer.score([5] * 64, 0, run)) == 63


def test_others_go_on_between_the_parts(tiny_model: Callable[..., Path]) -> None:
    """A text of several parts, scored while a request generates: neither sees the other."""
    with Engine.load(tiny_model("llama"), n_ctx=256, slots=2, policy="off") as engine, Service(engine) as service:
        text = np.random.default_rng(2).integers(5, engine.model.n_vocab, 200).tolist()
        alone = service.submit(Request(text[:20], max_tokens=60, ignore_end=True)).wait(60).tokens
        scorer = service.run(lambda engine: Scorer(engine.model, engine.settings))
        try:
            first = scorer.score(text, 0, run=lambda part: service.run(lambda engine: part()))
            other = service.submit(Request(text[:20], max_tokens=60, ignore_end=True))
            second = scorer.score(text, 0, run=lambda part: service.run(lambda engine: part()))
            assert other.wait(60).tokens == alone
            assert len(alone) == 60
        finally:
            service.run(lambda engine: scorer.close())
    assert first == second
