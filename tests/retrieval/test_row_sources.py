"""Fields of JSON Lines, the standard input and chats as sources of text."""

import gzip
import hashlib
import io
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import read

from rest_local.errors import InputInvalid, OptionError
from rest_local.retrieval import Skipped
from rest_local.retrieval.documents import FileState, Text
from rest_local.retrieval.sources import Jsonl, Source, Stdin, Transcripts, Walk, from_recipe, records, source_of
from rest_local.retrieval.sources.recipes import KINDS, can_repeat

OLD = 1_600_000_000_000_000_000
KEY = "AKIA" + "Z" * 16  # joined here, so that no secret scanner reports this file


def rows_of(path: Path, lines: list[Any]) -> Path:
    """Write a JSON Lines file. Texts and bytes are lines as they are."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    data = b"\n".join(encoded) + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    os.utime(path, ns=(OLD, OLD))
    return path.resolve()


def texts_of(source: Source, skipped: Skipped | None = None, **options: Any) -> dict[str, str | None]:
    """Return the texts by the ends of their names."""
    found = list(read(source, skipped or Skipped(), **options))
    return {text.name.rpartition("/")[2]: text.text for text in found}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_document_for_each_row(tmp_path: Path, name: str) -> None:
    path = rows_of(tmp_path / name, [{"text": "one"}, {"text": "tw\u00f6", "n": 1}])
    found = list(read(Jsonl(str(path), "text"), Skipped()))
    digest = hashlib.sha256("twö".encode()).digest()
    assert found[1] == Text(f"{path}:2", "twö", FileState(f"{path}:2", 4, OLD, digest))
    assert found[0].text == "one"


def test_what_is_wrong_with_a_row_is_counted_and_not_fatal(tmp_path: Path) -> None:
    lines = [
        {"text": "good"},
        {"text": 5},
        {"other": "x"},
        ["text"],
        b'{"text": "cut',
        b"[" * 100_000,
        b'{"text": ' + b"1" * 5000 + b"}",
        b"",
        {"text": ""},
        {"text": "a\0b"},
        {"text": f"key = '{KEY}'"},
        {"text": "\ud800 lone"},
        b'{"text": "caf\xe9"}',
        b'\xef\xbb\xbf{"text": "mark"}',
        {"text": "last"},
    ]
    path = rows_of(tmp_path / "a.jsonl", lines)
    skipped = Skipped()
    found = texts_of(Jsonl(str(path), "text"), skipped)
    assert list(found) == ["a.jsonl:1", "a.jsonl:12", "a.jsonl:13", "a.jsonl:14", "a.jsonl:15"]
    assert found["a.jsonl:13"] == "caf\ufffd"
    assert found["a.jsonl:12"] == "\ud800 lone"
    assert dict(skipped.counts) == {
        "without text in the field": 3, "damaged JSON": 3, "empty": 1, "binary": 1, "secret": 1,
    }  # fmt: skip
    assert skipped.secrets == [f"{path}:11"]
    assert f"{path}:11".rpartition("/")[2] in texts_of(Jsonl(str(path), "text", True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("a.b", "nested"),
        ("messages.0.content", "first"),
        ("messages.1.content", None),
        ("dotted.name", "whole"),
        ("a.b.c", None),
        ("messages.-1.content", None),
        ("messages.99999999999999999999.content", None),
        ("messages.\u0661.content", None),
        ("a", None),
    ],
)
def test_dots_lead_into_a_row(field: str, value: str | None) -> None:
    row = {"a": {"b": "nested"}, "messages": [{"content": "first"}], "dotted.name": "whole"}
    found = records.dig(row, field)
    assert (found if isinstance(found, str) else None) == value


def test_a_line_without_end_is_skipped_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_ROW", 10_000)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(200):
            file.write(b'"' + b"x" * 100_000)
        file.write(b'\n{"text": "after"}\n')
    skipped = Skipped()
    tracemalloc.start()
    try:
        assert texts_of(Jsonl(str(path), "text"), skipped) == {"a.jsonl.gz:2": "after"}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert skipped.counts == {"too large": 1}
    assert peak < 2_000_000  # the line has 20 MB


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_of_a_damaged_compressed_file_the_rest_is_counted(tmp_path: Path, damage: str) -> None:
    random = os.urandom(60_000).hex()
    path = rows_of(tmp_path / "a.jsonl.gz", [{"text": "one"}, {"text": random}, {"text": random[::-1]}])
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 255
    path.write_bytes(b"plain" if damage == "no gzip" else data[: len(data) // 2] if damage == "cut" else data)
    skipped = Skipped()
    assert set(texts_of(Jsonl(str(path), "text"), skipped)) <= {"a.jsonl.gz:1", "a.jsonl.gz:2", "a.jsonl.gz:3"}
    assert skipped.counts["damaged: the rest of a file"] + skipped.counts["damaged JSON"] >= 1


def test_unchanged_rows_have_no_text(tmp_path: Path) -> None:
    path = rows_of(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    asked = []

    def unchanged(name: str, size: int, mark: int) -> bool:
        asked.append((name, size, mark))
        return name.endswith(":1")

    first, second = read(Jsonl(str(path), "text"), Skipped(), unchanged)
    assert asked == [(f"{path}:1", 3, OLD), (f"{path}:2", 3, OLD)]
    assert first == Text(f"{path}:1", None, FileState(f"{path}:1", 3, OLD, b""))
    assert second.text == "two"
    path.touch()  # the time is not certain now
    assert [text.text for text in read(Jsonl(str(path), "text"), Skipped(), unchanged)] == ["one", "two"]


def test_a_glob_means_all_files_and_links_loops_and_pipes_are_refused(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        rows_of(tmp_path / name, [{"text": name}])
    source = Jsonl(f"{tmp_path}/*.jsonl", "text")
    assert list(texts_of(source)) == ["a.jsonl:1", "b.jsonl:1"]
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert list(texts_of(Jsonl(f"{tmp_path}/link.jsonl", "text"))) == ["a.jsonl:1"]  # named, so it is followed
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    strange = rows_of(tmp_path / os.fsdecode(b"caf\xe9") / "a.jsonl", [{"text": "x"}])
    assert list(texts_of(Jsonl(str(strange), "text"))) == ["a.jsonl:1"]
    for name in ("fifo.jsonl", "loop.jsonl", "gone.jsonl", "*.none", "", "x" * 5000):
        with pytest.raises(InputInvalid, match="path"):
            read(Jsonl(str(tmp_path / name), "text"), Skipped())


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    return give


def test_the_standard_input(stdin: Callable[[bytes], None]) -> None:
    stdin(b"caf\xe9\n")
    (text,) = read(Stdin(), Skipped())
    assert text == Text("-", "café\n", None)
    stdin(b"")
    assert texts_of(Stdin()) == {}
    skipped = Skipped()
    stdin(f"'{KEY}'".encode())
    assert texts_of(Stdin(), skipped) == {}
    assert skipped.counts == {"secret": 1}
    assert not Stdin().repeatable
    assert Walk(("src",)).repeatable


SOURCES = [
    Walk(("/a", "/b"), include=("*.py",), exclude=("x/",), allow_secrets=True, max_file_size=5),
    Jsonl("/a.jsonl", "a.b"),
    Stdin(),
    source_of({"kind": "chat", "path": "/a.json"}),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.kind)
def test_a_source_survives_its_recipe(source: Source) -> None:
    recipe = json.loads(json.dumps({"sources": [source.to_dict()], "model": "m"}))
    assert from_recipe(recipe) == [source]
    assert can_repeat(recipe) == (source.kind != "stdin")
    assert source.about()
    assert {source.kind for source in SOURCES} == KINDS.keys()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"kind": "torrent"}, "'torrent': not known here; update rest-local .* known: walk, jsonl"),
        ({}, "'None': not known here"),
        ("walk", "not known here"),
        ({"kind": ["walk"]}, "not known here"),
        ({"kind": "walk"}, "paths"),
        ({"kind": "walk", "paths": "src"}, "paths is 'src', not a list of strings"),
        ({"kind": "walk", "paths": [1]}, "not a list of strings"),
        ({"kind": "walk", "paths": ["a"], "includes": []}, "unknown field 'includes'"),
        ({"kind": "walk", "paths": ["a"], "max_file_size": True}, "max_file_size is 'True', not of type int"),
        ({"kind": "walk", "paths": ["a"], "max_file_size": 0}, "at least 1 byte"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(given: Any, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        source_of(given)
    assert not can_repeat({"sources": [given]})


# ---- Conversations -------------------------------------------------------------------------------------------------


def asked(answer: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}], **more}


def chats_in(path: Path, content: Any, skipped: Skipped | None = None) -> dict[str, str | None]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    found = read(Transcripts(str(path)), skipped or Skipped())
    return {text.name.removeprefix(f"{path.resolve()}:"): text.text for text in found}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", asked("x"), {"1#1": "x"}),
        ("a.json", asked("x", system="s", format=1), {"1#1": "x"}),
        ("a.json", json.dumps(asked("x"), indent=1), {"1#1": "x"}),
        ("a.json", [asked("x"), asked("y")], {"1.1#1": "x", "1.2#1": "y"}),
        ("a.json", json.dumps([asked("x"), asked("y")], indent=1), {"1#1": "x", "2#1": "y"}),
        ("a.json", json.dumps(asked("x")["messages"], indent=1), {"1#1": "x"}),
        (
            "a.jsonl",
            f"{json.dumps(asked('x'))}\n\n{json.dumps(asked('y'))}\n",
            {"1#1": "x", "3#1": "y"},
        ),
        ("a.jsonl", f"{json.dumps(asked('x')['messages'] * 2)}\n", {"1#1": "x", "1#2": "x"}),
        ("a.chats", f"{json.dumps(asked('x', tools=[]))}\n", {"1#1": "x"}),
        ("a.json", asked([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]), {"1#1": "x\ny"}),
        ("a.json", "", {}),
    ],
)
def test_the_conversations_of_a_file(tmp_path: Path, name: str, content: Any, expected: dict[str, str]) -> None:
    assert chats_in(tmp_path / name, content) == expected


def test_what_is_wrong_is_counted_and_not_fatal(tmp_path: Path) -> None:
    rows = [
        asked("good"),
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
    assert list(chats_in(tmp_path / "a.jsonl", lines, skipped)) == ["1#1", "10#1"]
    counts = {"secret": 1, "without messages": 5, "damaged JSON": 1}
    assert dict(skipped.counts) == counts
    skipped = Skipped()
    assert chats_in(tmp_path / "a.json", "{\n", skipped) == chats_in(tmp_path / "b.json", "[" * 99_999, skipped) == {}
    assert skipped.counts["damaged JSON"] == 2
