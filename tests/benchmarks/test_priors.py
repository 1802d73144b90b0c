"""Fitted priors are the rates of a cell, or of its neighbours if it has no observations, and transcripts of agents hold
what their formats promise."""

import numpy as np
import pytest
from support.fake_sources import cell_of
from support.toy import demo_model

from benchmarks.priors import rates
from benchmarks.transcripts import FORMATS, Change, Format, transcripts
from rest_local.drafting.sources import CELLS_PER_SOURCE, N_CELLS, SOURCE_NUMBER, SOURCES
from rest_local.llama.model import Model

OLD = "".join(f"line number {n} of the file says {n * n}\n" for n in range(40))
NEW = OLD.replace("number 7 of", "number SEVEN of").replace("number 30 of", "number THIRTY of")
EARLIER = "".join(f"{n} men went to mow a meadow\n" for n in range(30))
CHANGES = [
    Change("a.txt", "Write the numbers.", OLD, NEW),
    Change("b.txt", "Write the numbers.", EARLIER, EARLIER.replace("12 men", "twelve men")),
]


def test_a_common_cell_has_its_own_rate_and_an_empty_one_that_of_shorter_matches() -> None:
    seen, hits = np.zeros(N_CELLS), np.zeros(N_CELLS)
    source = SOURCE_NUMBER["datastore"]
    known, longer = cell_of(source, 4, 1, 1), cell_of(source, 20, 1, 1)
    seen[known], hits[known] = 10_000, 7_000
    table = rates(seen, hits)
    assert set(table) == set(SOURCES)
    assert table["datastore"][known % CELLS_PER_SOURCE] == pytest.approx(0.7, abs=0.01)
    assert table["datastore"][longer % CELLS_PER_SOURCE] == pytest.approx(0.7, abs=0.05)
    assert table["prediction"] == table["context"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_transcript_shows_the_file_and_writes_the_change(form: Format) -> None:
    with Model.open(demo_model(), vocab_only=True) as model:
        (first,) = transcripts(CHANGES, form, model.vocabulary)
        prompt, answer = (
            b"".join(map(model.vocabulary.piece, tokens)).decode() for tokens in (first.prompt, first.answer)
        )
    assert "line number 39 of the file" in prompt
    assert "SEVEN" in answer
    assert "THIRTY" in answer
