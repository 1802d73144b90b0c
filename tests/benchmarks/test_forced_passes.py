"""The benchmark of forced text: what it counts, and the figure that is promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import forced
from rest_local.decoding.engine import Engine
from rest_local.decoding.stream import Result
from rest_local.grammar.constraint import Constraint
from rest_local.llama.model import Model
from rest_local.paths import demo_model

NAMES = [case.name for case in forced.CASES]


@pytest.mark.parametrize("case", forced.CASES, ids=NAMES)
@pytest.mark.parametrize("indent", [None, 2])
def test_replayed_answers_are_what_their_grammar_allows(case: forced.Case, indent: int | None) -> None:
    with Model.open(demo_model(), vocab_only=True) as model:
        for seed in range(3):
            tokens = forced._tokens(model.vocabulary, case.answer(seed, indent))
            constraint = Constraint(model.vocabulary, case.grammar)
            assert constraint.longest(tokens) == len(tokens)


def test_ten_fields_take_at_most_six_tenths_of_the_passes() -> None:
    """The demo model in exact settings, cold and warm; drafts change no token."""
    with Engine.load(n_ctx=1024, exact=True, threads=1) as engine:
        known: dict[tuple[str, int], Result] = {}
        for curve in forced.CURVES:
            rows = forced.passes(engine, curve, prompts=(3,), known=known)
            assert [row["case"] for row in rows] == NAMES
            assert not any(row["differing"] for row in rows)
            for how in ("cold", "warm"):
                assert sum(row[how] for row in rows) <= 0.6 * sum(row["plain"] for row in rows)


def test_a_replay_counts_what_the_curve_says(shared_data: Callable[[str], Path]) -> None:
    with Model.open(shared_data("ggml-vocab-qwen2.gguf"), vocab_only=True) as model:
        rows = forced.replayed(model.vocabulary, forced.CURVES[0], None, 4)
    assert [row["case"] for row in rows] == NAMES
    assert all(row["passes"] < 0.7 * row["tokens"] and row["speedup"] > 1.2 for row in rows)


def test_one_line_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["forced", "--values", "1", "--curves", "rtx3090-8b-q4_0"])
    monkeypatch.setattr(forced, "CASES", forced.CASES[:1])
    monkeypatch.setattr(forced.passes, "__defaults__", ((1,),))
    forced.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["passes"]) == {"rtx3090-8b-q4_0, exact", "rtx3090-8b-q4_0, fast"}
    assert set(result["replay"]) == {"rtx3090-8b-q4_0, one line", "rtx3090-8b-q4_0, indented"}
