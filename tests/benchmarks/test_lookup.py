"""The lookup benchmark reports every figure, and what it compares with is right."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import lookup
from rest_local.retrieval.building.build import build
from rest_local.retrieval.documents import Document
from rest_local.retrieval.format import VocabularyId


@pytest.fixture(scope="module")
def few() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "WALK", 500)
        yield patch


def report_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["lookup", "--tokens", "40000", "--queries", "20", *options])
    lookup.main()
    return json.loads(capsys.readouterr().out)


def test_every_figure_is_reported(monkeypatch, capsys, few):
    result = report_of(monkeypatch, capsys, "--cold")
    assert result["text"] == "synthetic Zipf-Markov"
    assert 38_000 < result["tokens"] < 41_000
    assert result["bytes_per_token"] == pytest.approx(6, abs=0.3)
    for figure in ("lookup_us", "first_lookup_us", "flushed_lookup_us", "rows_us"):
        assert {"p50", "p99"} <= set(result[figure])
    assert set(result["cold"]) == {"lookup_ms", "disk_kb", "major_faults"}


def test_a_datastore_can_be_measured(monkeypatch, capsys, few, tmp_path: Path):
    documents = [np.arange(100, dtype=np.int32) for _ in range(3)]
    named = (Document(f"{number}.py", tokens) for number, tokens in enumerate(documents))
    build(tmp_path / "toy", named, vocabulary=VocabularyId("ab" * 32, 300, "toy"), recipe={}, segment_tokens=150)
    result = report_of(monkeypatch, capsys, "--directory", str(tmp_path / "toy"))
    assert (result["tokens"], result["segments"]) == (303, 3)
