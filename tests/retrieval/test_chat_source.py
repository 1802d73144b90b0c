"""Transcripts in OpenAI's message form: the conversations of a file, and what a caller's renderer makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import read

from rest_local.errors import TemplateFailed
from rest_local.retrieval import Skipped, build_from_texts
from rest_local.retrieval.documents import Text, tokens_of
from rest_local.retrieval.sources import Chat

KEY = "AKIA" + "Z" * 16  # joined here, so that no secret scanner reports this file


def render(messages: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, bool], ...]]:
    """The roles before each turn and its text, as three parts."""
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            if message.get("content") == "refused":
                raise TemplateFailed("no")
            before = "".join(other["role"][0] for other in messages[:number])
            turns.append(((f"<{before}>", True), (message["content"], False), ("<end>", True)))
    return turns


def asked(answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}], **more}


def texts_of(path: Path, content: Any, skipped: Skipped | None = None) -> dict[str, str | None]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    found = read(Chat(str(path)), skipped or Skipped(), render=render)
    return {text.name.removeprefix(f"{path.resolve()}:"): text.text for text in found}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", asked("x"), {"1#1": "<u>x<end>"}),
        ("a.json", asked("x", system="s", format=1), {"1#1": "<su>x<end>"}),
        ("a.json", json.dumps(asked("x"), indent=1), {"1#1": "<u>x<end>"}),
        ("a.json", [asked("x"), asked("y")], {"1.1#1": "<u>x<end>", "1.2#1": "<u>y<end>"}),
        ("a.json", json.dumps([asked("x"), asked("y")], indent=1), {"1#1": "<u>x<end>", "2#1": "<u>y<end>"}),
        ("a.json", json.dumps(asked("x")["messages"], indent=1), {"1#1": "<u>x<end>"}),
        (
            "a.jsonl",
            f"{json.dumps(asked('x'))}\n\n{json.dumps(asked('y'))}\n",
            {"1#1": "<u>x<end>", "3#1": "<u>y<end>"},
        ),
        ("a.jsonl", f"{json.dumps(asked('x')['messages'] * 2)}\n", {"1#1": "<u>x<end>", "1#2": "<uau>x<end>"}),
        ("a.chats", f"{json.dumps(asked('x', tools=[]))}\n", {"1#1": "<u>x<end>"}),
        ("a.json", "", {}),
    ],
)
def test_the_conversations_of_a_file(tmp_path: Path, name: str, content: Any, expected: dict[str, str]) -> None:
    assert texts_of(tmp_path / name, content) == expected


def test_what_is_wrong_is_counted_and_not_fatal(tmp_path: Path) -> None:
    rows = [
        asked("good"),
        asked("refused"),
        asked(f"'{KEY}'"),
        {"messages": "x"},
        {"messages": [5]},
        {"messages": [{"content": "no role"}]},
        [],
        5,
        {"text": "no chat"},
    ]
    skipped = Skipped()
    lines = "\n".join([*map(json.dumps, rows), "{cut", json.dumps(asked("last"))])
    assert list(texts_of(tmp_path / "a.jsonl", lines, skipped)) == ["1#1", "11#1"]
    counts = {"refused by the chat template": 1, "secret": 1, "without messages": 5, "damaged JSON": 1}
    assert dict(skipped.counts) == counts
    skipped = Skipped()
    assert texts_of(tmp_path / "a.json", "{\n", skipped) == texts_of(tmp_path / "b.json", "[" * 99_999, skipped) == {}
    assert skipped.counts["damaged JSON"] == 2


def test_a_turn_has_parts_and_a_state_that_asks_for_its_content(tmp_path: Path) -> None:
    path = (tmp_path / "a.json").resolve()
    path.write_text(json.dumps(asked("x")))
    os.utime(path, (1e9, 1e9))
    (text,) = read(Chat(str(path)), Skipped(), lambda name, size, mark: True, render=render)
    assert text.parts == (("<u>", True), ("x", False), ("<end>", True))
    assert text.text == "<u>x<end>"
    assert text.state is not None
    assert text.state[:3] == (f"{path}:1#1", 9, 0)  # another template could have written another text


def test_each_part_is_tokenized_on_its_own(tmp_path: Path) -> None:
    class Tokenizer:
        name, size, hash = "t", 300, "c0" * 32

        def tokenize(self, text: str, *, special: bool = False) -> np.ndarray:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            return np.array([299], np.int32) if special and text == "<end>" else ids

    text = Text("n", "a<end><end>", None, (("a", True), ("<end>", False), ("<end>", True)))
    assert tokens_of(text, Tokenizer().tokenize).tolist() == [*b"a<end>", 299]
    assert tokens_of(Text("n", "<end>\ud800"), Tokenizer().tokenize).tolist() == [*"<end>\ufffd".encode()]
    assert build_from_texts(tmp_path / "s", [text], vocabulary=Tokenizer()).tokens == 8
