"""The lookup benchmark ends with one line of JSON that holds all figures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import lookup
from rest_local.retrieval.rows import Rows


def test_one_line_of_json_with_every_figure(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lookup", "--tokens", "20000", "--queries", "20"])
    lookup.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert len(lines) == len(result) + 1
    assert result["text"] == "synthetic Zipf-Markov"
    assert result["tokens"] == 20_000
    assert result["bytes_per_token"] == pytest.approx(6, abs=0.1)
    for figure in ("lookup_us", "first_lookup_us", "cold_lookup_us", "rows_us", "draft_us"):
        assert set(result[figure]) == {"p50", "p99"}


def test_the_timed_trie_holds_every_beginning():
    tokens = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 4], [1, 7, 3], [1, 2, 3]], np.int32)
    rows = Rows(tokens, np.ones(5, np.int32), np.arange(5))
    ordered, shared = lookup._trie(rows)
    assert sorted(ordered.tolist()) == sorted(tokens.tolist())
    assert sorted(shared.tolist()) == [0, 1, 2, 3]
    for before, row, count in zip(ordered[:-1].tolist(), ordered[1:].tolist(), shared.tolist(), strict=True):
        assert before[:count] == row[:count]
        assert count == 3 or before[count] != row[count]
