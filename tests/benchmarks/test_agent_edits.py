"""Transcripts of agents hold what their formats promise, and the ratios are those of the replays."""

from __future__ import annotations

import json

import pytest

from benchmarks.agent_edits import mean, means, speedups
from benchmarks.transcripts import FORMATS, OTHER_CALLS, Change, hunks, transcripts
from rest_local.llama.model import Model
from rest_local.paths import demo_model

OLD = "".join(f"line number {n} of the file says {n * n}\n" for n in range(40))
NEW = OLD.replace("number 7 of", "number SEVEN of").replace("number 30 of", "number THIRTY of")
EARLIER = "".join(f"{n} men went to mow a meadow\n" for n in range(30))
CHANGES = [
    Change("a.txt", "Write the numbers.", OLD, NEW),
    Change("b.txt", "Write the numbers.", EARLIER, EARLIER.replace("12 men", "twelve men")),
]


def test_hunks_rebuild_the_new_text() -> None:
    found = hunks(OLD, NEW, 2)
    text = OLD
    for hunk in found:
        assert text.count(hunk.old) == 1
        text = text.replace(hunk.old, hunk.new)
    assert (text, len(found)) == (NEW, 2)
    assert "-line number 7 of" in found[0].marked
    assert "+line number SEVEN of" in found[0].marked


@pytest.mark.parametrize("form", [*FORMATS, *OTHER_CALLS], ids=lambda form: form.name)
def test_a_transcript_shows_the_file_and_writes_the_change(form: object) -> None:
    with Model.open(demo_model(), vocab_only=True) as model:
        assert isinstance(form, type(FORMATS[0]))
        (first,) = transcripts(CHANGES, form, model.vocabulary)
        prompt, answer = (
            b"".join(map(model.vocabulary.piece, tokens)).decode() for tokens in (first.prompt, first.answer)
        )
    assert "line number 39 of the file" in prompt
    assert "SEVEN" in answer
    assert "THIRTY" in answer


def test_the_source_saves_passes_where_a_file_is_numbered() -> None:
    form = next(form for form in FORMATS if form.name == "Claude Code, Write")
    with Model.open(demo_model(), vocab_only=True) as model:
        recorded = list(transcripts(CHANGES, form, model.vocabulary))
        alone, both = speedups(recorded, "rtx3090-8b-q4_0", model.vocabulary)
    assert both.steps < 0.7 * alone.steps
    assert alone.tokens == both.tokens


def test_means_are_geometric() -> None:
    assert mean([1.0, 4.0]) == 2.0
    rows = {"a": {"x": {"ratio": 1.0}, "y": {"ratio": 4.0}}, "b": {"x": {"ratio": 4.0}, "y": {"ratio": 4.0}}}
    found = means(rows)
    assert found["by_curve"] == {"x": 2.0, "y": 4.0}
    assert found["by_format"] == {"a": 2.0, "b": 4.0}
    assert json.dumps(found)
