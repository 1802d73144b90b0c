"""A replay counts the steps of a decoder, and the fields of a recorded file tell its format."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.recorded import Recorded, load
from benchmarks.replay import replay
from rest_local.calibration.cost import CostCurve
from rest_local.drafting.sources import Sources
from rest_local.llama.model import Model
from rest_local.planning.auto import Auto

TEXT = list(range(50))
COPY = Recorded("copy", TEXT, TEXT)


def sources() -> Sources:
    return Sources([], 1000)


def flat() -> CostCurve:
    return CostCurve.from_points([0], [1, 64], [[10.0, 10.5]])


def test_a_copy_is_drafted_in_long_runs() -> None:
    result = replay([COPY] * 5, sources, Auto(flat()), flat()).to_dict()
    assert result["mat"] > 5
    assert result["speedup"] == pytest.approx(result["mat"], rel=0.06)
    by_depth = result["by_depth"]
    assert result["by_source"]["context"]["accepted"] == sum(count["accepted"] for count in by_depth.values())
    assert result["by_source"]["context"]["drafted"] == sum(count["drafted"] for count in by_depth.values())
    assert by_depth[11]["accepted"] > 0
    assert result["tokens_changed"] == 0
    assert result["worst_name"] == "copy"


def test_the_fields_of_a_recorded_file_tell_its_format(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mt_bench_questions.jsonl").write_text('{"question_id": 1, "turns": ["one?", "two?"]}\n')
    lines = {
        "mt.jsonl": {"question_id": 1, "choices": [{"turns": ["first", "second"]}]},
        "alpaca.jsonl": {"instruction": "do", "output": "done"},
        "batch.jsonl": {
            "custom_id": "a",
            "body": {"messages": [{"role": "user", "content": "hi"}]},
            "response": {"body": {"choices": [{"message": {"content": "hello"}}]}},
        },
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(json.dumps(line) + "\n\n")
    with gzip.open(tmp_path / "code.jsonl.gz", "wt") as file:
        file.write(json.dumps({"task_id": "t/1", "prompt": "def f", "canonical_solution": "(): pass"}))
    with Model.open(tiny_model("llama"), vocab_only=True) as model:
        vocabulary = model.vocabulary

        def text(tokens: list[int]) -> str:
            return b"".join(vocabulary.piece(t) for t in tokens).decode()

        turns = load(tmp_path / "mt.jsonl", vocabulary)
        assert [text(t.answer) for t in turns] == [" first", " second"]
        assert text(turns[1].prompt).endswith("USER: one? ASSISTANT: first</s> USER: two? ASSISTANT:")
        assert [text(r.answer) for r in load(tmp_path / "alpaca.jsonl", vocabulary)] == ["done"]
        assert [(r.name, text(r.prompt)) for r in load(tmp_path / "code.jsonl.gz", vocabulary)] == [("t/1", "def f")]
        assert [(r.name, text(r.answer)) for r in load(tmp_path / "batch.jsonl", vocabulary)] == [("a", "hello")]
