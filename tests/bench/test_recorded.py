"""A wrong file of recorded answers is refused in one line with file, line and cause."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rest_local.bench.workload import load
from rest_local.errors import InputInvalid
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Vocabulary

GOOD = json.dumps({"instruction": "do", "output": "done"})


@pytest.fixture
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[Vocabulary]:
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        yield model.vocabulary


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("[1]", "line 2 is not an object"),
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2"),
        ("1" * 5000, "line 2 is not JSON"),
        ('{"a": 1}', "line 2 holds no recorded answer"),
        ('{"instruction": "a", "output": 1}', "line 2 holds a prompt or an answer that is not text"),
        ('{"instruction": "a", "output": null}', "line 2 holds a prompt or an answer that is not text"),
        ('{"body": {}, "response": null}', "line 2 lacks a field"),
        ('{"body": {}, "response": {"body": {"choices": []}}}', "line 2 lacks a field"),
        ('{"body": [], "response": {"body": {"choices": [{"text": "a"}]}}}', "line 2 lacks a field"),
        ('{"canonical_solution": "a"}', "line 2 lacks a field"),
    ],
)
def test_a_broken_line_is_named(line: str, cause: str, tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(InputInvalid) as caught:
        load(path, vocabulary)
    assert str(path) in str(caught.value)
    assert cause in str(caught.value)


def test_files_without_text_are_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "plain.gz").write_bytes(b"not packed")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(GOOD.encode() * 1000)[:-20])
    for name, cause in {
        "empty.jsonl": "no recorded answer",
        "binary.jsonl": "not UTF-8",
        "plain.gz": "gzip",
        "cut.gz": "gzip",
    }.items():
        with pytest.raises(InputInvalid, match=f"{name}.*{cause}"):
            load(tmp_path / name, vocabulary)
