"""`rest-local index build` from sources of every kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from index_calls import answer, call, replace_models

from rest_local.cli.index.build import described_sources, row_source
from rest_local.errors import DatastoreError, InputInvalid, OptionError
from rest_local.retrieval import Datastore, datastore_path
from rest_local.retrieval.sources import Jsonl


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory, with a byte vocabulary in place of a model's."""
    replace_models(monkeypatch, tmp_path)
    return tmp_path.resolve()


def build(*arguments: str, **options: Any) -> dict[str, Any]:
    return answer("build", *arguments, **options)


def names(name: str = "default") -> list[str]:
    with Datastore.open(datastore_path(name)) as store:
        return [Path(document).name for document in store.document_names()]


def test_several_sources_in_one_datastore(home: Path) -> None:
    (home / "src").mkdir()
    (home / "src" / "a.py").write_text("import os\n")
    (home / "rows.jsonl").write_text('{"text": "one"}\n{"no": 1}\n')
    built = build("-", "rows.jsonl:text", "src", "--exclude", "b.py", stdin="typed\n")
    assert names() == ["a.py", "rows.jsonl:1", "-"]
    assert (built["documents"], built["skipped"]) == (3, {"without text in the field": 1})
    info = call("info", "default").stdout
    assert f"source      {home}/src (exclude b.py)\n" in info
    assert f"source      {home}/rows.jsonl:text\n" in info
    with pytest.raises(DatastoreError, match="the standard input, which cannot be read again"):
        call("rebuild", "default", "--replace")


def test_a_datastore_is_built_again_from_its_sources(home: Path) -> None:
    (home / "a.py").write_text("import os\n")
    build(".", "--include", "*.py", "-o", "mine")
    (home / "b.py").write_text("import sys\n")
    (home / "c.md").write_text("x\n")
    assert answer("rebuild", "mine", "--replace")["documents"] == 2
    assert described_sources({"sources": [{"kind": "torrent"}]}) == ['[{"kind": "torrent"}]']


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        (["a.jsonl:x"], InputInvalid, r"a\.jsonl: no such file"),
        (["gone"], InputInvalid, "no such file"),
        ([".", "--memory=300M"], OptionError, "memory of 300 MB: at least"),
    ],
)
def test_wrong_sources_are_named(arguments: list[str], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        call("build", *arguments)
    assert not datastore_path("default").exists()


def test_names_with_colons(home: Path) -> None:
    assert row_source("a/b.jsonl.gz:a.b") == Jsonl("a/b.jsonl.gz", "a.b")
    assert row_source("a.py:x") is row_source("a.jsonl") is row_source("a.jsonl:") is None
    (home / "a.jsonl:x").write_text("a file with this very name\n")
    build("a.jsonl:x")
    assert names() == ["a.jsonl:x"]


def test_a_chat_gives_what_the_assistant_wrote(home: Path) -> None:
    messages = [{"role": "user", "content": "What is <b>?"}, {"role": "assistant", "content": "It is bold."}]
    (home / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    build("--chat", "a.jsonl", "-o", "chats")
    assert names("chats") == ["a.jsonl:1#1"]
