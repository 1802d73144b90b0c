"""Acceptance by size and domain, and own text against text of people: figures that can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rest_local.bench.experiments import domains, own_text
from rest_local.bench.experiments.datastore_size import measured, sizes
from rest_local.bench.experiments.domains import best_size, cut
from rest_local.bench.experiments.inputs import Inputs, Text
from rest_local.bench.experiments.own_text import compare, texts
from rest_local.bench.recorded import Recorded
from rest_local.bench.results import Journal
from rest_local.errors import InputInvalid
from rest_local.retrieval.rows import Int32Array

ANSWER = Recorded("a", [1, 2, 3], list(range(10, 28)))  # the first of 18 tokens comes from the prefill


def document(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


def test_sizes_go_up_to_the_largest() -> None:
    assert sizes(1_000_000) == [100_000, 300_000, 1_000_000]
    assert sizes(250_000) == [100_000, 250_000]
    assert sizes(50_000) == [50_000]
    assert sizes(100_000_000)[-3:] == [10_000_000, 30_000_000, 100_000_000]


def test_the_text_of_the_answer_is_accepted() -> None:
    text = Text([document(*ANSWER.prompt, *ANSWER.answer)], 256, 21, "the answer")
    row = measured([ANSWER], text.segment(), text, 256)
    assert row["mat"] > 4  # the first drafts are short, since nothing is known about the datastore yet
    assert row["accepted_per_lookup"] == row["mat"] - 1  # each pass has a lookup, and a token of the model's own
    assert row["of_datastore"] == 1.0
    assert row["edited_copies"] == 0.0
    none = measured([ANSWER], None, text.first(0), 256)
    assert (none["mat"], none["accepted_per_lookup"], none["speedup"]) == (1.0, 0.0, 1.0)
    half = measured([ANSWER], text.segment(), Text(text.documents, 256, 7, ""), 256)
    assert half["edited_copies"] == pytest.approx(2 / 3, abs=1e-4)


def points(*speedups: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"tokens": tokens, "speedup": {"c": {"mean": value}}} for tokens, value in speedups]


def test_the_best_size_is_the_last_one_that_a_doubling_still_gains_to() -> None:
    rows = points((0, 1.0), (100, 1.1), (200, 1.2), (400, 1.205))
    assert best_size(rows, "c") == {"tokens": 200, "enough": True, "gain": pytest.approx(0.0042, abs=1e-4)}
    assert best_size(rows[:-1], "c") == {"tokens": 200, "enough": False, "gain": pytest.approx(0.0909, abs=1e-4)}
    assert best_size(points((0, 1.5), (100, 1.5), (200, 1.51)), "c")["tokens"] == 0
    assert best_size(points((0, 1.0), (100, 1.1), (200, 1.1)), "c")["tokens"] == 100
    # four times as many tokens are two doublings, of 10% each
    assert best_size(points((0, 1.0), (100, 1.0), (400, 1.21)), "c")["gain"] == pytest.approx(0.1)


def test_files_are_cut_into_prompt_and_answer() -> None:
    tokens = np.arange(domains.PROMPT + domains.ANSWER + 7, dtype=np.int32)
    (answer,) = cut([tokens, tokens[:100]], ["long", "short"])
    assert answer.name == "long"
    assert answer.prompt == list(range(domains.PROMPT))
    assert answer.answer == list(range(domains.PROMPT, domains.PROMPT + domains.ANSWER))


def test_without_any_data_the_domains_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputInvalid, match=r"HumanEval.jsonl.gz|ggml-vocab"):
        domains.run(Inputs(tmp_path, data=tmp_path), Journal(tmp_path / "journal", {}))


def test_texts_have_equal_numbers_of_tokens() -> None:
    own, people, other = ([np.zeros(n, np.int32)] for n in (100, 900, 50))
    found = texts(own, people, other, 80)
    assert {name: sum(map(len, documents)) for name, documents in found.items()} == {
        "none": 0, "own": 80, "people": 80, "half and half": 80, "own + people": 160, "people x 10": 800,
    }  # fmt: skip
    assert "other model" in texts(own, people, other, 50)
    assert "people x 10" not in texts(own, people, other, 100)


def test_the_text_that_holds_the_answer_wins() -> None:
    own, people = [document(*ANSWER.prompt, *ANSWER.answer)], [document(*range(100, 121))]
    found = compare([ANSWER], texts(own, people, [], 1000), 256)
    assert found["none"]["mat"] == found["people"]["mat"] == 1.0  # no token occurs twice
    assert found["own"]["mat"] == found["own + people"]["mat"] > 4
    assert found["own"]["of_datastore"] == 1.0
    assert found["own"]["tokens"] == found["people"]["tokens"] == 21
    assert found["own"]["speedup"] > found["people"]["speedup"]
    sentence = own_text._words("set", {"variants": found})
    assert "own answers are ahead" in sentence
    assert "Ten times" not in sentence


def test_questions_that_are_no_questions_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    (tmp_path / own_text.PEOPLE_FILE).write_text('{"turns": ["a"]}')
    with pytest.raises(InputInvalid, match="spec_bench_questions"):
        own_text.read_questions(Inputs(tmp_path, data=tmp_path), None)  # type: ignore[arg-type]
