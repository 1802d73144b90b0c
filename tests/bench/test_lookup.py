"""The lookup benchmark ends in one line of JSON that says what it measured."""

from __future__ import annotations

import json

import pytest

from rest_local.bench import lookup


def test_one_line_of_json_with_every_figure(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lookup", "--tokens", "20000", "--queries", "20"])
    lookup.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert len(lines) == len(result) + 1
    assert result["text"] == "synthetic Zipf-Markov"
    assert result["tokens"] == 20_000
    assert result["bytes_per_token"] == pytest.approx(6, abs=0.1)
    assert set(result["rows_us"]) == {"p50", "p99"}
